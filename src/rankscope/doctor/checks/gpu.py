"""Checks of the GPUs: are all there, and does each one work at its full speed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_count, format_duration
from rankscope.collector.host.gpu import plain_pci, plain_uuid
from rankscope.tracer.span import NS_PER_US

from ..host import is_container
from ..result import Outcome, error, healthy, not_applicable, warning
from .nvidia_smi import NUMBER, Gpu, Links, Report, parse_links, parse_report, parse_text_report
from .nvml import read_nvml_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ..host import Host, ToolOutput

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
"""PCI classes of a GPU: VGA controller and 3D controller. An NVSwitch is a bridge."""

LINK = "pci/pci_gpu_link_info"
NO_GPU = "no driver lists an NVIDIA GPU"

LOST_TEXTS = ("GPU is lost", "Unknown Error", "requires reset", "ERR!")
FAILURES = {
    "Driver/library version mismatch": "reload the kernel modules, or reboot the host",
    "Unable to determine the device handle": "reboot the host; if it returns, replace the GPU",
    "GPU is lost": "reboot the host; if it returns, replace the GPU",
    "Failed to initialize NVML: Unknown Error": "restart the container, which has lost its devices"
    " (a reload of systemd takes them away); else reboot the host",
    "Failed to initialize NVML: Insufficient Permissions": "give this user /dev/nvidia*",
    "Failed to initialize NVML: GPU access blocked": "see the operating system's settings",
}
"""Messages of `nvidia-smi` about GPUs that are there, and what to do.
Source: issue threads that the tests name."""

NO_DRIVER = ("communicate with the NVIDIA driver", "Failed to initialize NVML", "libnvidia-ml.so")
"""Messages of `nvidia-smi` without a driver: an error unless the host has no GPU."""

NO_DEVICE = "No devices were found"
"""Message of a driver that is loaded, and has taken no GPU."""

THROTTLES = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "thermal slowdown by the hardware",
    "hw_power_brake_slowdown": "power brake: the power supply asks for less",
    "sw_thermal_slowdown": "thermal slowdown by the driver",
}
"""Reasons of a low clock that are faults. A power cap is normal under load.
Source: NVML, ``nvmlClocksEventReasons``."""

COOL = "check cooling, power supplies and power cables of the host"
SOFT_THROTTLE = "sw_thermal_slowdown"
PAST_THROTTLES = {
    "hw_therm_slowdown": "by the hardware for heat",
    "hw_power_brake": "by the power brake",
}
"""Times of such reasons since the driver was loaded; a GPU between jobs has no present reason."""

CORRUPTED_INFOROM = re.compile(r"infoROM is corrupted at gpu (\S+)")
FINE_FABRIC_TEXTS = frozenset({"healthy", "full", "false", "no", "disabled"})
NVLINK_BOARDS = re.compile(r"SXM|HBM3$|^NVIDIA (?:GB\d+|[HB]20|[HB][123]00)$")
"""Product names of boards that NVLink connects always, not by a bridge that may be missing."""


def read_report(host: Host) -> Report | None:
    """Return the driver's report, by its tool or else its library; None if there is none."""

    def read() -> Report | None:
        output = report_output(host)
        if output is None:
            return None if host.is_recorded else read_nvml_report()
        return parse_report(output.text) or parse_text_report(output.text)

    return host.once("nvidia-smi report", read)


def report_output(host: Host) -> ToolOutput | None:
    """Return the output of `nvidia-smi`; of a recorded host its text form counts too."""
    return host.first_tool(("nvidia-smi", "-q", "-x"), ("nvidia-smi", "-q"), ("nvidia-smi",))


def bus_gpus(host: Host) -> list[Path]:
    """Return the NVIDIA GPUs on the PCI bus."""
    return [
        device
        for device in host.glob("/sys/bus/pci/devices/*")
        if host.read(device / "vendor") == NVIDIA_VENDOR
        and (host.read(device / "class") or "").startswith(DISPLAY_CLASSES)
    ]


def wanted_gpus(host: Host) -> tuple[int, str]:
    """Return how many GPUs the host must have, and who says so."""
    if host.expected_gpus:
        return host.expected_gpus, "expected"
    if not is_container(host) and (num := len(bus_gpus(host))):
        return num, "on the PCI bus"
    return len(host.glob("/proc/driver/nvidia/gpus/*")), "of the kernel's driver"


def check_count(host: Host) -> Iterator[Outcome]:
    """Compare the GPUs that the driver lists with those on the bus and those that the job wants."""
    output, report = report_output(host), read_report(host)
    is_shared = is_container(host)
    if output is not None and output.status is None:
        yield error("nvidia-smi does not answer: the driver hangs", "see dmesg; reboot the host")
        return
    if report is not None and report.problem:
        yield error(report.problem, "see dmesg; install the driver again, or reboot the host")
        return
    text = "" if output is None else output.text
    num = 0 if report is None else len(report.gpus)
    wanted, source = wanted_gpus(host)
    failure = next((message for message in FAILURES if message in text), None)
    if failure is not None:
        yield error(f"nvidia-smi: {_first_line(text, failure)}", FAILURES[failure])
    elif num < wanted:
        remedy = "see dmesg for Xid 79; reboot the host; if it returns, replace the GPU"
        if output is None:
            remedy = "install the driver, or give the container its GPUs"
        elif any(message in text for message in NO_DRIVER):
            remedy = "install or load the driver: see dmesg"
        yield error(f"the driver lists {num} of {format_count(wanted, 'GPU')} {source}", remedy)
    elif not num:
        yield from _none(host, text, is_shared=is_shared)
    elif report is not None:
        found = [*_missing(report), *_lost(report), *_hidden(host, num)]
        found += _corrupted_inforoms(report, text)
        models = Counter(gpu.text("product_name") or "GPU" for gpu in report.gpus)
        value = ", ".join(f"{number} x {model}" for model, number in models.items())
        if len(models) > 1:
            found.append(warning(f"unlike GPUs: {value}", "give a job GPUs of one model"))
        yield from found or [healthy(value, value=value)]


def _none(host: Host, text: str, *, is_shared: bool) -> Iterator[Outcome]:
    """Yield why there is no GPU: an error if the driver says so of a host that may have some."""
    failure = next((message for message in (NO_DEVICE, *NO_DRIVER) if message in text), None)
    is_bus_known = host.path("/sys/bus/pci/devices").exists()
    lost = next((word for word in LOST_TEXTS if word in text), None)
    if failure is not None and not is_shared and (failure == NO_DEVICE or not is_bus_known):
        remedy = "install or load the driver, and see dmesg for why it takes no GPU"
        yield error(f"nvidia-smi: {_first_line(text, failure)[:200]}", remedy)
    elif lost is not None and failure is None:
        yield error(
            f"nvidia-smi: {_first_line(text, lost)[:200]}", "reset the GPU or reboot the host"
        )
    elif text and not is_shared and failure is None:
        first = next(iter(text.strip().splitlines()), "")
        yield warning(f"nvidia-smi has no report: {first[:200]}", "run nvidia-smi -q, see dmesg")
    else:
        place = "this container" if is_shared else "this host"
        yield not_applicable(f"{place} has no NVIDIA GPU")


def _first_line(text: str, message: str) -> str:
    return next((line.strip() for line in text.splitlines() if message in line), message)


def _missing(report: Report) -> Iterator[Outcome]:
    if report.num_attached is not None and report.num_attached > len(report.gpus):
        yield warning(
            f"{report.num_attached} GPUs are attached, and {len(report.gpus)} are described",
            "see nvidia-smi -L and dmesg",
        )


def _corrupted_inforoms(report: Report, text: str) -> Iterator[Outcome]:
    parts = {plain_pci(gpu.text("pci/pci_bus_id") or ""): gpu.part for gpu in report.gpus}
    for address in dict.fromkeys(CORRUPTED_INFOROM.findall(text)):
        yield warning(
            "its infoROM is corrupted, which has its serial number and its history of errors",
            "flash the firmware, or replace the GPU",
            part=parts.get(plain_pci(address), address),
        )


def _lost(report: Report) -> Iterator[Outcome]:
    for gpu in report.gpus:
        texts = [text for _, text in gpu.leaves(".")]
        lost = next((text for text in texts if any(word in text for word in LOST_TEXTS)), None)
        if lost is not None:
            remedy = "reset the GPU or reboot the host"
            yield error(f"the driver answers: {lost}", remedy, part=gpu.part)
        asked = [
            name.replace("_", " ")
            for name in ("reset_required", "drain_and_reset_recommended")
            if gpu.text(f"gpu_reset_status/{name}") == "Yes"
        ]
        asked += [action] if (action := gpu.text("gpu_recovery_action")) else []
        if asked:
            yield error(
                f"the driver asks for recovery: {', '.join(asked)}",
                "drain the host and reset the GPU, or do as it says",
                part=gpu.part,
                device=plain_uuid(gpu.uuid),
            )


def _hidden(host: Host, num: int) -> Iterator[Outcome]:
    visible = host.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names or names[0] == "-1":
        yield warning("CUDA_VISIBLE_DEVICES hides all GPUs", "unset it, or list the job's GPUs")
    beyond = [name for name in names if name.isdigit() and int(name) >= num]
    if beyond:
        yield error(
            f"CUDA_VISIBLE_DEVICES={visible}: there is no GPU {', '.join(beyond)}, so CUDA hides it"
            " and all after it",
            f"list GPUs from 0 to {num - 1}",
        )


def read_gpus(host: Host) -> tuple[Gpu, ...]:
    """Return the GPUs that the driver reports."""
    report = read_report(host)
    return () if report is None else report.gpus


def per_gpu(
    judge: Callable[[Gpu], Iterator[Outcome]], *, healthy_text: str
) -> Callable[[Host], Iterator[Outcome]]:
    """Return a check that judges each GPU, and that is not applicable without one."""

    def check(host: Host) -> Iterator[Outcome]:
        yield from _judge_each(read_gpus(host), judge, healthy_text=healthy_text)

    return check


def _judge_each(
    gpus: Sequence[Gpu], judge: Callable[[Gpu], Iterator[Outcome]], *, healthy_text: str
) -> Iterator[Outcome]:
    """Yield the deviations of the GPUs, or one outcome for all of them."""
    if not gpus:
        yield not_applicable(NO_GPU)
        return
    outcomes = [_of(gpu, outcome) for gpu in gpus for outcome in judge(gpu)]
    deviations = [outcome for outcome in outcomes if outcome.is_deviation]
    if deviations:
        yield from deviations
    elif len(outcomes) >= len(gpus):
        yield outcomes[0]
    else:
        yield healthy(f"{format_count(len(gpus), 'GPU')}: {healthy_text}")


def _of(gpu: Gpu, outcome: Outcome) -> Outcome:
    if not outcome.is_deviation:
        return outcome
    return replace(outcome, part=gpu.part, device=plain_uuid(gpu.uuid))


def judge_ecc(gpu: Gpu) -> Iterator[Outcome]:
    """Yield memory errors of a GPU; corrected ones too, because others follow them."""
    if gpu.text("ecc_mode/current_ecc") is None:
        yield not_applicable("the GPUs have no ECC")
        return
    if gpu.text("ecc_mode/current_ecc") == "Disabled":
        yield warning(
            "ECC is off, so memory errors spoil results unseen",
            "nvidia-smi -e 1, then reset the GPU",
        )
        return
    now = _ecc_sums(gpu, "ecc_errors/volatile")
    ever = _ecc_sums(gpu, "ecc_errors/aggregate")
    flags = dict(gpu.leaves("ecc_errors"))
    of_parts = _mig_errors(gpu)
    if not any(text.isdigit() for text in flags.values()) and of_parts is None:
        yield not_applicable("the driver reports no numbers of memory errors")
        return
    now["uncorrectable"] += of_parts or 0
    if now["uncorrectable"]:
        yield error(
            f"{format_count(now['uncorrectable'], 'uncorrectable memory error')} since the driver"
            " was loaded",
            "reset the GPU; if they return, replace it",
        )
    elif ever["uncorrectable"]:
        yield warning(
            f"{format_count(ever['uncorrectable'], 'uncorrectable memory error')} in its life, none"
            " since the driver was loaded",
            "replace it if the number grows",
        )
    if now["correctable"]:
        yield warning(
            f"{format_count(now['correctable'], 'corrected memory error')} since the driver was"
            " loaded",
            "nothing while the number stays; replace the GPU if it grows",
        )
    for name, text in flags.items():
        if name in {"sram_threshold_exceeded", "unrepairable_memory"} and text == "Yes":
            yield error(name.replace("_", " "), "replace the GPU")
        elif name.endswith("repair_pending") and text == "Yes":
            yield error(name.replace("_", " "), "reset the GPU")


def _ecc_sums(gpu: Gpu, path: str) -> dict[str, int]:
    """Return the numbers of errors by kind, of the reports of old and new drivers."""
    sums = {"correctable": 0, "uncorrectable": 0}
    for name, text in gpu.leaves(path):
        if text.isdigit() and "correctable" in name:
            sums["uncorrectable" if "uncorrectable" in name else "correctable"] += int(text)
    for name, kind in (("single_bit", "correctable"), ("double_bit", "uncorrectable")):
        sums[kind] += int(gpu.number(f"{path}/{name}/total") or 0)
    return sums


def _mig_errors(gpu: Gpu) -> int | None:
    """Return the uncorrectable errors of all MIG devices; None if there is none that reports."""
    numbers = [
        int(element.text or "")
        for device in gpu.element.iter("mig_device")
        for element in device.iter()
        if "uncorrectable" in element.tag and (element.text or "").strip().isdigit()
    ]
    return sum(numbers) if numbers else None


def judge_remaps(gpu: Gpu) -> Iterator[Outcome]:
    """Yield remapped rows that need a reset or a new GPU, and retired pages of older GPUs."""
    failed = gpu.text("remapped_rows/remapped_row_failure")
    pending = gpu.text("remapped_rows/remapped_row_pending")
    retired = gpu.text("retired_pages/pending_retirement", "retired_pages/pending_blacklist")
    if failed is None and pending is None and retired is None:
        yield not_applicable("the GPUs remap no rows")
        return
    if failed == "Yes":
        yield error("a memory row could not be remapped", "replace the GPU")
    elif pending == "Yes" or retired == "Yes":
        yield error("a bad memory row waits to be remapped", "reset the GPU before the next job")
    elif gpu.number("remapped_rows/row_remapper_histogram/row_remapper_histogram_none"):
        yield warning("a memory bank has no spare row left", "plan to replace the GPU")


def judge_throttle(gpu: Gpu) -> Iterator[Outcome]:
    """Yield what keeps the clock of a GPU low."""
    reasons = {
        re.sub(r"^clocks_(?:event|throttle)_reason_", "", name): text
        for path in ("clocks_event_reasons", "clocks_throttle_reasons")
        for name, text in gpu.leaves(path)
    }
    if not reasons:
        yield not_applicable("the driver does not say why clocks are low")
        return
    active = [name for name in THROTTLES if reasons.get(name) == "Active"]
    if len(active) > 1 and active[0] == "hw_slowdown":  # the sum of the hardware's reasons
        active = active[1:]
    if active:
        now, most = gpu.number("clocks/sm_clock"), gpu.number("max_clocks/sm_clock")
        speed = "" if now is None or most is None else f" (now {now:,.0f} of {most:,.0f} MHz)"
        text = ", ".join(THROTTLES[name] for name in active) + speed
        make = warning if active == [SOFT_THROTTLE] else error
        yield make(text, COOL)
    for name, text in gpu.leaves("clocks_event_reasons_counters"):
        cause = PAST_THROTTLES.get(name.removeprefix("clocks_event_reasons_counters_"))
        micros = NUMBER.match(text)
        if cause and not active and micros is not None and float(micros[0]) > 0:
            duration = format_duration(int(float(micros[0])) * NS_PER_US)
            yield warning(f"slowed down {cause} for {duration} since the driver was loaded", COOL)
    clock, usual_clock = (
        gpu.number(f"{name}/graphics_clock")
        for name in ("applications_clocks", "default_applications_clocks")
    )
    if clock is not None and usual_clock is not None and clock < usual_clock:
        yield warning(
            f"the application clock is {clock:,.0f} MHz, and {usual_clock:,.0f} MHz by default",
            "nvidia-smi -rac, unless it is low on purpose",
        )
    limit = gpu.number(
        "gpu_power_readings/current_power_limit",
        "power_readings/power_limit",
        "gpu_power_readings/power_limit",
    )
    usual = gpu.number(
        "gpu_power_readings/default_power_limit", "power_readings/default_power_limit"
    )
    if limit is not None and usual is not None and limit < usual:
        yield warning(
            f"the power limit is {limit:,.0f} W, and {usual:,.0f} W by default",
            f"nvidia-smi -pl {usual:.0f}, unless it is low on purpose",
        )


def check_pcie(host: Host) -> Iterator[Outcome]:
    """Find PCIe links with fewer lanes than they can have, or a lower generation under load.

    An idle GPU lowers the generation of its link, so without load only the lanes are judged. A slot
    may have fewer lanes than the GPU, as in many clouds: then all GPUs of the host have as few.
    """
    gpus = read_gpus(host)
    widths = (gpu.number(f"{LINK}/link_widths/current_link_width") for gpu in gpus)
    widest = max((width for width in widths if width is not None), default=0.0)
    judge = partial(judge_pcie, widest=widest)
    yield from _judge_each(gpus, judge, healthy_text="all lanes")


def judge_pcie(gpu: Gpu, widest: float) -> Iterator[Outcome]:
    """Yield the deviations of a GPU's PCIe link, beside the lanes of the host's widest link."""
    width = gpu.number(f"{LINK}/link_widths/current_link_width")
    most_width = gpu.number(f"{LINK}/link_widths/max_link_width")
    generation = gpu.number(f"{LINK}/pcie_gen/current_link_gen")
    most_generation = gpu.number(f"{LINK}/pcie_gen/max_link_gen")
    if width is None or most_width is None:
        yield not_applicable("the driver does not report the PCIe link")
        return
    remedy = "reseat the GPU or its riser; reboot the host"
    if width < most_width:
        text = f"the PCIe link has {width:.0f} of {most_width:.0f} lanes"
        if width < widest:
            yield error(text, remedy)
        else:
            remedy = f"nothing if the slot has {width:.0f}, as in some clouds; else {remedy}"
            yield warning(text, remedy)
    is_busy = bool(gpu.number("utilization/gpu_util"))
    if is_busy and generation is not None and generation < (most_generation or 0):
        yield error(
            f"the PCIe link runs at generation {generation:.0f} of {most_generation:.0f} in use",
            remedy,
        )


def judge_persistence(gpu: Gpu) -> Iterator[Outcome]:
    """Yield a driver that unloads the GPU when no process uses it."""
    mode = gpu.text("persistence_mode")
    if mode is None:
        yield not_applicable("the driver does not report persistence")
    elif mode == "Disabled":
        yield warning(
            "persistence is off: each start of a job initialises the GPU anew",
            "nvidia-smi -pm 1, or start nvidia-persistenced",
        )


def judge_mode(gpu: Gpu) -> Iterator[Outcome]:
    """Yield modes in which a training job cannot use the whole GPU."""
    mode, mig = gpu.text("compute_mode"), gpu.text("mig_mode/current_mig")
    if mode is None and mig is None:
        yield not_applicable("the driver does not report the compute mode")
    if mode == "Prohibited":
        yield error("the compute mode prohibits all jobs", "nvidia-smi -c 0")
    if mig == "Enabled":
        yield warning(
            "MIG is on: a job gets a part of the GPU, and NCCL no NVLink",
            "nvidia-smi -mig 0, if the job needs the whole GPU",
        )


def judge_fabric(gpu: Gpu) -> Iterator[Outcome]:
    """Yield a GPU that the fabric manager has not joined to its NVSwitches."""
    state, status = gpu.text("fabric/state"), gpu.text("fabric/status")
    if state is None:
        yield not_applicable("the GPUs have no NVSwitch fabric")
        return
    remedy = "restart nvidia-fabricmanager, then see its log"
    if state != "Completed" or status not in {None, "Success"}:
        yield error(f"the NVSwitch fabric is not ready: {state}, {status or 'no status'}", remedy)
    bad = [
        f"{name.replace('_', ' ')}: {text}"
        for name, text in gpu.leaves("fabric/health")
        if name != "partition_assigned" and text.lower() not in FINE_FABRIC_TEXTS
    ]
    if bad:
        yield error(f"the NVSwitch fabric reports {', '.join(bad)}", remedy)


def check_processes(host: Host) -> Iterator[Outcome]:
    """Find processes of an earlier job that hold memory of a GPU."""
    gpus = read_gpus(host)
    if not gpus:
        yield not_applicable(NO_GPU)
        return
    if not host.is_before_job:
        yield not_applicable("checked before a job only: a running job has processes")
        return
    left = [
        error(
            f"pid {processes[0].findtext('pid')} of an earlier job uses it"
            + (f", and {len(processes) - 1} others" if len(processes) > 1 else ""),
            "end them, or reset the GPU",
            part=gpu.part,
            device=plain_uuid(gpu.uuid),
        )
        for gpu in gpus
        if (processes := gpu.element.findall("processes/process_info"))
    ]
    yield from left or [healthy("no process is left on a GPU")]


def check_nvlink(host: Host) -> Iterator[Outcome]:
    """Compare the NVLink links of each GPU with those of its peers, and count their errors."""
    gpus = read_gpus(host)
    if not gpus:
        yield not_applicable(NO_GPU)
        return
    texts = (host.tool_text(("nvidia-smi", "nvlink", flag)) for flag in ("-s", "-e"))
    links = parse_links(*texts)
    most = max((len(of_gpu.speeds_gb_per_s) for of_gpu in links.values()), default=0)
    if not most:
        yield from _no_links(gpus, links)
        return
    fastest = max(max(of_gpu.speeds_gb_per_s.values(), default=0.0) for of_gpu in links.values())
    uuids = {gpu.index: plain_uuid(gpu.uuid) for gpu in gpus}
    outcomes = [
        replace(outcome, part=f"GPU {index}", device=uuids.get(index, ""))
        for index, of_gpu in links.items()
        for outcome in _judge_links(of_gpu, most, fastest)
    ]
    text = f"{format_count(len(links), 'GPU')} with {most} active links each, no errors"
    yield from outcomes or [healthy(text)]


def _no_links(gpus: Sequence[Gpu], links: dict[int, Links]) -> Iterator[Outcome]:
    """Yield what a host without any active link lacks: nothing, a bridge, or its fabric."""
    listed = [index for index, of in links.items() if of.inactive or of.has_no_active]
    if not listed:
        yield not_applicable("no GPU has an NVLink")
        return
    text = f"all NVLinks of {format_count(len(listed), 'GPU')} are inactive"
    boards = [gpu.text("product_name") or "" for gpu in gpus]
    if any(NVLINK_BOARDS.search(board) for board in boards):
        yield error(text, "restart nvidia-fabricmanager, then see its log; reset the GPUs")
    else:
        yield warning(text, "mount NVLink bridges, or nothing if there are none")


def _judge_links(links: Links, most: int, fastest: float) -> Iterator[Outcome]:
    num = len(links.speeds_gb_per_s)
    if num < most or links.inactive or links.has_no_active:
        inactive = ", ".join(map(str, links.inactive)) or "unknown"
        yield error(
            f"{num} of {num + len(links.inactive) or most} NVLink links are active (inactive:"
            f" {inactive})",
            "reset the GPU, restart nvidia-fabricmanager; if it stays, reseat or replace the GPU",
        )
    slow = [link for link, speed in links.speeds_gb_per_s.items() if speed < fastest]
    if slow:
        text = f"NVLink {', '.join(map(str, slow))}: slower than {fastest} GB/s"
        yield error(text, "reset the GPU; if it stays, replace it")
    counted = {kind: number for kind, number in links.errors.items() if number}
    if counted:
        text = ", ".join(f"{number:,} {kind}" for kind, number in counted.items())
        yield warning(f"NVLink counts {text}", "compare again later; replace the GPU if it grows")
