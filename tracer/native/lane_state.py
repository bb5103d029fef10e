"""State of a lane: writing records, the open table, and counts of dropped records, in Python.

``lane.c`` and ``numbers.c`` do the same, and `tracer.native.choice` takes them if they were
compiled. Nothing here blocks, locks or does I/O.
"""

from __future__ import annotations

import struct
from operator import length_hint
from typing import TYPE_CHECKING, Protocol

from ..span import NONE, SpanFlag
from ..spool import (
    COMM_OFFSET,
    LAUNCH,
    LAUNCH_OFFSET,
    OPEN_COMM,
    OPEN_COMM_OFFSET,
    OPEN_ENTRY,
    RECORD_BYTES,
    WORD,
    RecordType,
)

if TYPE_CHECKING:
    import mmap
    from collections import deque
    from collections.abc import Callable, Iterator, Sized

    from _typeshed import WriteableBuffer


MAX_DEPTH = 65_535
SPAN = int(RecordType.SPAN)
START = struct.Struct("<q")

ERROR_HEAD = int(SpanFlag.ERROR) << 16
"""`SpanFlag.ERROR` at its position in a `tracer.record.lane.head_word`."""

pack_word = WORD.pack_into

MAX_COUNT = 1 << 62
"""A number that no count reaches."""

PLACE = struct.Struct("<iiiI")
"""step, microbatch, chunk, track: the fields that many records share."""

# Native "l" instead of "<q", which takes 7 ns longer per number. The bytes are the same if a long
# has eight bytes; big-endian machines are not supported.
_CORE = "8s16sllll" if struct.calcsize("l") == struct.calcsize("q") else "8s16sqqqq"
pack_core = struct.Struct(_CORE).pack_into
"""`tracer.spool.CORE` up to commit, with neighbours packed together: head, place, start, end,
depth, commit."""


def numbers(start: int, stop: int, step: int) -> Iterator[int]:
    """Return an iterator over a `range`; taking a number claims it.

    Taking one is a single C call, so two threads never get the same number.
    """
    return iter(range(start, stop, step))


class DropCount:
    """The count of records dropped for one reason, readable in a buffer."""

    __slots__ = ("buffer", "numbers", "offset")

    def __init__(self, buffer: WriteableBuffer, offset: int) -> None:
        """Count from zero.

        Args:
            buffer: Receives the count, for other processes to read.
            offset: Position of the count in the buffer, in bytes.
        """
        self.buffer = buffer
        self.offset = offset
        self.numbers = numbers(1, MAX_COUNT, 1)
        """The counts to come."""

    @property
    def count(self) -> int:
        """Number of dropped records."""
        return MAX_COUNT - 1 - length_hint(self.numbers)

    def add(self) -> None:
        """Count one record. If two threads count at once, the lower number may be written last."""
        for number in self.numbers:
            pack_word(self.buffer, self.offset, number)
            return

    def write_to(self, buffer: WriteableBuffer) -> None:
        """Write further counts to another buffer."""
        self.buffer = buffer


class WritableSegment(Protocol):
    """The part of a segment that a lane writes through."""

    buffer: mmap.mmap | bytearray
    rows: Iterator[int]
    """Offsets of the rows not yet claimed, in bytes."""

    open_slots: deque[int]
    """Offsets of the free entries of the open table, in bytes."""


class SparePool(Protocol):
    """The part of a segment pool that a full lane looks at."""

    drops: DropCount
    """Counts the records dropped because no segment is ready."""

    @property
    def spares(self) -> Sized:
        """Segments that are ready."""


class SpanFilter(Protocol):
    """The decision which spans are recorded."""

    active: bool
    """Whether any kind is left out."""

    def leaves_out(self, head: int, place: bytes) -> bool:
        """Return whether a span is left out."""


class LaneState:
    """The state that a lane shares with its spans."""

    __slots__ = ("chunk", "depth", "microbatch", "place", "segment", "step", "track_id")

    chunk: int
    depth: int
    microbatch: int
    place: bytes
    """Step, micro-batch, chunk and track of spans that name none of their own; see `PLACE`."""

    segment: WritableSegment
    step: int
    track_id: int

    # Attributes and methods of `tracer.record.lane.Lane`:
    pool: SparePool
    sampling: SpanFilter
    write_in_next_segment: Callable[[int, int, int, bytes, int, int, bytes | None], None]
    open_in_first: Callable[[int, int, tuple[int, ...]], OpenEntry | None]
    leave_slowly: Callable[..., None]
    place_of: Callable[..., bytes]
    swallow: Callable[[BaseException], None]

    def set_place(self, step: int, microbatch: int, chunk: int, /) -> None:
        """Set the place of spans that name none of their own."""
        self.place = PLACE.pack(step, microbatch, chunk, self.track_id)  # first: it may raise
        self.step = step
        self.microbatch = microbatch
        self.chunk = chunk

    def append(  # noqa: PLR0913 - positional: hot, and a record has this many fields
        self,
        head: int,
        start_ns: int,
        duration_ns: int,
        place: bytes,
        launch_ns: int,
        depth: int,
        second: bytes | None = None,
        /,
    ) -> None:
        """Write one record, or count it as dropped; ignore a span whose kind is left out.

        Args:
            head: `tracer.record.lane.head_word`.
            start_ns: Start, monotonic.
            duration_ns: Length.
            place: `PLACE`.
            launch_ns: When the host issued the work, monotonic; `NONE` if unknown.
            depth: Nesting on the track.
            second: The record's second half; None leaves it zero.
        """
        sampling = self.sampling
        if sampling.active and head & 0xFF == SPAN and sampling.leaves_out(head, place):
            return
        self.write(head, start_ns, duration_ns, place, launch_ns, depth, second)

    def write(  # noqa: PLR0913 - as `append`
        self,
        head: int,
        start_ns: int,
        duration_ns: int,
        place: bytes,
        launch_ns: int,
        depth: int,
        second: bytes | None = None,
        /,
    ) -> None:
        """Write one record, even if its kind is left out by now: it was not when the span began."""
        segment = self.segment
        offset = next(segment.rows, None)  # claims a row, atomically
        if offset is None:
            # In line, as in `ReadySpan`: a dropped record must cost no more than a kept one.
            if self.pool.spares or self.segment is not segment:
                self.write_in_next_segment(
                    head, start_ns, duration_ns, place, launch_ns, depth, second
                )
            else:
                self.pool.drops.add()
            return
        if depth >> 16:
            depth = self.clip_depth(depth)
        buffer = segment.buffer
        if launch_ns != start_ns:
            LAUNCH.pack_into(buffer, offset + LAUNCH_OFFSET, launch_ns)
        if second is not None:
            buffer[offset + COMM_OFFSET : offset + RECORD_BYTES] = second
        pack_core(
            buffer,
            offset,
            head.to_bytes(8, "little"),
            place,
            start_ns,
            start_ns + duration_ns,
            depth,
            offset,  # the commit word, written last
        )

    def open(
        self, start_ns: int, head: int, comm: tuple[int, ...] = (0, NONE), /
    ) -> OpenEntry | None:
        """Enter a span that has begun into the open table, for readers outside the process.

        Args:
            start_ns: Start, monotonic.
            head: `tracer.record.lane.head_word` of the span.
            comm: Group id and seq; ``(0, NONE)`` if the span is not communication. May be followed
                by `OPEN_COMM`.

        Returns:
            The entry, which remains in this segment if the lane moves on; None if the table is
            full.
        """
        segment = self.segment
        try:
            slot = segment.open_slots.pop()
        except IndexError:
            return self.open_in_first(start_ns, head, comm)
        group_id, seq, *sides = comm
        kind = (head >> 8) & 0xFF
        name_id, depth = head >> 32, 0
        OPEN_COMM.pack_into(segment.buffer, slot + OPEN_COMM_OFFSET, *(sides or (0, 0, 0)))
        OPEN_ENTRY.pack_into(
            segment.buffer,
            slot,
            *(start_ns, group_id, seq, name_id, self.step, kind, depth),
            start_ns,  # the check word, written last
        )
        return OpenEntry(segment, slot)

    def clip_depth(self, depth: int) -> int:
        """Return a depth that a record can hold; reset a negative one in the lane as well.

        A span may be left after its thread has ended, when its lane belongs to another thread that
        began at zero. The depth is too large if spans are entered and never left.
        """
        if depth < 0:
            self.depth = 0
            return 0
        return MAX_DEPTH


class OpenEntry:
    """An entry of the open table: a span that has begun and not ended."""

    __slots__ = ("_segment", "_slot")

    def __init__(self, segment: WritableSegment, slot: int) -> None:
        self._segment: WritableSegment | None = segment
        self._slot = slot

    def close(self) -> None:
        """Free the entry; a second call does nothing."""
        segment, self._segment = self._segment, None
        if segment is not None:
            START.pack_into(segment.buffer, self._slot, 0)
            segment.open_slots.append(self._slot)
