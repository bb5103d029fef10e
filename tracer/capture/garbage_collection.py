"""Pauses of Python's garbage collector.

What a signal handler of the job raises while a callback of the collector runs,
Python ignores; and a signal that came during the collection is handled at the
first line of the callback after it. A callback in Python would so take away a
job's own exception (an interrupt, a deadline) as often as one meets a pause.
Ours is made of functions of C alone, in which no handler can run: it puts what
it finds into a `deque`, which the background thread reads.
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
"""Notes held between two turns of the background thread, two a collection."""

PLACE_FIELDS = ("step", "microbatch", "chunk", "track_id", "depth")
"""What is asked of the `tracer.record.lane.Lane` of the thread that collects."""

NO_LANE = SimpleNamespace(step=NONE, microbatch=NONE, chunk=NONE, depth=0)


def capture_garbage(recorder: Recorder, *, min_pause_ns: int = MIN_PAUSE_NS) -> Callable[[], None]:
    """Make a span of each collection that takes ``min_pause_ns`` or more.

    Returns:
        A function that takes the callback off again and writes what is left.
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
    """Return a callback of the collector's: no line of Python runs in it.

    It looks up the phase as an attribute, which calls a C function. At ``start`` that
    appends the moment; at ``stop`` the moment, the lane's `PLACE_FIELDS`, and the
    collector's counts.
    """
    no_lane = SimpleNamespace(**vars(NO_LANE), track_id=recorder.name_id("main"))
    threads = itertools.repeat(recorder.lanes.threads)
    lanes = map(getattr, threads, itertools.repeat("lane"), itertools.repeat(no_lane))
    places = map(operator.attrgetter(*PLACE_FIELDS), lanes)
    started: Iterator[object] = iter(monotonic_ns, None)
    stopped = zip(iter(monotonic_ns, None), places, iter(gc.get_stats, None), strict=True)
    # `next` takes the object whose attribute is asked for as its default.
    phases = {
        "start": property(functools.partial(next, map(append, started))),
        "stop": property(functools.partial(next, map(append, stopped))),
    }
    return functools.partial(getattr, type("Phases", (), phases)())


class _Pauses:
    """Makes spans of what the callback has noted."""

    def __init__(self, recorder: Recorder, notes: deque[Any], min_pause_ns: int) -> None:
        self._recorder = recorder
        self._notes = notes
        self._least_pause_ns = min_pause_ns
        self._start_ns: int | None = None
        self._counts = _counts(gc.get_stats())

    def write(self) -> None:
        """Write the pauses that have ended since the last call; an error of ours is counted."""
        while True:
            try:
                note = self._notes.popleft()
            except IndexError:  # none left; goodbye may come in the midst of a turn
                return
            try:
                self._read(note)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                self._recorder.swallow(problem)

    def _read(self, note: Any) -> None:  # noqa: ANN401 - a moment, or what is known at the end
        if isinstance(note, int):
            self._start_ns = note
            return
        end_ns, place, stats = note
        before, self._counts = self._counts, _counts(stats)
        start_ns, self._start_ns = self._start_ns, None
        if start_ns is not None and end_ns - start_ns >= self._least_pause_ns:
            grown = [at for at, num in enumerate(before) if self._counts[at] > num]
            self._append(start_ns, end_ns, place, max(grown, default=0))

    def _append(self, start_ns: int, end_ns: int, place: tuple[int, ...], generation: int) -> None:
        *where, depth = place
        self._recorder.comm_lane.append(
            self._recorder.head(f"gc generation {generation}", SpanKind.GC),
            start_ns,
            end_ns - start_ns,
            PLACE.pack(*where),
            start_ns,
            depth,
        )


def _counts(stats: list[dict[str, int]]) -> list[int]:
    """Return how often each generation was collected."""
    return [generation["collections"] for generation in stats]
