"""The tracer: records spans inside the training process, without harm to the job."""

from . import span as _span_module  # noqa: F401 - first, so that `span` below remains the function
from .capture import compilation as _compilation  # noqa: F401 - registers with torch.compile
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
