"""A lane: the one place where a record is written. Nothing here blocks, locks or does I/O."""

from __future__ import annotations

import threading
from operator import length_hint
from time import monotonic_ns
from typing import TYPE_CHECKING

from ..errors import is_ours
from ..native.choice import LaneState
from ..native.lane_state import ERROR_HEAD, PLACE
from ..span import NONE
from ..spool import DropReason, RecordType
from .segment import NO_SEGMENT, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..native.choice import ReadySpan
    from ..native.lane_state import OpenEntry
    from .process_file import ProcessFile
    from .sampling import Sampling
    from .segment_pool import SegmentSource


def head_word(record_type: RecordType, *, kind: int, flags: int, name_id: int) -> int:
    """Return the first eight bytes of a record as one number."""
    return record_type | kind << 8 | flags << 16 | name_id << 32


class Lane(LaneState):
    """One thread's rows, or those of several threads that share it: claims never collide."""

    __slots__ = (
        "_num_in_former",
        "_process",
        "_turning",
        "_wake",
        "number",
        "ready",
        "ready_by_name",
        "sampling",
        "source",
    )

    def __init__(
        self,
        number: int,
        *,
        track_id: int,
        source: SegmentSource,
        process: ProcessFile,
        sampling: Sampling,
        wake: Callable[[], None],
    ) -> None:
        self.number = number
        self.track_id = track_id
        self.depth = 0
        self._num_in_former = 0
        self.segment = NO_SEGMENT
        self.ready: dict[int, ReadySpan] = {}
        """Spans of this lane's thread that are made once and entered often, by `head_word`."""

        self.ready_by_name: dict[str, ReadySpan] = {}
        """Those of them that `tracer.record.lanes.Lanes.finder` finds by their name alone."""

        self.source = source
        self._process = process
        self.sampling = sampling
        self._wake = wake
        self._turning = threading.Lock()
        self.set_place(NONE, NONE, NONE)

    def begin_in(self, segment: Segment) -> None:
        """Write to ``segment`` from the first record on; `NO_SEGMENT`: to the next spare."""
        if segment is not NO_SEGMENT:
            segment.give_to(self.number)
            self.segment = segment

    def place_of(
        self, microbatch: int = NONE, chunk: int = NONE, *, track_id: int | None = None
    ) -> bytes:
        """Return the place of a span that names any of these; the others are the lane's."""
        return PLACE.pack(
            self.step,
            self.microbatch if microbatch == NONE else microbatch,
            self.chunk if chunk == NONE else chunk,
            self.track_id if track_id is None else track_id,
        )

    def write_in_next(  # noqa: PLR0913 - as `write`
        self,
        head: int,
        start_ns: int,
        duration_ns: int,
        place: bytes,
        launch_ns: int,
        depth: int,
        second: bytes | None,
    ) -> None:
        """`write` where no row is left: in the next segment, if there is one."""
        segment = self.segment
        if not length_hint(segment.rows):
            segment = self._turn(segment)
        if length_hint(segment.rows):
            self.write(head, start_ns, duration_ns, place, launch_ns, depth, second)
        else:
            self.source.drops.add()

    def open_in_first(self, start_ns: int, head: int, comm: tuple[int, int]) -> OpenEntry | None:
        """`open` where no line is left: in the first segment, if there was none before."""
        segment = self.segment
        if segment is NO_SEGMENT:
            segment = self._turn(segment)
        return self.open(start_ns, head, comm) if segment.open_slots else None

    def leave_slowly(self, ready: ReadySpan, start_ns: int | None, is_error: bool) -> None:  # noqa: FBT001 - called by C too
        """Write a span that ends now where its short way cannot.

        Args:
            ready: The span, past the end of a segment or left by an exception.
            start_ns: When it was entered, monotonic; None: never, or it was left before.
            is_error: Whether an exception left it.
        """
        end_ns = monotonic_ns()
        if start_ns is None:
            return
        head = ready.head | ERROR_HEAD if is_error else ready.head
        self.write(head, start_ns, end_ns - start_ns, ready.place, start_ns, self.depth)

    def swallow(self, problem: BaseException) -> None:
        """Count an error of the tracer's own; hand on one that is the job's.

        Raises:
            BaseException: ``problem`` itself, where a signal handler of the job raised it.
        """
        if not is_ours(problem):
            raise problem
        out_of_memory = isinstance(problem, MemoryError)
        self._process.drop(DropReason.OUT_OF_MEMORY if out_of_memory else DropReason.INTERNAL_ERROR)

    def seal(self) -> None:
        """Say that nothing more comes."""
        segment, self.segment = self.segment, NO_SEGMENT
        segment.seal()
        self._num_in_former += segment.num_claimed()

    def num_stored(self) -> int:
        """Return how many rows this lane has claimed, in all its segments."""
        return self._num_in_former + self.segment.num_claimed()

    def detach(self) -> None:
        """Stop touching files: this process is a forked child."""
        self.segment.detach()
        self.segment = NO_SEGMENT

    def _turn(self, full: Segment) -> Segment:
        """Go on in a fresh segment; where there is none, stay in the full one."""
        # Never waits: whoever comes second (a thread that shares the lane, a signal
        # handler that interrupted this very line) loses its record rather than its time.
        if not self._turning.acquire(blocking=False):
            return self.segment
        try:
            if self.segment is full and (fresh := self.source.take()) is not None:
                fresh.give_to(self.number)
                self._num_in_former += full.capacity
                self.segment = fresh
                full.seal()
                self.source.retire(full)
                self._wake()
            return self.segment
        finally:
            self._turning.release()
