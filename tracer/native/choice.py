"""The choice between the extension ``_hot`` and its Python counterparts; the only place for it.

The C files of this folder are compiled into ``_hot`` at installation if there is a C compiler.
Without one, without the GIL, on a big-endian machine or with ``RANKSCOPE_PURE_PYTHON=1`` the
Python modules of this folder do the same, and a `tracer.span` takes seven times as long.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from typing import TYPE_CHECKING

from .host_launch import HostLaunch
from .host_span import (
    ComputeSpan,
    Finder,
    ReadySpan,
    SpanContext,
    SpanFunction,
    do_nothing,
    fast_span,
    make_context,
    set_finder,
)
from .lane_state import DropCount, LaneState, numbers

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

__all__ = [
    "ComputeSpan",
    "DropCount",
    "Finder",
    "HostLaunch",
    "LaneState",
    "ReadySpan",
    "do_nothing",
    "fast_span",
    "frames_of_threads",
    "numbers",
    "set_finder",
]
"""The names that the extension provides."""

FrameLine = tuple["CodeType", int | None]
"""The code object of a frame and its current line number, None if unknown."""


def frames_of_threads(max_frames: int, /) -> list[tuple[int, list[FrameLine]]]:
    """Return the Python stack of each thread except the calling one, by `threading.get_ident`.

    Args:
        max_frames: Maximum number of frames per thread, innermost first.
    """
    # Until Python 3.12 the garbage collector may run while a frame object is made and let another
    # thread run: the requested frame may then be gone, and the interpreter reads freed memory. See
    # docs/decisions/0067-stacks-of-others.md.
    mine, was_enabled = threading.get_ident(), gc.isenabled()
    gc.disable()
    try:
        return [
            (ident, _lines(frame, max_frames))
            for ident, frame in sys._current_frames().items()
            if ident != mine
        ]
    finally:
        if was_enabled:
            gc.enable()


def _lines(frame: FrameType | None, max_frames: int) -> list[FrameLine]:
    lines: list[FrameLine] = []
    while frame is not None and len(lines) < max_frames:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return lines


if not TYPE_CHECKING and os.environ.get("RANKSCOPE_PURE_PYTHON", "0") in {"", "0"}:
    with contextlib.suppress(ImportError, AttributeError):
        from . import _hot

        # All or nothing: an extension built from another version may lack a name.
        globals().update({name: getattr(_hot, name) for name in __all__})

IS_COMPILED = ReadySpan.__module__ == "rankscope.tracer.native._hot"
"""Whether spans are entered and left by compiled code."""


def accelerated(disabled: SpanContext) -> Callable[[SpanFunction], SpanFunction]:
    """Return a decorator that makes the compiled `tracer.span` from its Python function.

    Args:
        disabled: The span that is returned while nothing is recorded.
    """

    def accelerate(plain: SpanFunction) -> SpanFunction:
        code = plain.__code__
        name, *options = code.co_varnames[: code.co_argcount]
        signature = ", ".join([name, *(f"{option}=None" for option in options)])
        text = f"{plain.__name__}({signature})\n--\n\n{plain.__doc__}"
        return fast_span(plain, disabled, text)

    return accelerate


def ready_span(lane: LaneState, head: int) -> ReadySpan:
    """Return a reusable span of a lane's thread.

    Args:
        head: `tracer.record.lane.head_word` of the record.
    """
    ready = ReadySpan(lane, head)
    if not IS_COMPILED:
        ready.span = make_context(ready.enter, ready.leave)
    return ready
