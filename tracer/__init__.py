"""The tracer: lives in the training process, records spans, never hurts the job."""

from . import span as _span_module  # noqa: F401 - first, so that `span` below stays the function
from .capture import compiled_graphs as _graphs  # noqa: F401 - for what it tells the compiler
from .install import install
from .record.current import (
    begin_steps,
    current_tracer,
    event,
    microbatch,
    record_exception,
    shutdown,
    span,
    step,
    traced,
)
from .record.interface import NOOP_TRACER, Tracer
from .span import NONE, SpanFlag, SpanKind

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
