"""The tracer: lives in the training process, records spans, never hurts the job."""

import tracer.graphs as _graphs  # noqa: F401 - for what it tells the compiler
import tracer.span as _span_module  # noqa: F401 - first, so that `span` below stays the function
from tracer.current import (
    begin_steps,
    current_tracer,
    event,
    microbatch,
    record_exception,
    shutdown,
    span,
    step,
)
from tracer.decorator import traced
from tracer.install import install
from tracer.noop import NOOP_TRACER
from tracer.protocol import Tracer
from tracer.span import NONE, SpanFlag, SpanKind

__all__ = [
    "NONE",
    "NOOP_TRACER",
    "SpanFlag",
    "SpanKind",
    "Tracer",
    "begin_steps",
    "current_tracer",
    "event",
    "install",
    "microbatch",
    "record_exception",
    "shutdown",
    "span",
    "step",
    "traced",
]
