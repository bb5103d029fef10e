"""The library of NVIDIA's driver (NVML)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .sample import SourceAbsentError

if TYPE_CHECKING:
    from collections.abc import Callable

CLOCK_SM, CLOCK_MEMORY, TEMPERATURE_GPU = 1, 2, 0
ECC_CORRECTED, ECC_UNCORRECTED = 0, 1
ECC_SINCE_LOAD, ECC_EVER = 0, 1
"""Source: NVML, ``nvmlClockType_t``, ``nvmlMemoryErrorType_t``, ``nvmlEccCounterType_t``."""

DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 9, 12
"""Answers of a host without the driver. Source: NVML, ``nvmlReturn_t``."""


class DriverFailedError(SourceAbsentError):
    """The driver's library is there, and fails or finds no device."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: no GPU samples")
        self.problem = problem


def load_library() -> Any:  # noqa: ANN401  # it has no types
    """Return the library of the package nvidia-ml-py, which is not initialised."""
    return importlib.import_module("pynvml")


class Nvml:
    """The initialised library. An answer that it does not have is None.

    Raises:
        SourceAbsentError: No package, no driver, or no device.
        DriverFailedError: One that fails or finds no device.
    """

    def __init__(self, load: Callable[[], Any] = load_library) -> None:
        try:
            self.library = load()
        except ImportError as error:
            raise SourceAbsentError("nvidia-ml-py is not installed: no GPU samples") from error
        try:
            self.library.nvmlInit()
        except self.library.NVMLError as error:
            if getattr(error, "value", None) in {DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND}:
                text = f"no NVIDIA driver ({error}): no GPU samples"
                raise SourceAbsentError(text) from error
            raise DriverFailedError(f"the NVIDIA driver's library fails ({error})") from error
        self.num_devices: int = self.ask("nvmlDeviceGetCount") or 0
        handles = (self.ask("nvmlDeviceGetHandleByIndex", n) for n in range(self.num_devices))
        self.devices = {n: handle for n, handle in enumerate(handles) if handle is not None}
        """Handle of each device that answers, by the driver's index."""

        if not self.devices:
            self.close()
            raise DriverFailedError("the NVIDIA driver finds no device")

    def ask(self, name: str, *arguments: object) -> Any:  # noqa: ANN401  # of any type
        """Return the answer of a function; None if it has none (``Not Supported``)."""
        try:
            return getattr(self.library, name)(*arguments)
        except (AttributeError, self.library.NVMLError):  # of an older package or driver
            return None

    def ask_throttle_reasons(self, handle: object) -> int | None:
        """Return the bits of ``nvmlClocksEventReasons`` of a device."""
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # drivers before 535 have an older name
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if reasons is None else int(reasons)

    def close(self) -> None:
        """Release the driver."""
        self.ask("nvmlShutdown")
