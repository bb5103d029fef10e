"""The driver's report from its library (NVML), for hosts without `nvidia-smi`.

It is built as `nvidia-smi -q -x` would print it, so that the same checks read both.
"""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

from .nvidia_smi import Gpu, Report

if TYPE_CHECKING:
    from collections.abc import Callable

CORRECTED, UNCORRECTED, VOLATILE, AGGREGATE = 0, 1, 0, 1
CLOCK_SM = 1
REASONS = {
    0x04: "sw_power_cap", 0x08: "hw_slowdown", 0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake_slowdown",
}  # fmt: skip
"""Bits of the reasons of a low clock. Source: NVML, ``nvmlClocksEventReasons``."""


def read_nvml_report(load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> Report:
    """Return the report of all devices; without a library, a driver or a device it has none."""
    try:
        nvml = load()
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  # no package, no library, no driver: NVML has a type for each
        return Report(driver="", cuda="", num_attached=None, gpus=())
    try:
        num = _ask(nvml, "nvmlDeviceGetCount") or 0
        cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion")
        return Report(
            driver=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
            cuda="" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            num_attached=num,
            gpus=tuple(
                Gpu(index, _describe(nvml, handle))
                for index in range(num)
                if (handle := _ask(nvml, "nvmlDeviceGetHandleByIndex", index)) is not None
            ),
        )
    finally:
        _ask(nvml, "nvmlShutdown")


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:  # noqa: ANN401  # the library, any type
    """Return the driver's answer; None if it has none."""
    try:
        return getattr(nvml, name)(*arguments)
    except Exception:  # noqa: BLE001  # an error of NVML, or a function that it does not have
        return None


def _text(answer: str | bytes | None) -> str:
    return answer.decode("ascii", "replace") if isinstance(answer, bytes) else answer or ""


def _describe(nvml: Any, handle: Any) -> ET.Element:  # noqa: ANN401  # the library and its handle
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
        return _ask(nvml, name, handle, *arguments)

    put("product_name", _text(answer("nvmlDeviceGetName")) or None)
    put("uuid", _text(answer("nvmlDeviceGetUUID")) or None)
    persistence = answer("nvmlDeviceGetPersistenceMode")
    put("persistence_mode", None if persistence is None else _switch(persistence))
    ecc = answer("nvmlDeviceGetEccMode")
    put("ecc_mode/current_ecc", None if ecc is None else _switch(ecc[0]))
    for span, counter in (("volatile", VOLATILE), ("aggregate", AGGREGATE)):
        for kind, error in (("correctable", CORRECTED), ("uncorrectable", UNCORRECTED)):
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
    reasons = answer("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # drivers before 535 have an older name
        reasons = answer("nvmlDeviceGetCurrentClocksThrottleReasons")
    for bit, name in REASONS.items() if reasons is not None else ():
        path = f"clocks_event_reasons/clocks_event_reason_{name}"
        put(path, "Active" if reasons & bit else "Not Active")
    put("clocks/sm_clock", answer("nvmlDeviceGetClockInfo", CLOCK_SM))
    put("max_clocks/sm_clock", answer("nvmlDeviceGetMaxClockInfo", CLOCK_SM))
    return gpu


def _switch(is_on: int) -> str:
    return "Enabled" if is_on else "Disabled"
