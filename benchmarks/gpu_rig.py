"""Device for measurements: a GPU through torch, or the fake device of the tests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from rankscope.tracer.device.backend import DeviceBackend

CALIBRATION_CYCLES = 50_000_000


class Rig(Protocol):
    """Operations on a device that the measurements need in addition to the tracer's."""

    name: str
    torch_device: str
    dist_backend: str
    backend: DeviceBackend
    default: Any
    """The default stream."""

    def clock(self) -> int:
        """Return the host time in ns."""
        ...

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        ...

    def new_stream(self) -> Any:  # noqa: ANN401 - torch's or the fake's
        """Return a new stream."""
        ...

    def kernel(self, duration_ms: float, stream: Any) -> None:  # noqa: ANN401
        """Launch a kernel of about this duration that does not occupy the whole device."""
        ...

    def wait_for(self, stream: Any, other: Any) -> None:  # noqa: ANN401
        """Make a stream wait for the work of another."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...


class CudaRig:
    """The current CUDA device."""

    torch_device = "cuda"
    dist_backend = "nccl"

    def __init__(self) -> None:
        from rankscope.tracer.device.cuda import CudaBackend

        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.backend = CudaBackend()
        self.name = torch.cuda.get_device_name()
        self.default = torch.cuda.default_stream()
        self._cycles_per_ms = self._calibrate()

    def clock(self) -> int:
        """Return the host time in ns."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def new_stream(self) -> Any:  # noqa: ANN401
        """Return a stream of torch's pool."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def kernel(self, duration_ms: float, stream: Any) -> None:  # noqa: ANN401
        """Launch a kernel of one thread that counts cycles."""
        with torch.cuda.stream(stream):
            _spin(int(duration_ms * self._cycles_per_ms))

    def wait_for(self, stream: Any, other: Any) -> None:  # noqa: ANN401
        """Make a stream wait for the work of another."""
        stream.wait_stream(other)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def _calibrate(self) -> float:
        """Return the number of cycles per ms."""
        _spin(CALIBRATION_CYCLES)  # The first run wakes the device.
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        _spin(CALIBRATION_CYCLES)
        torch.cuda.synchronize()
        return CALIBRATION_CYCLES / (1e3 * (time.perf_counter() - begun_s))


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class FakeRig:
    """The fake device, whose time is advanced explicitly."""

    name = "fake device (no GPU: its numbers measure nothing)"
    torch_device = "cpu"
    dist_backend = "gloo"

    def __init__(self, connections: int) -> None:
        from tests.support.tracer.claiming import ClaimingCuda

        self._cuda = ClaimingCuda(drift=12e-6, connections=connections)
        self.backend: DeviceBackend = self._cuda
        self.default = self._cuda.stream(0)

    def clock(self) -> int:
        """Return the host time of the fake in ns."""
        return self._cuda.clock()

    def sleep(self, seconds: float) -> None:
        """Advance the time of the fake."""
        self._cuda.sleep(seconds)

    def new_stream(self) -> Any:  # noqa: ANN401
        """Return another fake stream."""
        return self._cuda.new_stream()

    def kernel(self, duration_ms: float, stream: Any) -> None:  # noqa: ANN401
        """Launch work on a fake stream."""
        self._cuda.kernel(round(duration_ms * 1e6), stream)

    def wait_for(self, stream: Any, other: Any) -> None:  # noqa: ANN401
        """Make a fake stream wait for another."""
        self._cuda.wait_for(stream, other)

    def synchronize(self) -> None:
        """Advance the time until the fake device is idle."""
        self._cuda.now_ns = max(self._cuda.now_ns, self.default.end_ns)
