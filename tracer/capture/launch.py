"""A communication on the host or on a device, and its records from launch to wait."""

from __future__ import annotations

import weakref
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..device.communication import CommStream, DeviceComm
from ..native.choice import HostLaunch
from ..native.host_launch import ASYNC, HOST_CLOCK, Heads
from ..native.lane_state import PLACE
from ..record.device_timer import NO_DEVICE_TIMING
from ..record.lane import head_word
from ..span import KIND_CODES, SpanFlag, SpanKind
from ..spool import HAS_COMM, DropReason, RecordType

if TYPE_CHECKING:
    from ..device.communication import Bounds
    from ..record.recorder import Recorder
    from .group import CommGroup

WAIT_CODE = KIND_CODES[SpanKind.WAIT]

ON_DEVICE = int(SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN)


def intern_heads(recorder: Recorder, name: str, kind: SpanKind) -> Heads:
    """Return the head words of all communications of a name and kind, and intern their names."""
    return (
        head_word(RecordType.SPAN, kind=KIND_CODES[kind], flags=0, name_id=recorder.name_id(name)),
        head_word(
            RecordType.SPAN, kind=WAIT_CODE, flags=0, name_id=recorder.name_id(f"wait {name}")
        ),
    )


class Launch(HostLaunch):
    """A communication that this rank has entered."""

    __slots__ = ()

    recorder: Recorder
    group: CommGroup
    device: DeviceComm | None

    def enter_device(self, device: int, chain: CommStream, *, chained: bool) -> None:
        """Mark the position of the launching stream. If that fails, no record follows.

        Args:
            chain: The stream of the communicator.
            chained: See `DeviceComm`.
        """
        timing = self.recorder.device_timing
        launched = timing.mark(device)
        if launched is None:
            self.lose()
            return
        self.on_device = True
        self.device = DeviceComm(timing, launched, chain, chained=chained)

    def lose(self) -> None:
        """Give up the record: its begin and end will not be known."""
        self.is_lost = self.on_device = True
        self.claim()

    def reach_wait(self, *, first: bool, alone: bool) -> None:
        """Mark that the calling thread's stream is about to wait for this communication.

        Args:
            first: Whether this is the first of the launches that it waits for.
            alone: Whether it is the only one.
        """
        if self.device is None:
            return
        if first:
            self.device.reach_wait(alone=alone)
        else:
            self.device.share_wait()

    def pass_wait(self) -> None:
        """Mark, once, that the calling thread's stream is past the wait."""
        if self.device is not None and self.claim():
            self.device.pass_wait(DeviceWriter(self, self.device.launched.device))

    def returned_on_device(self) -> None:
        """Mark that the call returned without a work: the call itself waited."""
        if self.device is not None and self.claim():
            self.device.returned(DeviceWriter(self, self.device.launched.device))


class DeviceWriter:
    """The `Writer` of a launch, made when the calling thread waits for it."""

    __slots__ = ("_chunk", "_depth", "_flags", "_launch", "_microbatch", "_step", "_waited_ns")

    def __init__(self, launch: Launch, device: int) -> None:
        lane = launch.recorder.lane()
        self._launch = launch
        self._flags = launch.flags & ~HOST_CLOCK
        self._waited_ns = monotonic_ns()
        # Autograd waits on a thread of its own, inside of a span that another thread has opened.
        self._depth = max(lane.depth, launch.recorder.device_timing.num_open(device))
        self._step, self._microbatch, self._chunk = lane.step, lane.microbatch, lane.chunk

    def span(self, bounds: Bounds) -> None:
        """Write the communication."""
        launch, flags = self._launch, self._flags
        if bounds.begin_known:
            flags |= SpanFlag.DEVICE_BEGIN_KNOWN
        flags |= SpanFlag.DEVICE_END_KNOWN if bounds.end_known else SpanFlag.END_BOUND
        launch.recorder.comm_lane.append(
            launch.head | (flags | HAS_COMM) << 16,
            bounds.begin_ns,
            bounds.end_ns - bounds.begin_ns,
            launch.place,
            launch.start_ns,
            0,
            launch.second,
        )
        launch.hide()

    def wait(self, track_id: int, start_ns: int, duration_ns: int) -> None:
        """Write the wait."""
        launch = self._launch
        launch.recorder.comm_lane.append(
            launch.wait_head | (ON_DEVICE | HAS_COMM) << 16,
            start_ns,
            duration_ns,
            PLACE.pack(self._step, self._microbatch, self._chunk, track_id),
            self._waited_ns,
            self._depth,
            launch.second,
        )

    def note_side_stream(self, key: tuple[int, int]) -> None:
        """Note that the call waited on a stream where nothing computes: it stalled no compute."""
        self._flags |= ASYNC
        self._launch.recorder.device_timing.side_calls[key] = [self._launch]

    def lose(self, num: int) -> None:
        """Count records as lost."""
        for _ in range(num):
            self._launch.recorder.device_timing.lose()
        self._launch.hide()


class _GroupOnDevice(NamedTuple):
    """A group on one device, where it has its own communicator."""

    group: weakref.ref[Any]
    is_own: bool
    chain: CommStream


class DeviceLaunches:
    """Marks launches of the device's own library (NCCL), which are timed on the device.

    A wait for such a launch returns to the host at once, so the host's clock cannot time it. All
    other launches are timed on the host.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: dict[tuple[int, int], _GroupOnDevice] = {}
        """By `id` of torch's object, if that is still the same object, and device."""

    def enter(self, launch: Launch, process_group: Any, tensors: object) -> None:  # noqa: ANN401
        """Mark a launch that is about to be issued, if a device carries it out.

        Args:
            tensors: Its tensors, nested in lists.
        """
        first = _first_tensor(tensors)
        timing = self._recorder.device_timing
        device = None if timing is NO_DEVICE_TIMING else timing.device_of((first,))
        if device is None:
            # On a device that is not timed: the host cannot know its end.
            index = first.device.index if first is not None and first.is_cuda else None
            if index is not None and self._find(process_group, index).is_own:
                self._recorder.drop(DropReason.DEVICE_ERROR)
                launch.lose()
            return
        met = self._find(process_group, device)
        if not met.is_own:
            return
        alone = not launch.flags & SpanFlag.COALESCED
        launch.enter_device(device, met.chain, chained=alone and launch.is_collective)

    def _find(self, process_group: Any, device: int) -> _GroupOnDevice:  # noqa: ANN401
        # As in `Groups`: not by name, which torch reuses, and by a weak reference.
        key = (id(process_group), device)
        met = self._seen.get(key)
        if met is None or met.group() is not process_group:
            backend = process_group._get_backend(torch.device("cuda", device))
            wanted = self._recorder.device_timing.comm_backend
            is_own = wanted in str(backend.name()).lower()
            met = self._seen[key] = _GroupOnDevice(weakref.ref(process_group), is_own, CommStream())
        return met


def _first_tensor(nested: object) -> torch.Tensor | None:
    first = nested
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, torch.Tensor):  # nearly always
        return first
    if isinstance(nested, (list, tuple)):
        for item in nested:
            tensor = _first_tensor(item)
            if tensor is not None:
                return tensor
    return None
