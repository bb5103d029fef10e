"""Frames of the Python code in which a process was, from its events."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import FLIGHT_RECORDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LIBRARY = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python\d|/rankscope/tracer/")
"""Places of frames that are not of the job's own code."""

TRACEBACK_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def read_frames(kind: str, data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the frames of an event, innermost first: "train.py:70 main".

    They are those of the main thread in a long step (event ``stack``), of the exception that ended
    the process (``exit``), or of the last communication that was called (``flight-recorder``).
    Other events have none, nor have malformed ones.
    """
    if kind in {FLIGHT_RECORDER, "stack"}:
        threads = data.get("threads") if kind == "stack" else [data.get("last")]
        main = threads[0] if isinstance(threads, list) and threads else None
        frames = main.get("frames") if isinstance(main, dict) else None
        return tuple(map(str, frames)) if isinstance(frames, list) else ()
    exception = data.get("exception") if kind == "exit" else None
    traceback = exception.get("traceback") if isinstance(exception, dict) else None
    found = TRACEBACK_FRAME.findall(str(traceback or ""))
    return tuple(f"{file}:{line} {name}" for file, line, name in reversed(found))


def find_own_frame(frames: Iterable[str]) -> str:
    """Return the innermost frame of the job's own code; "" if all are of libraries."""
    return next((frame for frame in frames if not LIBRARY.search(frame)), "")
