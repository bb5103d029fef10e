"""The two functions of the CUDA runtime that torch has no name for."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

NON_BLOCKING = 1
"""``cudaStreamNonBlocking``: the stream neither waits for the default stream nor holds it up."""

RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``"""

LIBRARY = re.compile(r"\s(/\S*libcudart[^/\s]*\.so[^/\s]*)$", re.MULTILINE)


class CudaRuntimeError(Exception):
    """A call of the CUDA runtime failed."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.code = code


class CudaRuntime:
    """The CUDA runtime that this process has loaded."""

    def __init__(self) -> None:
        """Find it.

        Raises:
            OSError: The process has loaded none, or one that lacks the functions.
        """
        self._library = _loaded_runtime()

    def relax_captures(self) -> None:
        """Exempt the calling thread, for good, from what a graph capture forbids to others.

        While any thread captures in mode *global* (torch's default), every other
        thread in that mode is forbidden ``cudaEventQuery``: the call fails *and*
        the capture is invalidated. A thread in mode *relaxed* may query any event
        that was not itself recorded in a capture.

        Raises:
            CudaRuntimeError: The runtime refused.

        Source:
            CUDA Runtime API, ``cudaThreadExchangeStreamCaptureMode``.
        """
        mode = ctypes.c_int(RELAXED)
        self._check("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def new_stream(self) -> int:
        """Return the handle of a new stream of the current device.

        Streams of `torch.cuda.Stream` come from a pool of 32: the 33rd is the first
        again, so one of them may be the job's.

        Raises:
            CudaRuntimeError: The runtime refused.
        """
        stream = ctypes.c_void_p()
        self._check("cudaStreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
        return stream.value or 0

    def _check(self, name: str, *arguments: object) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code != 0:
            raise CudaRuntimeError(name, code)


def _loaded_runtime() -> ctypes.CDLL:
    """Return the runtime that torch uses: another copy of it would have other thread states."""
    whole_process = ctypes.CDLL(None)
    if hasattr(whole_process, "cudaStreamCreateWithFlags"):
        return whole_process
    found = LIBRARY.search(Path("/proc/self/maps").read_text())
    if found is None:
        raise OSError("this process has loaded no CUDA runtime library")
    library = ctypes.CDLL(found.group(1))
    if not hasattr(library, "cudaThreadExchangeStreamCaptureMode"):
        raise OSError(f"{found.group(1)} lacks cudaThreadExchangeStreamCaptureMode")
    return library
