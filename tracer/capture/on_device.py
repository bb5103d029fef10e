"""Which communications run on a device's own streams, and so are timed there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..device.comm_stream import CommStream
from ..record.device_timer import NO_DEVICE_TIMING
from ..span import SpanFlag
from ..spool import DropReason

if TYPE_CHECKING:
    from ..record.recorder import Recorder
    from .launch import Launch


class _Met(NamedTuple):
    """A group as it is on one device: a communicator of its own."""

    group: weakref.ref[Any]
    is_own: bool
    chain: CommStream


class OnDevice:
    """Lets launches on the device's own library (NCCL) be timed by marks.

    There a wait returns to the host at once, so the host's clock says nothing; all
    others are left to it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._met: dict[tuple[int, int], _Met] = {}
        """By `id` of torch's object, as far as that is still the same one, and device."""

    def enter(self, launch: Launch, process_group: Any, tensors: object) -> None:  # noqa: ANN401
        """Mark a launch that is about to be issued, where a device carries it out.

        Args:
            launch: The communication.
            process_group: Its group.
            tensors: What it is about, nested in lists.
        """
        first = _first_tensor(tensors)
        timing = self._recorder.device_timing
        device = None if timing is NO_DEVICE_TIMING else timing.device_of((first,))
        if device is None:
            if first is not None and first.is_cuda:
                self._without_timing(launch, process_group, first)
            return
        met = self._find(process_group, device)
        if not met.is_own:
            return
        alone = not launch.flags & SpanFlag.COALESCED
        launch.enter_device(device, met.chain, chained=alone and launch.is_collective)

    def _without_timing(
        self,
        launch: Launch,
        process_group: Any,  # noqa: ANN401
        first: torch.Tensor,
    ) -> None:
        """Leave a launch out whose device is not timed: the host knows nothing of its end."""
        if self._find(process_group, first.device.index).is_own:
            self._recorder.drop(DropReason.DEVICE_ERROR)
            launch.lose()

    def _find(self, process_group: Any, device: int) -> _Met:  # noqa: ANN401
        # As in `GroupBook`: not by name, which torch gives out again, and weakly.
        key = (id(process_group), device)
        met = self._met.get(key)
        if met is None or met.group() is not process_group:
            backend = process_group._get_backend(torch.device("cuda", device))
            wanted = self._recorder.device_timing.comm_backend
            is_own = wanted in str(backend.name()).lower()
            met = self._met[key] = _Met(weakref.ref(process_group), is_own, CommStream())
        return met


def _first_tensor(nested: object) -> torch.Tensor | None:
    first = nested
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, torch.Tensor):  # nearly always
        return first
    if isinstance(nested, (list, tuple)):
        for item in nested:
            found = _first_tensor(item)
            if found is not None:
                return found
    return None
