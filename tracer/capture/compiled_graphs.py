"""What `torch.compile` makes of what a job calls of the tracer.

It cannot look into a span, which is compiled already: that would break the
job's graph (an error with ``fullgraph=True``) even where nothing is traced. So
a span by hand in a graph is nothing. What tells of a step must be called each
time: it breaks the graph where a tracer is installed, once and without a
warning of what it found within, which a job may have made an error.
"""

from __future__ import annotations

import contextlib
import sys

from ..record.current import span
from ..record.recorder import Recorder
from .after_import import COMPILER_MODULE, once_loaded

CALL_OUTSIDE = "what tells the tracer of a step cannot be in a graph: call it outside"

_replaced: set[object] = set()
"""Functions that the compiler knows a replacement of: for good, whoever was installed then."""


def no_span(
    name: object, kind: object = None, microbatch: object = None, chunk: object = None
) -> contextlib.AbstractContextManager[None]:
    """Return what the compiler takes in the place of `tracer.span`: it compiles to nothing."""
    return contextlib.nullcontext()


def tell_compiler() -> None:
    """Tell the compiler of `no_span`, where it is loaded; a second call does nothing."""
    replace = getattr(sys.modules.get(COMPILER_MODULE), "substitute_in_graph", None)
    if replace is not None and span not in _replaced:
        replace(span)(no_span)
        _replaced.add(span)


for method in (
    Recorder.begin_steps,
    Recorder.step,
    Recorder.microbatch,
    Recorder.event,
    Recorder.record_exception,
    Recorder.shutdown,
):  # as `torch.compiler.disable` does, which would load the compiler
    setattr(method, "_torchdynamo_disable", True)  # noqa: B010 - the type has no such attribute
    setattr(method, "_torchdynamo_disable_msg", CALL_OUTSIDE)  # noqa: B010
once_loaded(tell_compiler)
