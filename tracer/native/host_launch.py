"""A communication timed by the host clock, in Python.

``communication.c`` does the same, and `tracer.native.choice` takes it if it was compiled. Without
a compiler nothing else writes communications, so this Python form remains.
"""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from ..span import NONE, SpanFlag
from ..spool import COMM, HAS_COMM

if TYPE_CHECKING:
    from .lane_state import LaneState, OpenEntry

# Plain integers: an operation on the enumeration costs a microsecond.
HOST_CLOCK = int(SpanFlag.HOST_CLOCK)
ASYNC = int(SpanFlag.ASYNC)
END_BOUND = int(SpanFlag.END_BOUND)

BLOCKED_NS = 50_000
"""A shorter wait found the work already done, so its end is only a bound of the work's end."""

Instance = tuple[int, int, int, int, int]
"""Identity of a communication in its group, in the order of `tracer.spool.COMM`: seq, source and
destination rank (global; `NONE` for a collective), bytes, and the interval shared by the
operations that one call issued (0 for none)."""

Heads = tuple[int, int]
"""Head words of a communication's record and of its wait's record, without flags."""


class Group(Protocol):
    """The part of a communication group that is recorded."""

    group_id: int
    track_id: int


class CommRecorder(Protocol):
    """A recorder of communications."""

    @property
    def comm_lane(self) -> LaneState:
        """The lane of all communications."""


class Marks(Protocol):
    """The marks of a communication on a device."""

    def release(self) -> None:
        """Release the events of the marks."""


class HostLaunch:
    """A communication that this rank has entered, until its records are written."""

    __slots__ = (
        "_entry",
        "_tickets",
        "device",
        "end_ns",
        "flags",
        "group",
        "head",
        "is_collective",
        "is_lost",
        "on_device",
        "place",
        "recorder",
        "second",
        "seq",
        "start_ns",
        "thread_id",
        "wait_head",
    )

    def __init__(
        self,
        recorder: CommRecorder,
        group: Group,
        lane: LaneState,
        instance: Instance,
        heads: Heads,
        flags: int,
        /,
    ) -> None:
        """Start a communication now.

        Args:
            lane: The lane of the calling thread, whose place it inherits.
            instance: Its identity in the group.
            flags: `SpanFlag` as an integer.
        """
        self.recorder = recorder
        self.group = group
        self.head, self.wait_head = heads
        self.flags = flags
        self.seq = instance[0]
        self.is_collective = instance[2] == NONE
        """Whether all members of the group take part."""

        self.on_device = False
        """Whether start and end are measured on the device, or not at all."""

        self.is_lost = False
        """Whether start and end will never be known."""

        self.device: Marks | None = None
        """The marks on the device, if there are any."""

        self.end_ns: int | None = None
        self.thread_id = threading.get_ident()
        self.place = lane.place_of(track_id=group.track_id)
        self.second = COMM.pack(group.group_id, *instance)
        # The completion callback and the waiting thread may both try to write the record.
        # `list.pop` is atomic: the one that takes the ticket writes.
        self._tickets = [None]
        self._entry: OpenEntry | None = None
        self.start_ns = monotonic_ns()

    def claim(self) -> bool:
        """Return whether the caller may write the record; True for one caller only."""
        try:
            self._tickets.pop()
        except IndexError:
            return False
        return True

    def show(self) -> None:
        """Enter the communication into the open table."""
        if not self.is_lost:
            group_id, seq, src_rank, dst_rank, num_bytes, _ = COMM.unpack(self.second)
            comm = group_id, seq, num_bytes, src_rank, dst_rank
            self._entry = self.recorder.comm_lane.open(self.start_ns, self.head, comm)

    def hide(self) -> None:
        """Free its entry of the open table."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.close()

    def set_source(self, src_rank: int, seq: int, /) -> None:
        """Set the source of a receive from any source, once it is known.

        Args:
            src_rank: Global rank of the sender.
            seq: Number of the operation in the ordered pair.
        """
        self.seq = seq
        group_id, _, _, *others = COMM.unpack(self.second)
        self.second = COMM.pack(group_id, seq, src_rank, *others)

    def end(self, end_ns: int, flags: int = 0, /) -> None:
        """Write the communication's record with an end by the host clock; once."""
        if not self.claim():
            return
        self.end_ns = end_ns
        if self.device is not None:
            self.device.release()
        start_ns = self.start_ns
        self.recorder.comm_lane.append(
            self.head | (self.flags | flags | HAS_COMM) << 16,
            start_ns,
            end_ns - start_ns,
            self.place,
            start_ns,
            0,
            self.second,
        )
        self.hide()

    def waited_on_host(self, lane: LaneState, start_ns: int, end_ns: int, flags: int, /) -> None:
        """Record that the calling thread was blocked on the communication over an interval.

        Args:
            lane: The lane of the thread.
            start_ns: Start, monotonic.
            end_ns: End, monotonic.
            flags: `SpanFlag.ERROR` if the wait raised.
        """
        if self.end_ns is None:
            found_done = end_ns - start_ns < BLOCKED_NS and self.flags & ASYNC
            self.end(end_ns, flags | END_BOUND if found_done else flags)
        self._end_wait(lane, start_ns, end_ns, flags)

    def returned_on_host(self, lane: LaneState, end_ns: int, /) -> None:
        """Record that the call returned without a work object: it waited by itself."""
        self.end(end_ns)
        self._end_wait(lane, self.start_ns, end_ns, 0)

    def _end_wait(self, lane: LaneState, start_ns: int, end_ns: int, flags: int) -> None:
        lane.append(
            self.wait_head | (HOST_CLOCK | flags | HAS_COMM) << 16,
            start_ns,
            end_ns - start_ns,
            lane.place,
            start_ns,
            lane.depth,
            self.second,
        )
