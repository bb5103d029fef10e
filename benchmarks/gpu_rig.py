"""A device to measure on: the real one through torch, or the tests' fake one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from rankscope.tracer.device.backend import DeviceBackend

CALIBRATION_CYCLES = 50_000_000


class Rig(Protocol):
    """What the measurements do with a device beyond what the tracer does with it."""

    name: str
    torch_device: str
    dist_backend: str
    backend: DeviceBackend
    default: Any
    """The default stream."""

    def clock(self) -> int:
        """Return the host's time in ns."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def new_stream(self) -> Any:  # noqa: ANN401 - torch's or the fake's
        """Return a stream of the job's."""
        ...

    def kernel(self, duration_ms: float, stream: Any) -> None:  # noqa: ANN401
        """Give a stream work of about this length that leaves room beside it."""
        ...

    def wait_for(self, stream: Any, other: Any) -> None:  # noqa: ANN401
        """Make a stream wait for what another has been given."""
        ...

    def synchronize(self) -> None:
        """Wait for the device, as a job does that reads its loss."""
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
        """Return the host's time in ns."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def new_stream(self) -> Any:  # noqa: ANN401
        """Return a stream of torch's pool."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def kernel(self, duration_ms: float, stream: Any) -> None:  # noqa: ANN401
        """Let one thread of the device count cycles."""
        with torch.cuda.stream(stream):
            _spin(int(duration_ms * self._cycles_per_ms))

    def wait_for(self, stream: Any, other: Any) -> None:  # noqa: ANN401
        """Make a stream wait for what another has been given."""
        stream.wait_stream(other)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def _calibrate(self) -> float:
        """Return the cycles of a ms."""
        _spin(CALIBRATION_CYCLES)  # The first run wakes the device.
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        _spin(CALIBRATION_CYCLES)
        torch.cuda.synchronize()
        return CALIBRATION_CYCLES / (1e3 * (time.perf_counter() - begun_s))


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class FakeRig:
    """The fake device, on which time passes only when it is told to."""

    name = "fake device (no GPU: its numbers measure nothing)"
    torch_device = "cpu"
    dist_backend = "gloo"

    def __init__(self, connections: int) -> None:
        from tests.support.tracer.claiming import ClaimingCuda

        self._cuda = ClaimingCuda(drift=12e-6, connections=connections)
        self.backend: DeviceBackend = self._cuda
        self.default = self._cuda.stream(0)

    def clock(self) -> int:
        """Return the fake's host time in ns."""
        return self._cuda.clock()

    def sleep(self, seconds: float) -> None:
        """Let the fake's time pass."""
        self._cuda.sleep(seconds)

    def new_stream(self) -> Any:  # noqa: ANN401
        """Return another fake stream."""
        return self._cuda.new_stream()

    def kernel(self, duration_ms: float, stream: Any) -> None:  # noqa: ANN401
        """Give a fake stream work."""
        self._cuda.kernel(round(duration_ms * 1e6), stream)

    def wait_for(self, stream: Any, other: Any) -> None:  # noqa: ANN401
        """Make a fake stream wait for another."""
        self._cuda.wait_for(stream, other)

    def synchronize(self) -> None:
        """Let time pass until the fake device is done."""
        self._cuda.now_ns = max(self._cuda.now_ns, self.default.end_ns)
