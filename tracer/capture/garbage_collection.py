"""Pauses of Python's garbage collector.

Python ignores an exception that a signal handler of the job raises while a callback of the
collector runs. A signal that arrives during a collection is handled at the first line of Python
after it, which would be in the callback. A callback in Python would thus lose an exception of the
job (an interrupt, a deadline) whenever one falls into a pause. This callback consists of C
functions only, in which no handler can run. It appends to a `deque` that the background thread
reads.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
from collections import deque
from time import monotonic_ns
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..native.lane_state import PLACE
from ..span import NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..record.recorder import Recorder

MIN_PAUSE_NS = 1_000_000
"""A shorter pause explains nothing, and there are thousands of them."""

MAX_NOTES = 2048
"""Notes kept between two turns of the background thread, two per collection."""

PLACE_FIELDS = ("step", "microbatch", "chunk", "track_id", "depth")
"""Attributes that are read of the `tracer.record.lane.Lane` of the collecting thread."""

NO_LANE = SimpleNamespace(step=NONE, microbatch=NONE, chunk=NONE, depth=0)


def capture_garbage(recorder: Recorder, *, min_pause_ns: int = MIN_PAUSE_NS) -> Callable[[], None]:
    """Record a span of each collection that takes ``min_pause_ns`` or more.

    Returns:
        A function that removes the callback and writes what is left.
    """
    notes: deque[Any] = deque(maxlen=MAX_NOTES)
    callback = _make_callback(recorder, notes.append)
    pauses = _Pauses(recorder, notes, min_pause_ns)
    gc.callbacks.append(callback)
    recorder.on_tick(pauses.write)

    def remove_hooks() -> None:
        if callback in gc.callbacks:
            gc.callbacks.remove(callback)
        pauses.write()

    return remove_hooks


def _make_callback(recorder: Recorder, append: Callable[[object], None]) -> Callable[..., object]:
    """Return a callback of the collector that runs no line of Python.

    It reads the phase as an attribute, which calls a C function. At ``start`` that function appends
    the time; at ``stop`` the time, the lane's `PLACE_FIELDS`, and the collector's counts.
    """
    no_lane = SimpleNamespace(**vars(NO_LANE), track_id=recorder.name_id("main"))
    threads = itertools.repeat(recorder.lanes.threads)
    lanes = map(getattr, threads, itertools.repeat("lane"), itertools.repeat(no_lane))
    places = map(operator.attrgetter(*PLACE_FIELDS), lanes)
    started: Iterator[object] = iter(monotonic_ns, None)
    stopped = zip(iter(monotonic_ns, None), places, iter(gc.get_stats, None), strict=True)
    # `next` takes the object whose attribute is read as its default.
    phases = {
        "start": property(functools.partial(next, map(append, started))),
        "stop": property(functools.partial(next, map(append, stopped))),
    }
    return functools.partial(getattr, type("Phases", (), phases)())


class _Pauses:
    def __init__(self, recorder: Recorder, notes: deque[Any], min_pause_ns: int) -> None:
        self._recorder = recorder
        self._notes = notes
        self._least_pause_ns = min_pause_ns
        self._start_ns: int | None = None
        self._counts = _counts(gc.get_stats())

    def write(self) -> None:
        """Write the pauses that have ended since the last call; count errors of the tracer."""
        while True:
            try:
                note = self._notes.popleft()
            except IndexError:  # none left; a shutdown may run at the same time
                return
            try:
                self._read(note)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                self._recorder.swallow(problem)

    def _read(self, note: Any) -> None:  # noqa: ANN401 - a time, or the three values at the end
        if isinstance(note, int):
            self._start_ns = note
            return
        end_ns, place, stats = note
        before, self._counts = self._counts, _counts(stats)
        start_ns, self._start_ns = self._start_ns, None
        if start_ns is not None and end_ns - start_ns >= self._least_pause_ns:
            grown = [at for at, num in enumerate(before) if self._counts[at] > num]
            *where, depth = place
            head = self._recorder.head(f"gc generation {max(grown, default=0)}", SpanKind.GC)
            self._recorder.comm_lane.append(
                head, start_ns, end_ns - start_ns, PLACE.pack(*where), start_ns, depth
            )


def _counts(stats: list[dict[str, int]]) -> list[int]:
    """Return the number of collections of each generation."""
    return [generation["collections"] for generation in stats]
