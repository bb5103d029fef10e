"""CUDA through the job's own torch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ..record.device_timer import NCCL
from .cudart import CudaRuntime

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class CudaBackend:
    """Devices as torch shows them. Nothing here synchronises or initialises CUDA."""

    comm_backend = NCCL

    def __init__(self) -> None:
        """Find the CUDA runtime.

        Raises:
            OSError: This torch is built for no CUDA, or its runtime cannot be reached:
                without it, no thread of ours may query an event beside a graph capture.
        """
        if torch.version.cuda is None:
            raise OSError("this torch is not built for CUDA")
        self._runtime = CudaRuntime()

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor or device; None where it is not a CUDA device."""
        return cuda_device_of(objects)

    def current_stream(self, device: int) -> Any:  # noqa: ANN401 - torch.cuda.Stream
        """Return the stream that the calling thread issues work to."""
        return torch.cuda.current_stream(device)

    def is_capturing(self, device: int) -> bool:
        """Return whether that stream is being captured into a graph."""
        with _on(device):
            return bool(torch.cuda.is_current_stream_capturing())

    def private_stream(self, device: int) -> Any:  # noqa: ANN401 - torch.cuda.Stream
        """Return a non-blocking stream from outside torch's pool."""
        with _on(device):
            handle = self._runtime.new_stream()
            return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]

    def new_event(self) -> Any:  # noqa: ANN401 - torch.cuda.Event
        """Return an event that keeps its time; CUDA makes it when it is first recorded."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def prepare_thread(self, device: int) -> None:
        """Let the calling thread query events while another thread captures a graph."""
        # A fresh thread stands on device 0: any call there would make a context on it,
        # some 500 MB on a device that belongs to another rank.
        torch.cuda.set_device(device)
        self._runtime.relax_captures()

    def device_uuid(self, device: int) -> str:
        """Return the device's UUID, "" where this torch does not tell it."""
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def cuda_device_of(objects: Iterable[object]) -> int | None:
    """Return the CUDA device of the first tensor or device among ``objects``; None if another."""
    device = next(filter(None, map(_device, objects)), None)
    if device is None or device.type != "cuda":
        return None
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index


def _device(thing: object) -> torch.device | None:
    if isinstance(thing, torch.Tensor):
        return thing.device
    return thing if isinstance(thing, torch.device) else None


@contextlib.contextmanager
def _on(device: int) -> Iterator[None]:
    """Make ``device`` current where it is not: a current device would be set anew for nothing."""
    if torch.cuda.current_device() == device:
        yield
        return
    with torch.cuda.device(device):
        yield
