"""One communication from its launch to its end, and to the place where it is waited for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tracer.clock import monotonic_ns
from tracer.device.communication import DeviceComm, Writer
from tracer.lane import head_word
from tracer.lane_state import PLACE
from tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind
from tracer.spool import COMM, HAS_COMM, RecordType

if TYPE_CHECKING:
    from tracer.capture.group import CommGroup
    from tracer.device.comm_stream import Bounds, CommStream
    from tracer.lane_state import OpenEntry
    from tracer.recorder import Recorder

WAIT_CODE = KIND_CODES[SpanKind.WAIT]

# As plain integers: an operation on the enumeration costs a microsecond each.
HOST_CLOCK = int(SpanFlag.HOST_CLOCK)
ASYNC = int(SpanFlag.ASYNC)
END_BOUND = int(SpanFlag.END_BOUND)
ON_DEVICE = int(SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN)

BLOCKED_NS = 50_000
"""A wait shorter than this found the work done: when it was done is then not known from it."""

Instance = tuple[int, int, int, int, int]
"""Which of its group's communications one is, in the order of `tracer.spool.COMM`: seq, source
and destination rank (global; `NONE` for a collective), bytes, and the interval that operations
share which one call issued (0 for none)."""

Heads = tuple[int, int]
"""First words of a communication's record and of its wait's, their flags left out."""


def heads_of(recorder: Recorder, name: str, kind: SpanKind) -> Heads:
    """Return the heads of all communications of that name and kind; its names are interned."""
    return (
        head_word(RecordType.SPAN, kind=KIND_CODES[kind], flags=0, name_id=recorder.name_id(name)),
        head_word(
            RecordType.SPAN, kind=WAIT_CODE, flags=0, name_id=recorder.name_id(f"wait {name}")
        ),
    )


class Launch:
    """A communication that this rank has entered."""

    __slots__ = (
        "_device",
        "_head",
        "_is_lost",
        "_open",
        "_place",
        "_recorder",
        "_second",
        "_tickets",
        "_wait_head",
        "end_ns",
        "flags",
        "group",
        "is_collective",
        "on_device",
        "seq",
        "start_ns",
        "thread_id",
    )

    def __init__(
        self,
        recorder: Recorder,
        group: CommGroup,
        instance: Instance,
        *,
        heads: Heads,
        flags: int,
    ) -> None:
        self._recorder = recorder
        self._head, self._wait_head = heads
        self.flags = flags
        self.group = group
        self.seq = instance[0]
        self.is_collective = instance[2] == NONE
        """Whether all members of the group take part."""

        self.on_device = False
        """Whether marks on the device tell when this begins and ends, or nothing does."""

        self.end_ns: int | None = None
        self.thread_id = threading.get_ident()
        self._place = recorder.lanes.mine().place_of(track_id=group.track_id)
        self._second = COMM.pack(group.group_id, *instance)
        # Whoever takes the ticket writes the record: the completion callback and the
        # waiting thread may both come, and `list.pop` gives it to one of them.
        self._tickets = [None]
        self._open: OpenEntry | None = None
        self._device: DeviceComm | None = None
        self._is_lost = False
        self.start_ns = monotonic_ns()

    def show(self) -> None:
        """Put the communication into the open table."""
        if self._is_lost:
            return
        comm = (self.group.group_id, self.seq)
        self._open = self._recorder.comm_lane.open(self.start_ns, self._head, comm)

    # -- on a device -----------------------------------------------------------

    def enter_device(self, device: int, chain: CommStream, *, chained: bool) -> None:
        """Mark where the launching stream stands; where that cannot be, no record will follow.

        Args:
            device: That of its tensors.
            chain: Its communicator's stream.
            chained: See `DeviceComm`.
        """
        timing = self._recorder.device_timing
        launched = timing.mark(device)
        if launched is None:
            self.lose()
            return
        self.on_device = True
        self._device = DeviceComm(timing, launched, chain, chained=chained)

    def lose(self) -> None:
        """Note that nothing will be known of when this begins and ends: no record follows."""
        self._is_lost = self.on_device = True
        self._tickets.clear()

    def reach_wait(self, *, first: bool, alone: bool) -> None:
        """Note that the calling thread's stream is about to wait for this.

        Args:
            first: Whether this is the first of those that it waits for.
            alone: Whether it is the only one.
        """
        if self._device is None:
            return
        if first:
            self._device.reach_wait(alone=alone)
        else:
            self._device.share_wait()

    def waited(self, start_ns: int, end_ns: int, flags: int) -> None:
        """Note that the calling thread was blocked on this over the interval.

        Args:
            start_ns: Begin, monotonic.
            end_ns: End, monotonic.
            flags: `SpanFlag.ERROR` where the wait raised.
        """
        if self.on_device and not flags:
            self.pass_wait()
            return
        if self.end_ns is None:
            found_done = end_ns - start_ns < BLOCKED_NS and self.flags & ASYNC
            self.end(end_ns, flags | END_BOUND if found_done else flags)
        self.end_wait(start_ns, end_ns, flags)

    def pass_wait(self) -> None:
        """Note that the calling thread's stream has the wait behind it, once."""
        if self._device is not None and self._claim():
            self._device.pass_wait(self._writer())

    def returned(self, end_ns: int) -> None:
        """Note that the call has returned and left no work: it waited by itself."""
        if not self.on_device:
            self.end(end_ns)
            self.end_wait(self.start_ns, end_ns)
        elif self._device is not None and self._claim():
            self._device.returned(self._writer())

    def came_from(self, src_rank: int, seq: int) -> None:
        """Say from whom a receive from any source came, and which of that pair's it is.

        Args:
            src_rank: Global.
            seq: In the ordered pair.
        """
        self.seq = seq
        group_id, _, _, *others = COMM.unpack(self._second)
        self._second = COMM.pack(group_id, seq, src_rank, *others)

    def end(self, end_ns: int, flags: int = 0) -> None:
        """Write the communication's span by the host's clock, once; a second call does nothing."""
        try:
            self._tickets.pop()
        except IndexError:
            return
        self.end_ns = end_ns
        if self._device is not None:
            self._device.give_back()
        start_ns = self.start_ns
        self._recorder.comm_lane.append(
            self._head | (self.flags | flags | HAS_COMM) << 16,
            start_ns,
            end_ns - start_ns,
            self._place,
            start_ns,
            0,
            self._second,
        )
        if self._open is not None:
            self._open.close()

    def end_wait(self, start_ns: int, end_ns: int, flags: int = 0) -> None:
        """Write a span of the calling thread, which was blocked on this communication."""
        lane = self._recorder.lanes.mine()
        lane.append(
            self._wait_head | (HOST_CLOCK | flags | HAS_COMM) << 16,
            start_ns,
            end_ns - start_ns,
            lane.place,
            start_ns,
            lane.depth,
            self._second,
        )

    def _claim(self) -> bool:
        try:
            self._tickets.pop()
        except IndexError:
            return False
        return True

    def _writer(self) -> Writer:
        """Return what writes this and its wait once their times are known."""
        recorder, lane = self._recorder, self._recorder.lane()
        waited_ns, depth = monotonic_ns(), lane.depth
        place = (lane.step, lane.microbatch, lane.chunk)

        def lose(num: int) -> None:
            for _ in range(num):
                recorder.device_timing.lose()
            self._close()

        def wait(track_id: int, start_ns: int, duration_ns: int) -> None:
            recorder.comm_lane.append(
                self._wait_head | (ON_DEVICE | HAS_COMM) << 16,
                start_ns,
                duration_ns,
                PLACE.pack(*place, track_id),
                waited_ns,
                depth,
                self._second,
            )

        return Writer(self._write_device, wait, lose)

    def _write_device(self, bounds: Bounds) -> None:
        flags = self.flags & ~HOST_CLOCK
        if bounds.begin_known:
            flags |= SpanFlag.DEVICE_BEGIN_KNOWN
        flags |= SpanFlag.DEVICE_END_KNOWN if bounds.end_known else SpanFlag.END_BOUND
        self._recorder.comm_lane.append(
            self._head | (flags | HAS_COMM) << 16,
            bounds.begin_ns,
            bounds.end_ns - bounds.begin_ns,
            self._place,
            self.start_ns,
            0,
            self._second,
        )
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
