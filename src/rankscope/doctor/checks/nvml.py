"""The driver's report from its library (NVML), for hosts without `nvidia-smi`.

It is built as `nvidia-smi -q -x` would print it, so that the same checks read both.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

from rankscope.collector.host.nvml import (
    CLOCK_SM,
    ECC_CORRECTED,
    ECC_EVER,
    ECC_SINCE_LOAD,
    ECC_UNCORRECTED,
    Nvml,
    load_library,
)
from rankscope.collector.host.sample import SourceAbsentError

from .nvidia_smi import Gpu, Report

if TYPE_CHECKING:
    from collections.abc import Callable

REASONS = {
    0x04: "sw_power_cap", 0x08: "hw_slowdown", 0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake_slowdown",
}  # fmt: skip
"""Bits of the reasons of a low clock. Source: NVML, ``nvmlClocksEventReasons``."""


def read_nvml_report(load: Callable[[], Any] = load_library) -> Report:
    """Return the report of all devices; without a library, a driver or a device it has none."""
    try:
        nvml = Nvml(load)
    except SourceAbsentError:
        return Report(driver="", cuda="", num_attached=None, gpus=())
    cuda = nvml.ask("nvmlSystemGetCudaDriverVersion")
    report = Report(
        driver=_text(nvml.ask("nvmlSystemGetDriverVersion")),
        cuda="" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        num_attached=nvml.num_devices,
        gpus=tuple(Gpu(index, _describe(nvml, handle)) for index, handle in nvml.devices.items()),
    )
    nvml.close()
    return report


def _text(answer: str | bytes | None) -> str:
    return answer.decode("ascii", "replace") if isinstance(answer, bytes) else answer or ""


def _describe(nvml: Nvml, handle: object) -> ET.Element:
    gpu = ET.Element("gpu")

    def put(path: str, value: object) -> None:
        if value is None:
            return
        element = gpu
        for name in path.split("/"):
            found = element.find(name)
            element = ET.SubElement(element, name) if found is None else found
        element.text = str(value)

    def answer(name: str, *arguments: object) -> Any:  # noqa: ANN401  # of any type
        return nvml.ask(name, handle, *arguments)

    put("product_name", _text(answer("nvmlDeviceGetName")) or None)
    put("uuid", _text(answer("nvmlDeviceGetUUID")) or None)
    persistence = answer("nvmlDeviceGetPersistenceMode")
    put("persistence_mode", None if persistence is None else _switch(persistence))
    ecc = answer("nvmlDeviceGetEccMode")
    put("ecc_mode/current_ecc", None if ecc is None else _switch(ecc[0]))
    for span, counter in (("volatile", ECC_SINCE_LOAD), ("aggregate", ECC_EVER)):
        for kind, error in (
            ("correctable", ECC_CORRECTED),
            ("uncorrectable", ECC_UNCORRECTED),
        ):
            num = answer("nvmlDeviceGetTotalEccErrors", error, counter)
            put(f"ecc_errors/{span}/{kind}", num)
    remaps = answer("nvmlDeviceGetRemappedRows")
    if remaps is not None:
        put("remapped_rows/remapped_row_pending", "Yes" if remaps[2] else "No")
        put("remapped_rows/remapped_row_failure", "Yes" if remaps[3] else "No")
    link = "pci/pci_gpu_link_info"
    put(f"{link}/link_widths/current_link_width", answer("nvmlDeviceGetCurrPcieLinkWidth"))
    put(f"{link}/link_widths/max_link_width", answer("nvmlDeviceGetMaxPcieLinkWidth"))
    put(f"{link}/pcie_gen/current_link_gen", answer("nvmlDeviceGetCurrPcieLinkGeneration"))
    put(f"{link}/pcie_gen/max_link_gen", answer("nvmlDeviceGetMaxPcieLinkGeneration"))
    busy = answer("nvmlDeviceGetUtilizationRates")
    put("utilization/gpu_util", None if busy is None else busy.gpu)
    reasons = nvml.ask_throttle_reasons(handle)
    for bit, name in REASONS.items():
        path = f"clocks_event_reasons/clocks_event_reason_{name}"
        put(path, None if reasons is None else "Active" if reasons & bit else "Not Active")
    put("clocks/sm_clock", answer("nvmlDeviceGetClockInfo", CLOCK_SM))
    put("max_clocks/sm_clock", answer("nvmlDeviceGetMaxClockInfo", CLOCK_SM))
    return gpu


def _switch(is_on: int) -> str:
    return "Enabled" if is_on else "Disabled"
