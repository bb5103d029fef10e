"""Samples of NVIDIA GPUs, from the driver's library (NVML)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .nvml import (
    CLOCK_MEMORY,
    CLOCK_SM,
    ECC_CORRECTED,
    ECC_SINCE_LOAD,
    ECC_UNCORRECTED,
    TEMPERATURE_GPU,
    Nvml,
    load_library,
)
from .sample import Sample, SourceAbsentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

IDLE_REASON = 0x1
"""Throttle reason of a device without work. It explains nothing and is masked.
Source: NVML, ``nvmlClocksEventReasonGpuIdle``."""

HZ_PER_MHZ = 1e6
W_PER_MW = 1e-3
RATIO_PER_PERCENT = 1e-2

VALUES: dict[str, tuple[Any, ...]] = {
    "gpu-clock-hz": (HZ_PER_MHZ, "nvmlDeviceGetClockInfo", CLOCK_SM),
    "gpu-memory-clock-hz": (HZ_PER_MHZ, "nvmlDeviceGetClockInfo", CLOCK_MEMORY),
    "gpu-power-w": (W_PER_MW, "nvmlDeviceGetPowerUsage"),
    "gpu-power-limit-w": (W_PER_MW, "nvmlDeviceGetEnforcedPowerLimit"),
    "gpu-temperature-c": (1.0, "nvmlDeviceGetTemperature", TEMPERATURE_GPU),
    **{
        f"gpu-ecc-{kind}-errors": (1.0, "nvmlDeviceGetTotalEccErrors", error, ECC_SINCE_LOAD)
        for kind, error in (("corrected", ECC_CORRECTED), ("uncorrected", ECC_UNCORRECTED))
    },
}
"""Factor to the unit of the name, function, and its arguments after the device."""

SLOW_VALUES = {
    "gpu-pcie-lanes": "nvmlDeviceGetCurrPcieLinkWidth",
    "gpu-pcie-generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "gpu-pcie-replay-events": "nvmlDeviceGetPcieReplayCounter",
}
LINK_FIELDS = {
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "gpu-nvlink-crc-flit-errors",
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "gpu-nvlink-crc-data-errors",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": "gpu-nvlink-replay-errors",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "gpu-nvlink-recovery-errors",
}
SLOW_ROUNDS = 10
"""Readings between two of what seldom changes: a call of the driver takes up to 50 us."""

MAX_NVLINKS = 18
"""Source: NVML, ``NVML_NVLINK_MAX_LINKS``."""

UNSIGNED_MEMBERS = {1: "uiVal", 2: "ulVal", 3: "ullVal"}
"""Source: NVML, ``nvmlValueType_t``."""


class GpuSource:
    """Clocks, power, temperature, memory, errors and throttle reasons of each GPU.

    The device of a sample is the local rank of the process that computes on the GPU, so that
    samples can be joined with that rank's spans. If the rank of at least one GPU is known, GPUs
    without a rank are left out: their index could be the local rank of another. If no rank is
    known, the driver's index is used.

    Args:
        local_rank_of: Returns the local rank of each device by `plain_uuid`.
        load: Returns the library, initialised or not.
    """

    name = "gpu"

    def __init__(
        self,
        *,
        local_rank_of: Callable[[], Mapping[str, int]] = dict,
        load: Callable[[], Any] = load_library,
    ) -> None:
        self._local_rank_of = local_rank_of
        self._load = load
        self._nvml: Nvml | None = None
        self._devices: list[tuple[str, Any]] = []
        self._pci: dict[str, str] = {}
        self._num_rounds = 0

    def read(self, at_ns: int) -> list[Sample]:
        """Return the samples of all devices, without values that a device does not support.

        Raises:
            SourceAbsentError: No driver, or no device.
        """
        nvml = self._nvml or self._open()
        local_ranks = self._local_rank_of()
        found = []
        for index, (uuid, handle) in enumerate(self._devices):
            device = local_ranks.get(uuid) if local_ranks else index
            if device is not None:
                values = list(_values(nvml, handle))
                if self._num_rounds % SLOW_ROUNDS == 0:
                    values += _slow_values(nvml, handle)
                found += [Sample(at_ns, name, value, device) for name, value in values]
        self._num_rounds += 1
        if not found and self._devices and not local_ranks:
            self.close()  # a driver that was loaded again needs a new initialisation
            raise SourceAbsentError("the NVIDIA driver returns no values: no GPU samples")
        return found

    def local_rank_of_pci(self) -> dict[str, int]:
        """Return the local ranks of devices by PCI address, "0000:3b:00"; by index if unknown."""
        local_ranks = self._local_rank_of()
        known = {uuid: index for index, (uuid, _) in enumerate(self._devices)}
        return {
            pci: rank
            for uuid, pci in self._pci.items()
            if (rank := local_ranks.get(uuid) if local_ranks else known[uuid]) is not None
        }

    def close(self) -> None:
        """Release the driver. A later reading initialises it again."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.close()

    def _open(self) -> Nvml:
        self._nvml = nvml = Nvml(self._load)
        self._devices = [
            (plain_uuid(nvml.ask("nvmlDeviceGetUUID", handle) or ""), handle)
            for handle in nvml.devices.values()
        ]
        infos = ((uuid, nvml.ask("nvmlDeviceGetPciInfo", handle)) for uuid, handle in self._devices)
        self._pci = {uuid: plain_pci(info.busId) for uuid, info in infos if info is not None}
        return nvml


def _slow_values(nvml: Nvml, handle: object) -> Iterator[tuple[str, float]]:
    for name, function in SLOW_VALUES.items():
        value = nvml.ask(function, handle)
        if value is not None:
            yield name, float(value)
    rows = nvml.ask("nvmlDeviceGetRemappedRows", handle)
    if rows is not None:
        corrected, uncorrected, is_pending, has_failed = rows
        yield "gpu-remapped-rows", float(corrected + uncorrected)
        yield "gpu-remapping-is-pending", float(is_pending)
        yield "gpu-remapping-has-failed", float(has_failed)
    links = [nvml.ask("nvmlDeviceGetNvLinkState", handle, n) for n in range(MAX_NVLINKS)]
    known = [link for link in links if link is not None]
    if known:
        yield "gpu-nvlink-active-links", float(sum(map(bool, known)))


def _values(nvml: Nvml, handle: object) -> Iterator[tuple[str, float]]:
    for name, (scale, function, *arguments) in VALUES.items():
        value = nvml.ask(function, handle, *arguments)
        if value is not None and math.isfinite(value):
            yield name, value * scale
    busy = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    if busy is not None:
        yield "gpu-utilisation-ratio", busy.gpu * RATIO_PER_PERCENT
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is not None:
        yield "gpu-memory-used-bytes", float(memory.used)
        yield "gpu-memory-total-bytes", float(memory.total)
    reasons = nvml.ask_throttle_reasons(handle)
    if reasons is not None:
        yield "gpu-throttle-reasons", float(reasons & ~IDLE_REASON)
    ids = [getattr(nvml.library, field) for field in LINK_FIELDS]
    fields = nvml.ask("nvmlDeviceGetFieldValues", handle, ids) or ()
    for name, field in zip(LINK_FIELDS.values(), fields, strict=False):
        member = UNSIGNED_MEMBERS.get(field.valueType)
        if not field.nvmlReturn and member is not None:
            yield name, float(getattr(field.value, member))


def plain_uuid(text: str | bytes) -> str:
    """Return a device's UUID in the common form: lower case, without ``GPU-``."""
    plain = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    return plain.strip().lower().removeprefix("gpu-")


def plain_pci(text: str | bytes) -> str:
    """Return a PCI address without its function, as the kernel writes it: "0000:3b:00"."""
    plain = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    return plain.strip().lower().rpartition(".")[0][-10:]
