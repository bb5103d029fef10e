"""The hottest lines of the tracer: compiled ones where this interpreter has them, else Python.

`tracer/native/_hot.c` is built while the package is installed, if there is a C compiler. Without
one, without the GIL, or with ``RANKSCOPE_PURE_PYTHON=1`` the other modules of this package do the
same in Python, and a span by hand takes seven times the time.
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
    Enterable,
    Finder,
    ReadySpan,
    Span,
    compute_span,
    do_nothing,
    enterable,
    fast_span,
    set_finder,
)
from .lane_state import DropCount, LaneState, numbers

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

FrameLine = tuple["CodeType", int | None]
"""What a frame runs, and which line of it; None: of no line."""


def frames_of_threads(most: int, /) -> list[tuple[int, list[FrameLine]]]:
    """Return the Python stack of each thread but the calling one, by `threading.get_ident`.

    Args:
        most: Frames of a thread that are told, innermost first.
    """
    mine, was_enabled = threading.get_ident(), gc.isenabled()
    gc.disable()
    try:
        return [
            (ident, _lines(frame, most))
            for ident, frame in sys._current_frames().items()
            if ident != mine
        ]
    finally:
        if was_enabled:
            gc.enable()


def _lines(frame: FrameType | None, most: int) -> list[FrameLine]:
    lines: list[FrameLine] = []
    while frame is not None and len(lines) < most:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return lines


if not TYPE_CHECKING and os.environ.get("RANKSCOPE_PURE_PYTHON", "0") in {"", "0"}:
    # All at once: of an extension that another version built, which lacks a name, none is taken.
    with contextlib.suppress(ImportError, AttributeError):
        from . import _hot

        (
            DropCount,
            Finder,
            HostLaunch,
            LaneState,
            ReadySpan,
            compute_span,
            do_nothing,
            fast_span,
            frames_of_threads,
            numbers,
            set_finder,
        ) = (
            _hot.DropCount,
            _hot.Finder,
            _hot.HostLaunch,
            _hot.LaneState,
            _hot.ReadySpan,
            _hot.compute_span,
            _hot.do_nothing,
            _hot.fast_span,
            _hot.frames_of_threads,
            _hot.Numbers,
            _hot.set_finder,
        )

IS_COMPILED = ReadySpan.__module__ == "rankscope.tracer.native._hot"
"""Whether spans are entered and left by compiled code."""

__all__ = [
    "IS_COMPILED",
    "DropCount",
    "Finder",
    "HostLaunch",
    "LaneState",
    "ReadySpan",
    "compute_span",
    "do_nothing",
    "fast_span",
    "frames_of_threads",
    "numbers",
    "ready_span",
    "set_finder",
]


def accelerated(unrecorded: Enterable) -> Callable[[Span], Span]:
    """Return what makes `tracer.span` of a function in Python that takes a name and options.

    Args:
        unrecorded: What it returns where nobody records.
    """

    def quicken(plain: Span) -> Span:
        code = plain.__code__
        name, *options = code.co_varnames[: code.co_argcount]
        signature = ", ".join([name, *(f"{option}=None" for option in options)])
        text = f"{plain.__name__}({signature})\n--\n\n{plain.__doc__}"
        return fast_span(plain, unrecorded, text)

    return quicken


def ready_span(lane: LaneState, head: int) -> ReadySpan:
    """Return a span that its lane's thread may enter over and over, once at a time.

    Args:
        lane: The thread's own.
        head: `tracer.record.lane.head_word` of its record.
    """
    ready = ReadySpan(lane, head)
    if not IS_COMPILED:
        ready.span = enterable(ready.enter, ready.leave)
    return ready
