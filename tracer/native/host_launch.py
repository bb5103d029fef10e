"""A communication as the host's clock sees it, in Python.

`tracer/native/_hot.c` says the same in compiled lines; `tracer.native.choice` chooses.
"""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from ..span import NONE, SpanFlag
from ..spool import COMM, HAS_COMM

if TYPE_CHECKING:
    from .lane_state import LaneState, OpenEntry

# As plain integers: an operation on the enumeration costs a microsecond each.
HOST_CLOCK = int(SpanFlag.HOST_CLOCK)
ASYNC = int(SpanFlag.ASYNC)
END_BOUND = int(SpanFlag.END_BOUND)

BLOCKED_NS = 50_000
"""A wait shorter than this found the work done: when it was done is then not known from it."""

Instance = tuple[int, int, int, int, int]
"""Which of its group's communications one is, in the order of `tracer.spool.COMM`: seq, source
and destination rank (global; `NONE` for a collective), bytes, and the interval that operations
share which one call issued (0 for none)."""

Heads = tuple[int, int]
"""First words of a communication's record and of its wait's, their flags left out."""


class Group(Protocol):
    """What is written of a communication's group."""

    @property
    def group_id(self) -> int:
        """As `tracer.span.hash_group`."""
        ...

    @property
    def track_id(self) -> int:
        """Name of its track."""
        ...


class CommRecorder(Protocol):
    """Where communications are written."""

    @property
    def comm_lane(self) -> LaneState:
        """The lane of all communications."""
        ...


class Marks(Protocol):
    """Marks on a device."""

    def release(self) -> None:
        """Let go of them."""
        ...


class HostLaunch:
    """A communication that this rank has entered, and what is written of it."""

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
        """Note that it begins now.

        Args:
            recorder: Where it is written.
            group: In which it is.
            lane: The calling thread's: it belongs where that is.
            instance: Which of the group's it is.
            heads: Of its name and kind.
            flags: `SpanFlag`, as a number.
        """
        self.recorder = recorder
        self.group = group
        self.head, self.wait_head = heads
        self.flags = flags
        self.seq = instance[0]
        self.is_collective = instance[2] == NONE
        """Whether all members of the group take part."""

        self.on_device = False
        """Whether marks on the device tell when this begins and ends, or nothing does."""

        self.is_lost = False
        """Whether nothing will ever be known of that."""

        self.device: Marks | None = None
        """The marks."""

        self.end_ns: int | None = None
        self.thread_id = threading.get_ident()
        self.place = lane.place_of(track_id=group.track_id)
        self.second = COMM.pack(group.group_id, *instance)
        # Whoever takes the ticket writes the record: the completion callback and the
        # waiting thread may both come, and `list.pop` gives it to one of them.
        self._tickets = [None]
        self._entry: OpenEntry | None = None
        self.start_ns = monotonic_ns()

    def claim(self) -> bool:
        """Return whether the caller is the one to write the record."""
        try:
            self._tickets.pop()
        except IndexError:
            return False
        return True

    def show(self) -> None:
        """Put the communication into the open table."""
        if not self.is_lost:
            comm = (self.group.group_id, self.seq)
            self._entry = self.recorder.comm_lane.open(self.start_ns, self.head, comm)

    def hide(self) -> None:
        """Take it off the open table."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.close()

    def set_source(self, src_rank: int, seq: int, /) -> None:
        """Say from whom a receive from any source came, and which of that pair's it is.

        Args:
            src_rank: Global.
            seq: In the ordered pair.
        """
        self.seq = seq
        group_id, _, _, *others = COMM.unpack(self.second)
        self.second = COMM.pack(group_id, seq, src_rank, *others)

    def end(self, end_ns: int, flags: int = 0, /) -> None:
        """Write the communication's span by the host's clock, once; a second call does nothing."""
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
        """Note that the calling thread was blocked on this over the interval.

        Args:
            lane: The thread's.
            start_ns: Begin, monotonic.
            end_ns: End, monotonic.
            flags: `SpanFlag.ERROR` where the wait raised.
        """
        if self.end_ns is None:
            found_done = end_ns - start_ns < BLOCKED_NS and self.flags & ASYNC
            self.end(end_ns, flags | END_BOUND if found_done else flags)
        self._end_wait(lane, start_ns, end_ns, flags)

    def returned_on_host(self, lane: LaneState, end_ns: int, /) -> None:
        """Note that the call has returned and left no work: it waited by itself."""
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
