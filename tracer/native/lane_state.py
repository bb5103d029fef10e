"""What a lane and its spans share, and how records are written and shown, in Python.

`tracer/native/_hot.c` does the same; `tracer.native.choice` chooses. Nothing here blocks, locks or
does I/O.
"""

from __future__ import annotations

import struct
from operator import length_hint
from typing import TYPE_CHECKING, Protocol

from ..span import NONE, SpanFlag
from ..spool import COMM_OFFSET, LAUNCH, LAUNCH_OFFSET, OPEN_ENTRY, RECORD_BYTES, WORD, RecordType

if TYPE_CHECKING:
    import mmap
    from collections import deque
    from collections.abc import Callable, Iterator, Sized

    from _typeshed import WriteableBuffer


MAX_DEPTH = 65_535
SPAN = int(RecordType.SPAN)
START = struct.Struct("<q")

ERROR_HEAD = int(SpanFlag.ERROR) << 16
"""The flag in a `tracer.record.lane.head_word`."""

pack_word = WORD.pack_into

MOST = 1 << 62
"""A number that no count reaches."""

PLACE = struct.Struct("<iiiI")
"""step, microbatch, chunk, track: what many records share."""

# Native "l" and not "<q", which takes 7 ns more a number; the bytes are the same
# wherever a long has eight bytes, and nobody trains on a big-endian machine.
_CORE = "8s16sllll" if struct.calcsize("l") == struct.calcsize("q") else "8s16sqqqq"
pack_core = struct.Struct(_CORE).pack_into
"""`tracer.spool.CORE` up to commit, with neighbours packed together: head, place, start, end,
depth, commit."""


def numbers(start: int, stop: int, step: int) -> Iterator[int]:
    """Return an iterator over a `range`; who takes a number has claimed it."""
    return iter(range(start, stop, step))


class DropCount:
    """What was lost for one reason."""

    __slots__ = ("buffer", "numbers", "offset")

    def __init__(self, buffer: WriteableBuffer, offset: int) -> None:
        """Count from zero.

        Args:
            buffer: In which the count stands, for others to read.
            offset: Where there, in bytes.
        """
        self.buffer = buffer
        self.offset = offset
        self.numbers = numbers(1, MOST, 1)
        """Hands out the numbers: in one C call, so two threads never get the same one."""

    @property
    def count(self) -> int:
        """How many were lost."""
        return MOST - 1 - length_hint(self.numbers)

    def add(self) -> None:
        """Count one more. Of two threads the lower number may be written last."""
        for number in self.numbers:
            pack_word(self.buffer, self.offset, number)
            return

    def write_to(self, buffer: WriteableBuffer) -> None:
        """Let the count stand in another buffer."""
        self.buffer = buffer


class WritableSegment(Protocol):
    """What a lane needs of the segment that it writes to."""

    @property
    def buffer(self) -> mmap.mmap | bytearray:
        """The mapped file."""
        ...

    @property
    def rows(self) -> Iterator[int]:
        """Where the rows not yet claimed begin."""
        ...

    @property
    def open_slots(self) -> deque[int]:
        """Where the free lines of the open table begin."""
        ...


class SparePool(Protocol):
    """What a lane needs of where its segments come from."""

    @property
    def spares(self) -> Sized:
        """Ready segments."""
        ...

    @property
    def drops(self) -> DropCount:
        """Counts what is lost where there is none."""
        ...


class SpanFilter(Protocol):
    """Says which spans are not recorded."""

    @property
    def active(self) -> bool:
        """Whether anything is left out."""
        ...

    def leaves_out(self, head: int, place: bytes) -> bool:
        """Return whether a span is not to be recorded."""
        ...


class LaneState:
    """What a lane and its spans share."""

    __slots__ = ("chunk", "depth", "microbatch", "place", "segment", "step", "track_id")

    chunk: int
    depth: int
    microbatch: int
    place: bytes
    """What spans that say nothing else belong to; see `set_place`."""

    segment: WritableSegment
    step: int
    track_id: int

    # What the lane itself has:
    pool: SparePool
    sampling: SpanFilter
    write_in_next_segment: Callable[[int, int, int, bytes, int, int, bytes | None], None]
    open_in_first: Callable[[int, int, tuple[int, int]], OpenEntry | None]
    leave_slowly: Callable[..., None]
    place_of: Callable[..., bytes]
    swallow: Callable[[BaseException], None]

    def set_place(self, step: int, microbatch: int, chunk: int, /) -> None:
        """Set what spans that say nothing else belong to."""
        self.place = PLACE.pack(step, microbatch, chunk, self.track_id)  # first: it may refuse
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
        """Write one record, or count it as dropped; a span not wanted now is passed over.

        Args:
            head: `tracer.record.lane.head_word`.
            start_ns: Begin, monotonic.
            duration_ns: Length.
            place: `PLACE`.
            launch_ns: When the host issued the work, monotonic; `NONE` unknown.
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
        """Write one record whether or not its kind is wanted now: it was when it began."""
        segment = self.segment
        offset = next(segment.rows, None)  # a claim in one C call
        if offset is None:
            # As in `ReadySpan`: what is dropped must cost no more than what is kept.
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
        self, start_ns: int, head: int, comm: tuple[int, int] = (0, NONE), /
    ) -> OpenEntry | None:
        """Show a begun span to whoever looks at the process from outside.

        Args:
            start_ns: Begin, monotonic.
            head: `tracer.record.lane.head_word` of the span.
            comm: Group id and seq; ``(0, NONE)`` where the span is no communication.

        Returns:
            Its line, which stays in this segment if the lane moves on; None where the
            table is full.
        """
        segment = self.segment
        try:
            slot = segment.open_slots.pop()
        except IndexError:
            return self.open_in_first(start_ns, head, comm)
        group_id, seq = comm
        kind = (head >> 8) & 0xFF
        name_id, depth = head >> 32, 0
        OPEN_ENTRY.pack_into(
            segment.buffer,
            slot,
            *(start_ns, group_id, seq, name_id, self.step, kind, depth),
            start_ns,  # the check word, written last
        )
        return OpenEntry(segment, slot)

    def clip_depth(self, depth: int) -> int:
        """Return a depth that a record can hold; one below zero is put right in the lane too.

        A span may be left after its thread has ended, and its lane belong to another, who
        began at zero; and spans may be entered and never left.
        """
        if depth < 0:
            self.depth = 0
            return 0
        return MAX_DEPTH


class OpenEntry:
    """A line of the open table: something that has begun and not ended."""

    __slots__ = ("_segment", "_slot")

    def __init__(self, segment: WritableSegment, slot: int) -> None:
        self._segment: WritableSegment | None = segment
        self._slot = slot

    def close(self) -> None:
        """Free the line, once."""
        segment, self._segment = self._segment, None
        if segment is not None:
            START.pack_into(segment.buffer, self._slot, 0)
            segment.open_slots.append(self._slot)
