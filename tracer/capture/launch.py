"""One communication from its launch to its end, and to the place where it is waited for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from tracer.clock import monotonic_ns
from tracer.device.communication import DeviceComm, Writer
from tracer.lane import PLACE, head_word
from tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind
from tracer.spool import COMM, HAS_COMM, RecordType

if TYPE_CHECKING:
    from tracer.capture.group import CommGroup
    from tracer.device.comm_stream import Bounds
    from tracer.lane import Lane
    from tracer.recorder import Recorder
    from tracer.segment import OpenEntry

WAIT_CODE = KIND_CODES[SpanKind.WAIT]
HOST_CLOCK = int(SpanFlag.HOST_CLOCK)


class Instance(NamedTuple):
    """Which of its group's communications this is; in the order of `tracer.spool.COMM`."""

    seq: int
    src_rank: int
    """Global; `NONE` for a collective."""

    dst_rank: int
    num_bytes: int
    interval_id: int
    """Shared by operations that one call issued; 0 for none."""


class Launch:
    """A communication that this rank has entered."""

    __slots__ = (
        "_device",
        "_head",
        "_instance",
        "_is_lost",
        "_open",
        "_place",
        "_recorder",
        "_second",
        "_tickets",
        "end_ns",
        "flags",
        "group",
        "name",
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
        name: str,
        kind: SpanKind,
        flags: int,
    ) -> None:
        lane = recorder.lane()
        self._recorder = recorder
        self.name = name
        self._head = _head(KIND_CODES[kind], recorder.name_id(name))
        self.flags = flags
        self.group = group
        self.seq = instance.seq
        self.end_ns: int | None = None
        self._instance = instance
        self.thread_id = threading.get_ident()
        self._place = lane.place_of(track_id=group.track_id)
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

    @property
    def on_device(self) -> bool:
        """Whether marks on the device tell when this begins and ends, or nothing does."""
        return self._is_lost or self._device is not None

    @property
    def is_collective(self) -> bool:
        """Whether all members of the group take part."""
        return self._instance.dst_rank == NONE

    def enter_device(self, device: int, *, communicator: object, chained: bool) -> None:
        """Mark where the launching stream stands; where that cannot be, no record will follow.

        Args:
            device: That of its tensors.
            communicator: What has a stream of its own on the device.
            chained: See `DeviceComm`.
        """
        timing = self._recorder.device_timing
        launched = timing.mark(device)
        if launched is None:
            self.lose()
            return
        chain = timing.comm_stream(communicator)
        self._device = DeviceComm(timing, launched, chain, chained=chained)

    def lose(self) -> None:
        """Note that nothing will be known of when this begins and ends: no record follows."""
        self._is_lost = True
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
        self._instance = self._instance._replace(seq=seq, src_rank=src_rank)
        self._second = COMM.pack(self.group.group_id, *self._instance)

    def end(self, end_ns: int, flags: int = 0) -> None:
        """Write the communication's span by the host's clock, once; a second call does nothing."""
        if self._claim():
            self._write_host(end_ns, flags)

    def _claim(self) -> bool:
        try:
            self._tickets.pop()
        except IndexError:
            return False
        return True

    def _write_host(self, end_ns: int, flags: int = 0) -> None:
        self.end_ns = end_ns
        if self._device is not None:
            self._device.give_back()
        self._append(
            self._recorder.comm_lane,
            self._head,
            interval=(self.start_ns, end_ns),
            place=self._place,
            flags=self.flags | flags,
            launch_ns=self.start_ns,
            depth=0,
        )
        self._close()

    def end_wait(self, start_ns: int, end_ns: int, flags: int = 0) -> None:
        """Write a span of the calling thread, which was blocked on this communication."""
        lane = self._recorder.lane()
        self._append(
            lane,
            self._wait_head(),
            interval=(start_ns, end_ns),
            place=lane.place,
            flags=HOST_CLOCK | flags,
            launch_ns=start_ns,
            depth=lane.depth,
        )

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
            self._append(
                recorder.comm_lane,
                self._wait_head(),
                interval=(start_ns, start_ns + duration_ns),
                place=PLACE.pack(*place, track_id),
                flags=SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN,
                launch_ns=waited_ns,
                depth=depth,
            )

        return Writer(self._write_device, wait, lose)

    def _write_device(self, bounds: Bounds) -> None:
        flags = self.flags & ~HOST_CLOCK
        if bounds.begin_known:
            flags |= SpanFlag.DEVICE_BEGIN_KNOWN
        flags |= SpanFlag.DEVICE_END_KNOWN if bounds.end_known else SpanFlag.END_BOUND
        self._append(
            self._recorder.comm_lane,
            self._head,
            interval=(bounds.begin_ns, bounds.end_ns),
            place=self._place,
            flags=flags,
            launch_ns=self.start_ns,
            depth=0,
        )
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()

    @property
    def ended(self) -> bool:
        """Whether the communication's span is written."""
        return not self._tickets

    def _wait_head(self) -> int:
        return _head(WAIT_CODE, self._recorder.name_id(f"wait {self.name}"))

    def _append(  # noqa: PLR0913 - a record has this many fields
        self,
        lane: Lane,
        head: int,
        *,
        interval: tuple[int, int],
        place: bytes,
        flags: int,
        launch_ns: int,
        depth: int,
    ) -> None:
        lane.append(
            head | (flags | HAS_COMM) << 16,
            interval[0],
            interval[1] - interval[0],
            place,
            launch_ns,
            depth,
            self._second,
        )


def _head(kind: int, name_id: int) -> int:
    """Return a record's first word, its flags left out."""
    return head_word(RecordType.SPAN, kind=kind, flags=0, name_id=name_id)
