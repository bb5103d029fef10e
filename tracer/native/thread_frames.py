"""Where each thread of this process stands, in Python; `tracer/native/_hot.c` does the same.

Until Python 3.12 the collector may run while a frame object is made, and what it runs may let
another thread go on: the frame that was asked for is gone then, and the interpreter reads what
lies in its place. So the collector rests meanwhile: docs/decisions/0067-stacks-of-others.md.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType, FrameType

Line = tuple["CodeType", int | None]
"""What a frame runs, and which line of it; None: of no line."""


def frames_of_threads(most: int, /) -> list[tuple[int, list[Line]]]:
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


def _lines(frame: FrameType | None, most: int) -> list[Line]:
    lines: list[Line] = []
    while frame is not None and len(lines) < most:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return lines
