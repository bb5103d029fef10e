"""Lanes: the sequences of segments into which threads write their records.

`Lane` writes records, `Lanes` gives each thread its lane, and `OpenSpans` enters long spans into
the open table. Nothing that a training thread calls here blocks or does I/O.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from operator import length_hint
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import is_tracer_error
from ..native.choice import Finder, LaneState, ready_span
from ..native.host_span import HostSpan
from ..native.lane_state import ERROR_HEAD, PLACE
from ..span import NONE
from ..spool import DropReason, RecordType
from .segment import NO_SEGMENT, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ..native.choice import ReadySpan
    from ..native.host_span import SpanContext
    from ..native.lane_state import OpenEntry
    from .process_file import ProcessFile
    from .sampling import Sampling
    from .segment_pool import SegmentPool


MAX_LANES = 64
"""Number of threads with a lane of their own; further threads share the last lane."""

MAX_READY = 1024
"""Number of reusable spans in all threads together, 2 MiB at most. Others are made per call."""

SHOW_AFTER_NS = 200_000_000
"""Age at which a span enters the open table.

A shorter span explains no hang, and an entry costs more than a record.
"""


def head_word(record_type: RecordType, *, kind: int, flags: int, name_id: int) -> int:
    """Return the head word of a record: type, kind, flags and name id, its first eight bytes."""
    return record_type | kind << 8 | flags << 16 | name_id << 32


class Lane(LaneState):
    """The records of one thread, or of several threads that share it: each row is claimed once."""

    __slots__ = (
        "_num_in_sealed",
        "_process",
        "_turning",
        "_wake",
        "number",
        "pool",
        "ready",
        "ready_by_name",
        "sampling",
    )

    segment: Segment
    pool: SegmentPool

    def __init__(
        self,
        number: int,
        *,
        track_id: int,
        pool: SegmentPool,
        process: ProcessFile,
        sampling: Sampling,
        wake: Callable[[], None],
    ) -> None:
        self.number = number
        self.track_id = track_id
        self.depth = 0
        self._num_in_sealed = 0
        self.segment = NO_SEGMENT
        self.ready: dict[int, ReadySpan] = {}
        """Reusable spans of this lane's thread, by `head_word`."""

        self.ready_by_name: dict[str, ReadySpan] = {}
        """Those of them that `Lanes.finder` finds by name."""

        self.pool = pool
        self._process = process
        self.sampling = sampling
        self._wake = wake
        self._turning = threading.Lock()
        self.set_place(NONE, NONE, NONE)

    def place_of(
        self, microbatch: int = NONE, chunk: int = NONE, *, track_id: int | None = None
    ) -> bytes:
        """Return a place with these values; those not given are the lane's."""
        return PLACE.pack(
            self.step,
            self.microbatch if microbatch == NONE else microbatch,
            self.chunk if chunk == NONE else chunk,
            self.track_id if track_id is None else track_id,
        )

    def write_in_next_segment(  # noqa: PLR0913 - as `write`
        self,
        head: int,
        start_ns: int,
        duration_ns: int,
        place: bytes,
        launch_ns: int,
        depth: int,
        second: bytes | None,
    ) -> None:
        """Write a record in the next segment, if there is one, because this one is full."""
        segment = self.segment
        if not length_hint(segment.rows):
            segment = self._turn(segment)
        if length_hint(segment.rows):
            self.write(head, start_ns, duration_ns, place, launch_ns, depth, second)
        else:
            self.pool.drops.add()

    def open_in_first(self, start_ns: int, head: int, comm: tuple[int, ...]) -> OpenEntry | None:
        """Enter a span into the open table of the first segment, if the lane has none yet."""
        segment = self.segment
        if segment is NO_SEGMENT:
            segment = self._turn(segment)
        return self.open(start_ns, head, comm) if segment.open_slots else None

    def leave_slowly(self, ready: ReadySpan, start_ns: int | None, is_error: bool) -> None:  # noqa: FBT001 - called by C too
        """Write a span that ends now and is left by an exception or finds the segment full.

        Args:
            ready: The span.
            start_ns: Start, monotonic; None if it was never entered or was left before.
            is_error: Whether an exception left it.
        """
        end_ns = monotonic_ns()
        if start_ns is None:
            return
        head = ready.head | ERROR_HEAD if is_error else ready.head
        self.write(head, start_ns, end_ns - start_ns, ready.place, start_ns, self.depth)

    def swallow(self, problem: BaseException) -> None:
        """Count an error of the tracer; raise one of the job.

        Raises:
            BaseException: ``problem`` itself, if a signal handler of the job raised it.
        """
        if not is_tracer_error(problem):
            raise problem
        out_of_memory = isinstance(problem, MemoryError)
        self._process.drop(DropReason.OUT_OF_MEMORY if out_of_memory else DropReason.INTERNAL_ERROR)

    def seal(self) -> None:
        """Seal the segment: no record follows."""
        segment, self.segment = self.segment, NO_SEGMENT
        segment.seal()
        self._num_in_sealed += segment.num_claimed()

    def num_claimed(self) -> int:
        """Return the number of rows that this lane has claimed in all its segments."""
        return self._num_in_sealed + self.segment.num_claimed()

    def detach(self) -> None:
        """Stop writing to files, in a forked child."""
        self.segment.detach()
        self.segment = NO_SEGMENT

    def _turn(self, full: Segment) -> Segment:
        """Continue in the next segment; if there is none, stay in the full one."""
        # Does not wait: a second caller (a thread that shares the lane, or a signal handler that
        # interrupted this line) drops its record instead.
        if not self._turning.acquire(blocking=False):
            return self.segment
        try:
            if self.segment is full and (fresh := self.pool.take()) is not None:
                fresh.assign_to(self.number)
                self._num_in_sealed += full.capacity
                self.segment = fresh
                full.seal()
                self.pool.retire(full)
                self._wake()
            return self.segment
        finally:
            self._turning.release()


class _LaneHolder:
    """Frees a lane when its thread ends, so that short-lived threads take no further disk space."""

    __slots__ = ("_finder", "_free", "lane")

    def __init__(self, lane: Lane, free: deque[Lane], finder: Finder) -> None:
        self.lane = lane
        self._free = free
        self._finder = finder

    def __del__(self) -> None:
        self._finder.forget()  # first: then another thread may take the lane
        self._free.append(self.lane)


class Lanes:
    """The lanes of a process."""

    def __init__(
        self,
        *,
        process: ProcessFile,
        pool: SegmentPool,
        sampling: Sampling,
        wake: Callable[[], None],
    ) -> None:
        self._process = process
        self._pool = pool
        self._sampling = sampling
        self._wake = wake
        self._step = NONE
        self._lanes: list[Lane] = []
        self._numbers = itertools.count()
        self._free: deque[Lane] = deque()
        self._num_ready = itertools.count()
        # Not a subclass, whose attributes take twice the time.
        self.threads: Any = threading.local()
        """Per thread, from its first span on: ``lane``, ``holder``, and ``ready``, its reusable
        spans by name."""

        self.finder = Finder(self.threads)
        """Finds the spans in ``ready``."""

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes))

    def current(self) -> Lane:
        """Return the calling thread's lane."""
        try:
            lane: Lane = self.threads.lane
        except AttributeError:
            return self._assign()
        return lane

    def add(self, track: str) -> Lane:
        """Return a new lane for ``track``."""
        lane = Lane(
            next(self._numbers),
            track_id=self._process.name_id(track),
            pool=self._pool,
            process=self._process,
            sampling=self._sampling,
            wake=self._wake,
        )
        lane.set_place(self._step, NONE, NONE)
        starter = self._pool.take_starter()
        if starter is not None:  # else the first record takes the next spare
            starter.assign_to(lane.number)
            lane.segment = starter
        self._lanes.append(lane)
        self._wake()  # to replace the starter: other threads may begin now too
        return lane

    def begin_step(self, step: int) -> None:
        """Set the place of all lanes to ``step``."""
        self._step = step
        for lane in self._lanes:
            lane.set_place(step, NONE, NONE)

    def span(self, head: int, name: str | None = None) -> SpanContext:
        """Return a span of the calling thread that is not in use, a reusable one if possible.

        Args:
            head: `head_word` of its record.
            name: Name by which `finder` will find it; None if it must not.
        """
        lane = self.current()
        ready = lane.ready.get(head)
        if ready is None:
            ready = self._make_ready(lane, head, name)
        if ready is None or ready.start_ns is not None:
            return HostSpan(lane, head)
        return ready.span

    def _make_ready(self, lane: Lane, head: int, name: str | None) -> ReadySpan | None:
        # Threads that share a lane must not share spans: two might use one at once.
        if "ready" not in self.threads.__dict__ or next(self._num_ready) >= MAX_READY:
            return None
        ready = lane.ready.setdefault(head, ready_span(lane, head))
        if name is not None:
            lane.ready_by_name[name] = ready
        return ready

    def _assign(self) -> Lane:
        """Assign a lane to the calling thread: a free one, a new one, or the shared last one."""
        current = threading.current_thread()
        track = "main" if current is threading.main_thread() else current.name or "thread"
        try:
            lane = self._free.pop()
        except IndexError:
            lane = self.add(track) if len(self._lanes) < MAX_LANES else self._lanes[-1]
        else:
            lane.track_id = self._process.name_id(track)
            lane.depth = 0
            lane.set_place(self._step, NONE, NONE)
        is_shared = len(self._lanes) >= MAX_LANES and lane is self._lanes[-1]
        if not is_shared:
            self.threads.holder = _LaneHolder(lane, self._free, self.finder)
            self.threads.ready = lane.ready_by_name
        self.threads.lane = lane
        return lane


class _Shown(NamedTuple):
    ready: ReadySpan
    start_ns: int
    entry: OpenEntry | None


class OpenSpans:
    """The open table entries of reusable spans: the outermost long one of each lane.

    The background thread updates them once a second. On the training thread, making and freeing an
    entry would cost more than the span's record.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self._lanes = lanes
        self._shown: dict[int, _Shown] = {}

    def refresh(self) -> None:
        """Enter spans that have become old enough, and free the entries of those that ended."""
        now_ns = monotonic_ns()
        for lane in self._lanes:
            shown = self._shown.get(lane.number)
            if shown is not None:
                if shown.ready.start_ns == shown.start_ns:
                    continue
                self._free(lane.number)
            self._show_outermost(lane, now_ns)

    def close(self) -> None:
        """Free all entries."""
        for number in list(self._shown):
            self._free(number)

    def _show_outermost(self, lane: Lane, now_ns: int) -> None:
        in_use = [
            (start_ns, ready.head, ready)
            for ready in list(lane.ready.values())
            if (start_ns := ready.start_ns) is not None
        ]
        if not in_use:
            return
        start_ns, head, ready = min(in_use, key=lambda found: found[0])
        if now_ns - start_ns < SHOW_AFTER_NS:
            return
        entry = lane.open(start_ns, head)
        self._shown[lane.number] = _Shown(ready, start_ns, entry)
        if ready.start_ns != start_ns:  # it ended at the same time
            self._free(lane.number)

    def _free(self, number: int) -> None:
        entry = self._shown.pop(number).entry
        if entry is not None:
            entry.close()
