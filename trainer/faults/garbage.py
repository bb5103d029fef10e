"""A heap so large that collecting its garbage takes a set time, and that collection."""

from __future__ import annotations

import gc
import time

FIRST_OBJECTS = 100_000
MAX_OBJECTS = 3_000_000
"""About 220 MB; where collecting them takes less than the pause, several collections follow."""


class GarbageHeap:
    """Live objects that every full collection has to look at.

    Args:
        pause_ns: How long a collection is to take.
    """

    def __init__(self, pause_ns: int) -> None:
        self._pause_ns = pause_ns
        self._objects: list[list[object]] = []
        self._grow(FIRST_OBJECTS)
        took_ns = _collection_ns()
        wanted = round(FIRST_OBJECTS * pause_ns / max(took_ns, 1))
        self._grow(min(max(wanted, FIRST_OBJECTS), MAX_OBJECTS) - FIRST_OBJECTS)
        gc.collect()

    def collect(self, *, is_seen: bool) -> None:
        """Collect garbage for at least nine tenths of the pause.

        Args:
            is_seen: Whether Python's callbacks are told, and so the tracer; else
                the pause is a gap in the trace.
        """
        hidden = [] if is_seen else gc.callbacks[:]
        if hidden:
            gc.callbacks.clear()
        try:
            until_ns = time.monotonic_ns() + self._pause_ns * 9 // 10
            gc.collect()
            while time.monotonic_ns() < until_ns:
                gc.collect()
        finally:
            gc.callbacks.extend(hidden)

    def _grow(self, num_objects: int) -> None:
        # A collection of half a heap tells nothing, and building would set off many.
        was_enabled = gc.isenabled()
        gc.disable()
        self._objects.extend([] for _ in range(num_objects))
        if was_enabled:
            gc.enable()


def _collection_ns() -> int:
    """Return what a full collection takes of this thread's CPU: other ranks share the core."""
    gc.collect()
    begin_ns = time.thread_time_ns()
    gc.collect()
    return time.thread_time_ns() - begin_ns
