"""Which communications run on a device's own streams, and so are timed there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tracer.device.absent import NO_DEVICE_TIMING
from tracer.span import SpanFlag
from tracer.spool import DropReason

if TYPE_CHECKING:
    from tracer.capture.launch import Launch
    from tracer.recorder import Recorder


class OnDevice:
    """Lets launches on the device's own library (NCCL) be timed by marks.

    There a wait returns to the host at once, so the host's clock says nothing; all
    others are left to it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_own: dict[tuple[str, int], bool] = {}

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
        if not self._on_own_streams(process_group, device):
            return
        alone = not launch.flags & SpanFlag.COALESCED
        launch.enter_device(
            device, communicator=launch.group.group_id, chained=alone and launch.is_collective
        )

    def _without_timing(
        self,
        launch: Launch,
        process_group: Any,  # noqa: ANN401
        first: torch.Tensor,
    ) -> None:
        """Leave a launch out whose device is not timed: the host knows nothing of its end."""
        if self._on_own_streams(process_group, first.device.index):
            self._recorder.drop(DropReason.DEVICE_ERROR)
            launch.lose()

    def _on_own_streams(self, process_group: Any, device: int) -> bool:  # noqa: ANN401
        key = (process_group.group_name, device)
        known = self._is_own.get(key)
        if known is None:
            backend = process_group._get_backend(torch.device("cuda", device))
            wanted = self._recorder.device_timing.comm_backend
            known = self._is_own.setdefault(key, wanted in str(backend.name()).lower())
        return known


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
