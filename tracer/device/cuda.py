"""CUDA through the job's own torch, and two functions of CUDA that torch does not expose."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..record.device_timer import NCCL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NON_BLOCKING = 1
"""``cudaStreamNonBlocking``: the stream neither waits for the default stream nor blocks it."""

RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``"""

RUNTIME = re.compile(r"\s(/\S*libcudart[^/\s]*\.so[^/\s]*)$", re.MULTILINE)

DRIVER = "libcuda.so.1"


class CudaBackend:
    """Devices as torch exposes them. Nothing here synchronises or initialises CUDA."""

    comm_backend = NCCL

    def __init__(self) -> None:
        """Find the CUDA runtime.

        Raises:
            OSError: This torch is not built for CUDA, or the runtime cannot be found. Without it no
                thread of the tracer may query an event while a graph is captured.
        """
        if torch.version.cuda is None:
            raise OSError("this torch is not built for CUDA")
        self._runtime = CudaRuntime()
        # Without torch's layers of Python around them, which cost more than the calls themselves.
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._current_handle: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self._streams: dict[tuple[int, int], Any] = {}
        """Torch's objects, by device and handle."""

    def device_of(self, objects: Iterable[object]) -> int | None:
        """Return the device of the first tensor or device; None if it is not a CUDA device."""
        return cuda_device_of(objects)

    def current_stream(self, device: int) -> Any:  # noqa: ANN401 - torch.cuda.Stream
        """Return the stream to which the calling thread issues work."""
        key = (device, self._current_handle(device))
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams.setdefault(key, torch.cuda.current_stream(device))
        return stream

    def is_capturing(self, device: int) -> bool:
        """Return whether that stream is being captured into a CUDA graph."""
        if self._current_device() == device:
            return self._is_capturing()
        with torch.cuda.device(device):
            return self._is_capturing()

    def private_stream(self, device: int) -> Any:  # noqa: ANN401 - torch.cuda.Stream
        """Return a non-blocking stream from outside of torch's pool."""
        with torch.cuda.device(device):
            handle = self._runtime.new_stream()
            return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]

    def new_event(self) -> Any:  # noqa: ANN401 - torch.cuda.Event
        """Return an event that keeps its time; CUDA creates it when it is first recorded."""
        return torch._C._CudaEventBase(enable_timing=True)

    def prepare_thread(self, device: int) -> None:
        """Let the calling thread query events while another thread captures a graph."""
        # The current device of a new thread is 0. Any call there would create a context of some 500
        # MB on a device that belongs to another rank.
        torch.cuda.set_device(device)
        self._runtime.relax_captures()

    def device_uuid(self, device: int) -> str:
        """Return the device's UUID, "" if this torch does not have it."""
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def cuda_device_of(objects: Iterable[object]) -> int | None:
    """Return the CUDA device of the first tensor or device among ``objects``; else None."""
    for thing in objects:
        device = thing.device if isinstance(thing, torch.Tensor) else thing
        if isinstance(device, torch.device):
            if device.type != "cuda":
                return None
            index: int | None = device.index
            return torch.cuda.current_device() if index is None else index
    return None


class Names(NamedTuple):
    """A library's names of the two functions; their arguments are the same."""

    exchange_mode: str
    create_stream: str


RUNTIME_NAMES = Names("cudaThreadExchangeStreamCaptureMode", "cudaStreamCreateWithFlags")


DRIVER_NAMES = Names("cuThreadExchangeStreamCaptureMode", "cuStreamCreate")
"""If torch contains the runtime statically, its functions are hidden; those of the driver are not.
"""


class CudaCallError(Exception):
    """A call of CUDA failed."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned CUDA error {code}")
        self.code = code


class CudaRuntime:
    """The CUDA runtime that this process has loaded, or the driver below it."""

    def __init__(self) -> None:
        """Find the library.

        Raises:
            OSError: Neither library exists, or the functions are missing.
        """
        self._library, self._names = _find()

    def relax_captures(self) -> None:
        """Exempt the calling thread permanently from the restrictions of graph captures.

        While a thread captures in mode *global* (torch's default), ``cudaEventQuery`` is forbidden
        to all other threads in that mode: the call fails *and* the capture becomes invalid. A
        thread in mode *relaxed* may query any event that was not itself recorded in a capture.

        Raises:
            CudaCallError: CUDA refused.

        Source:
            CUDA Runtime API, ``cudaThreadExchangeStreamCaptureMode``.
        """
        mode = ctypes.c_int(RELAXED)
        self._check(self._names.exchange_mode, ctypes.byref(mode))

    def new_stream(self) -> int:
        """Return the handle of a new stream of the current device.

        Streams of `torch.cuda.Stream` come from a pool of 32: the 33rd is the first again, so it
        may be one of the job's.

        Raises:
            CudaCallError: CUDA refused.
        """
        stream = ctypes.c_void_p()
        flags = ctypes.c_uint(NON_BLOCKING)
        self._check(self._names.create_stream, ctypes.byref(stream), flags)
        return stream.value or 0

    def _check(self, name: str, *arguments: object) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code != 0:
            raise CudaCallError(name, code)


def _find(
    *, runtime_names: Names = RUNTIME_NAMES, driver: str = DRIVER
) -> tuple[ctypes.CDLL, Names]:
    """Return the library that torch itself uses: another copy has other thread states.

    Raises:
        OSError: As `CudaRuntime` describes.
    """
    whole_process = ctypes.CDLL(None)
    if all(hasattr(whole_process, name) for name in runtime_names):
        return whole_process, runtime_names
    loaded = RUNTIME.search(Path("/proc/self/maps").read_text())
    if loaded is not None:
        return _having(ctypes.CDLL(loaded.group(1)), runtime_names)
    return _having(ctypes.CDLL(driver), DRIVER_NAMES)


def _having(library: ctypes.CDLL, names: Names) -> tuple[ctypes.CDLL, Names]:
    missing = [name for name in names if not hasattr(library, name)]
    if missing:
        raise OSError(f"{library._name} lacks {', '.join(missing)}")
    return library, names
