"""GPU samples, with a fake of NVML for a host of two devices."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.host.gpu import SLOW_ROUNDS, GpuSource, plain_uuid
from rankscope.collector.host.sample import Sample, SourceAbsentError

if TYPE_CHECKING:
    from collections.abc import Callable

pynvml: Any = importlib.import_module("pynvml")

UUIDS = ("GPU-AAAA0000-1111", "GPU-BBBB0000-2222")


class FakeNvml:
    """Fake of NVML with two devices. Functions in ``unsupported`` raise as the real ones do."""

    NVMLError = pynvml.NVMLError
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38
    NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL = 45
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59

    def __init__(self, *, num_devices: int = 2, unsupported: frozenset[str] = frozenset()) -> None:
        self.num_devices = num_devices
        self.unsupported = unsupported
        self.is_open = False
        self.reasons = 0x41
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetCount": lambda: self.num_devices,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: UUIDS[handle],
            "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1755, 2: 2619}[kind] - handle,
            "nvmlDeviceGetPowerUsage": lambda handle: 612_500 + handle,
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
            "nvmlDeviceGetTemperature": lambda _, sensor: {0: 61}[sensor],
            "nvmlDeviceGetTotalEccErrors": lambda _, kind, counter: {(0, 0): 3, (1, 0): 1}[
                kind, counter
            ],
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=2**36, total=2**37),
            "nvmlDeviceGetCurrentClocksEventReasons": lambda _: self.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: self.reasons,
            "nvmlDeviceGetFieldValues": self._fields,
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(
                busId=f"00000000:{0x3B + handle:02X}:00.0"
            ),
            "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16 - 8 * handle,
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 5,
            "nvmlDeviceGetPcieReplayCounter": lambda _: 7,
            "nvmlDeviceGetRemappedRows": lambda handle: (2, handle, False, False),
            "nvmlDeviceGetNvLinkState": lambda _, link: {True: 1}[link < 4],
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.answers:  # an older package
            raise AttributeError(name)
        answer = self.answers[name]

        def call(*arguments: object) -> object:
            if not self.is_open:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            if name in self.unsupported:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            try:
                return answer(*arguments)
            except KeyError:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) from None

        return call

    def nvmlInit(self) -> None:  # noqa: N802
        if self.num_devices < 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def _fields(self, _handle: int, ids: list[int]) -> list[Any]:
        found = []
        for number in ids:
            field = pynvml.c_nvmlFieldValue_t()
            field.fieldId = number
            field.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            field.value.ullVal = number + 2**33
            if number == self.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL:
                field.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            found.append(field)
        return found


def test_every_value_of_a_device_has_its_unit() -> None:
    source = GpuSource(load=FakeNvml)

    found = {sample.name: sample.value for sample in source.read(9) if sample.device == 0}

    assert found == {
        "gpu-clock-hz": 1.755e9,
        "gpu-memory-clock-hz": 2.619e9,
        "gpu-power-w": 612.5,
        "gpu-power-limit-w": 700.0,
        "gpu-temperature-c": 61.0,
        "gpu-ecc-corrected-errors": 3.0,
        "gpu-ecc-uncorrected-errors": 1.0,
        "gpu-utilisation-ratio": 0.97,
        "gpu-memory-used-bytes": 2.0**36,
        "gpu-memory-total-bytes": 2.0**37,
        "gpu-throttle-reasons": 64.0,
        "gpu-nvlink-crc-flit-errors": 38 + 2.0**33,
        "gpu-nvlink-crc-data-errors": 45 + 2.0**33,
        "gpu-nvlink-recovery-errors": 59 + 2.0**33,
        "gpu-pcie-lanes": 16.0,
        "gpu-pcie-generation": 5.0,
        "gpu-pcie-replay-events": 7.0,
        "gpu-remapped-rows": 2.0,
        "gpu-remapping-is-pending": 0.0,
        "gpu-remapping-has-failed": 0.0,
        "gpu-nvlink-active-links": 4.0,
    }


def test_what_seldom_changes_is_read_seldom() -> None:
    source = GpuSource(load=FakeNvml)

    rounds = [{sample.name for sample in source.read(at_ns)} for at_ns in range(SLOW_ROUNDS + 1)]

    read = [number for number, names in enumerate(rounds) if "gpu-pcie-lanes" in names]
    assert read == [0, SLOW_ROUNDS]


def test_devices_are_known_by_their_pci_address() -> None:
    source = GpuSource(load=FakeNvml, local_rank_of=lambda: {plain_uuid(UUIDS[1]): 6})
    source.read(9)

    assert source.local_rank_of_pci() == {"0000:3c:00": 6}


def test_a_device_without_work_is_not_throttled() -> None:
    nvml = FakeNvml()
    nvml.reasons = 0x1

    found = GpuSource(load=lambda: nvml).read(9)

    reasons = [sample.value for sample in found if sample.name == "gpu-throttle-reasons"]
    assert reasons == [0.0, 0.0]


def test_unsupported_values_are_left_out() -> None:
    unsupported = frozenset(
        {
            "nvmlDeviceGetTotalEccErrors",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetNvLinkState",
            "nvmlDeviceGetPowerUsage",
        }
    )

    found = GpuSource(load=lambda: FakeNvml(unsupported=unsupported)).read(9)

    names = {sample.name for sample in found}
    assert "gpu-clock-hz" in names
    assert not [name for name in names if "ecc" in name or "nvlink" in name]
    assert "gpu-power-w" not in names


def test_an_older_driver_has_an_older_function_for_reasons() -> None:
    nvml = FakeNvml(unsupported=frozenset({"nvmlDeviceGetCurrentClocksEventReasons"}))

    found = GpuSource(load=lambda: nvml).read(9)

    assert Sample(9, "gpu-throttle-reasons", 64.0, 0) in found


def test_a_devices_samples_have_the_local_rank_that_uses_it() -> None:
    # GIVEN: the first rank uses the second device, and no rank uses the first
    local_ranks = {plain_uuid("bbbb0000-2222"): 0}

    found = GpuSource(load=FakeNvml, local_rank_of=lambda: local_ranks).read(9)

    clocks = [sample for sample in found if sample.name == "gpu-clock-hz"]
    assert clocks == [Sample(9, "gpu-clock-hz", 1.754e9, 0)]


def test_the_drivers_index_is_used_if_no_rank_declared_its_device() -> None:
    found = GpuSource(load=FakeNvml).read(9)
    assert {sample.device for sample in found} == {0, 1}


def test_without_a_driver_there_is_one_reason_and_no_sample() -> None:
    source = GpuSource(load=lambda: FakeNvml(num_devices=-1))
    with pytest.raises(SourceAbsentError, match=r"^no NVIDIA driver \(NVML Shared Library Not"):
        source.read(0)


def test_without_devices_the_driver_is_released() -> None:
    nvml = FakeNvml(num_devices=0)
    with pytest.raises(SourceAbsentError, match="finds no device"):
        GpuSource(load=lambda: nvml).read(0)
    assert not nvml.is_open


def test_without_the_package_there_is_one_reason() -> None:
    def load() -> object:
        raise ImportError

    with pytest.raises(SourceAbsentError, match="nvidia-ml-py is not installed"):
        GpuSource(load=load).read(0)


def test_a_driver_that_stopped_answering_is_initialised_again() -> None:
    nvml = FakeNvml()
    source = GpuSource(load=lambda: nvml)
    source.read(0)
    nvml.is_open = False  # as after a reload of the driver
    with pytest.raises(SourceAbsentError, match="returns no values"):
        source.read(1)

    assert source.read(2)


@pytest.mark.skipif(
    not hasattr(pynvml, "nvmlDeviceGetFieldValues"), reason="nvidia-ml-py is older than 11.5"
)
def test_the_installed_library_has_every_name_in_use() -> None:
    nvml = FakeNvml()
    assert [name for name in nvml.answers if not hasattr(pynvml, name)] == []
    for name in dir(FakeNvml):
        if name.startswith("NVML_FI"):
            assert getattr(pynvml, name) > 0
