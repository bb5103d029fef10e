"""Turn device timing on, once the job uses a device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..record.device_timer import NO_DEVICE_TIMING, NoDeviceTiming
from .timing import DeviceTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..record.recorder import Recorder
    from .backend import DeviceBackend


class CudaWhenUsed(NoDeviceTiming):
    """Times nothing until it sees the first tensor on a CUDA device.

    Asking CUDA whether it is there would initialise it, and a process that has
    done so can no longer fork.
    """

    __slots__ = ("_cuda_device_of", "_recorder")

    def __init__(self, recorder: Recorder) -> None:
        from .cuda import cuda_device_of  # and so needs torch

        self._recorder = recorder
        self._cuda_device_of = cuda_device_of

    def device_of(self, objects: Iterable[object]) -> int | None:  # type: ignore[override]
        """Return the device of the first tensor where it is a CUDA device, which starts timing."""
        try:
            device = self._cuda_device_of(objects)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._recorder.swallow(problem)
            return None
        if device is None:
            return None
        start_device_timing(self._recorder, _cuda)
        return device if self._recorder.device_timing.active else None


def watch_for_cuda(recorder: Recorder) -> None:
    """Time the work of CUDA devices from the moment at which the job first uses one."""
    if sys.modules["torch"].version.cuda is not None:
        recorder.device_timing = CudaWhenUsed(recorder)


def start_device_timing(recorder: Recorder, make: Callable[[], DeviceBackend]) -> None:
    """Time the work of a device from now on; where that cannot be, one event says why."""
    try:
        timing = DeviceTiming(recorder, make())
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        recorder.device_timing = NO_DEVICE_TIMING
        recorder.event("tracer", "no device timing", {"error": repr(problem)[:500]})
        return
    recorder.device_timing = timing
    recorder.on_tick(timing.turn)
    recorder.on_shutdown(timing.close)


def _cuda() -> DeviceBackend:
    from .cuda import CudaBackend

    return CudaBackend()
