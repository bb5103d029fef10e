"""The two functions of CUDA that torch has no name for."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import NamedTuple

NON_BLOCKING = 1
"""``cudaStreamNonBlocking``: the stream neither waits for the default stream nor holds it up."""

RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``"""

RUNTIME = re.compile(r"\s(/\S*libcudart[^/\s]*\.so[^/\s]*)$", re.MULTILINE)
DRIVER = "libcuda.so.1"


class Names(NamedTuple):
    """What a library calls the two functions; their arguments are the same."""

    exchange_mode: str
    create_stream: str


RUNTIME_NAMES = Names("cudaThreadExchangeStreamCaptureMode", "cudaStreamCreateWithFlags")
DRIVER_NAMES = Names("cuThreadExchangeStreamCaptureMode", "cuStreamCreate")
"""A torch that has the runtime inside itself shows nobody its functions; the driver does."""


class CudaCallError(Exception):
    """A call of CUDA failed."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned CUDA error {code}")
        self.code = code


class CudaRuntime:
    """The CUDA runtime that this process has loaded, or the driver below it."""

    def __init__(self) -> None:
        """Find it.

        Raises:
            OSError: There is neither, or what there is lacks the functions.
        """
        self._library, self._names = _find()

    def relax_captures(self) -> None:
        """Exempt the calling thread, for good, from what a graph capture forbids to others.

        While any thread captures in mode *global* (torch's default), every other
        thread in that mode is forbidden ``cudaEventQuery``: the call fails *and*
        the capture is invalidated. A thread in mode *relaxed* may query any event
        that was not itself recorded in a capture.

        Raises:
            CudaCallError: CUDA refused.

        Source:
            CUDA Runtime API, ``cudaThreadExchangeStreamCaptureMode``.
        """
        mode = ctypes.c_int(RELAXED)
        self._check(self._names.exchange_mode, ctypes.byref(mode))

    def new_stream(self) -> int:
        """Return the handle of a new stream of the current device.

        Streams of `torch.cuda.Stream` come from a pool of 32: the 33rd is the first
        again, so one of them may be the job's.

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
    """Return the library that torch itself uses: another copy would have other thread states.

    Raises:
        OSError: As `CudaRuntime` says.
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
