"""Messages of the kernel that explain a slow or ended rank: their patterns, meanings and remedies.

Only lines that match a row of `MESSAGES` leave the host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MAX_LINE = 400
"""Characters of a line that are kept."""


class MessageKind(StrEnum):
    """Subjects of messages."""

    XID = "xid"
    SXID = "sxid"
    GPU_RESET = "gpu-reset"
    OOM_KILLER = "oom-killer"
    FAULT = "fault"
    """A process did what ends it by a signal: its C code, or a library's, is wrong."""

    MACHINE_CHECK = "machine-check"
    PCIE = "pcie"
    DISK = "disk"
    FILE_SYSTEM = "file-system"
    NETWORK_RESET = "network-reset"
    LINK = "link"
    HUNG_TASK = "hung-task"
    LOCKUP = "lockup"
    THERMAL = "thermal"


class Action(StrEnum):
    """Remedies of an Xid; the names are those of the resolution buckets in NVIDIA's catalogue.

    Source: "Analyzing Xid Errors with the Xid Catalog", docs.nvidia.com/deploy/xid-errors.
    """

    IGNORE = "nothing by itself; watch whether it comes back"
    FOLLOW = "look at the Xid before it, which is the reason"
    RESTART_APP = "restart the job; if only this device shows it, run `dcgmi diag -r 3` on it"
    RESET_GPU = (
        "drain the host and reset the GPU (`nvidia-smi --gpu-reset`); replace it if it returns"
    )
    RESET_OR_DRAIN = (
        "reset the GPU (`nvidia-smi --gpu-reset`); drain the host if Xid 63 or 64 comes with it,"
        " or if it returns"
    )
    NVLINK = (
        "reset the GPU or restart the host; look at `nvidia-smi nvlink -e` and at the GPU at the"
        " other end; replace what shows errors again"
    )
    RESTART_HOST = "drain the host and restart it; have the GPU replaced if it returns"
    CHECK_POWER = "check that the power connectors of the GPU are seated"
    NEXT_BOOT = "turn ECC on, or restart the host"


SERIOUS = frozenset({Action.RESET_GPU, Action.RESET_OR_DRAIN, Action.NVLINK, Action.RESTART_HOST})
"""Remedies without which no job may use the device."""


class Xid(NamedTuple):
    """Meaning of an Xid, and what to do."""

    meaning: str
    action: Action


XIDS: dict[int, Xid] = {
    8: Xid("GPU stopped processing", Action.RESTART_APP),
    11: Xid("invalid or corrupted push buffer stream", Action.RESTART_APP),
    13: Xid("graphics engine exception: mostly an access out of bounds", Action.RESTART_APP),
    25: Xid("invalid or illegal push buffer stream", Action.RESTART_APP),
    31: Xid("GPU memory page fault: mostly an illegal address of the job", Action.RESTART_APP),
    32: Xid("invalid or corrupted push buffer stream: mostly PCIe signals", Action.RESTART_APP),
    **dict.fromkeys((37, 38), Xid("driver firmware error", Action.IGNORE)),
    **dict.fromkeys((39, 40, 41), Xid("copy engine exception", Action.RESTART_APP)),
    43: Xid("GPU stopped processing: the job must end", Action.FOLLOW),
    44: Xid("graphics engine fault during context switch", Action.IGNORE),
    45: Xid("cleanup of a process that ended or was killed", Action.FOLLOW),
    46: Xid("GPU stopped processing", Action.RESET_GPU),
    48: Xid("double bit ECC error", Action.RESET_OR_DRAIN),
    54: Xid("auxiliary power is not connected to the GPU board", Action.CHECK_POWER),
    62: Xid("internal micro-controller halt", Action.RESET_GPU),
    63: Xid("GPU memory row was remapped, or a page retired", Action.IGNORE),
    64: Xid("GPU memory row could not be remapped, or a page retired", Action.RESET_GPU),
    **dict.fromkeys((66, 67), Xid("illegal access by the driver", Action.IGNORE)),
    69: Xid("graphics engine class error", Action.RESTART_APP),
    **dict.fromkeys((70, 71, 72, 75, 76, 77, 85), Xid("copy engine error", Action.RESTART_APP)),
    74: Xid("NVLink error", Action.NVLINK),
    79: Xid("GPU has fallen off the bus", Action.RESTART_HOST),
    80: Xid("corrupted data sent to the GPU", Action.RESTART_APP),
    92: Xid("high single-bit ECC error rate", Action.IGNORE),
    94: Xid("contained memory error", Action.RESTART_APP),
    95: Xid("uncontained memory error", Action.RESET_GPU),
    109: Xid("context switch timeout", Action.RESET_GPU),
    110: Xid("security fault", Action.RESET_GPU),
    119: Xid("GSP RPC timeout", Action.RESET_GPU),
    120: Xid("GSP error", Action.RESET_GPU),
    121: Xid("corrected C2C errors", Action.IGNORE),
    136: Xid("NVLink training failed", Action.RESET_GPU),
    137: Xid(
        "NVLink privilege error: mostly an illegal peer access of the job", Action.RESTART_APP
    ),
    140: Xid("unrecovered ECC error", Action.RESET_GPU),
    143: Xid("GPU initialization error", Action.RESET_GPU),
    **dict.fromkeys(range(144, 151), Xid("NVLink error", Action.NVLINK)),
    154: Xid("GPU recovery action changed", Action.FOLLOW),
    155: Xid("NVLink error, defined by software", Action.RESET_GPU),
    156: Xid("resource retired", Action.RESET_GPU),
    157: Xid("resource could not be retired", Action.IGNORE),
    158: Xid("GPU fatal timeout", Action.RESET_GPU),
    168: Xid("errors in the write-protected region of memory", Action.NEXT_BOOT),
    171: Xid("uncorrectable DRAM error", Action.RESET_OR_DRAIN),
    172: Xid("uncorrectable SRAM error", Action.RESET_OR_DRAIN),
}
"""By code. A range of codes has one row where the catalogue names only the unit.
Source: as `Action`; the catalogue for Ampere and newer devices."""

SEVERITIES = {"Nonfatal": " (non-fatal)", "Fatal": " (fatal)"}
"""Words for those that Xids of NVLink name."""

UNKNOWN_XID = Xid("see NVIDIA's Xid catalogue", Action.RESTART_APP)

SXIDS: dict[int, str] = {
    10001: "host interface, access error",
    10002: "host interface, access timeout",
    10003: "host interface, unhandled interrupt",
    10004: "host interface, temperature",
    12028: "egress, non-posted access error",
    19084: "NVLink, heartbeat timeout",
    20034: "NVLink, LTSSM fault: the link is down",
    22013: "NVLink, interrupt of the link's micro-controller",
    24007: "source track, timeout",
}
"""Meaning by code. Source: NVIDIA, "Fabric Manager for NVSwitch", appendix "NVSwitch SXid Errors"
(DU-09883-001)."""

RESTART_FABRIC = (
    "restart the jobs of the host; if it is fatal or returns, reset GPUs and NVSwitches"
)

IS_GONE = r"fallen off the bus and is not responding"


@dataclass(frozen=True, slots=True)
class KernelMessage:
    """One allow-listed message.

    Groups of its pattern: ``code``, ``pci`` (address of a device), ``pid``, ``process``,
    ``severity``, and ``what``, else ``name`` (a device, a host, a number: what the text names).
    """

    kind: MessageKind
    pattern: str
    meaning: str
    """Half a sentence; `{what}` and `{process}` stand for groups."""

    remedy: str
    ends_process: bool = False
    """Whether it explains why a process of that time ended."""

    is_serious: bool = False
    """Whether no job may use the host until it is repaired."""


PCI = r"(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"

MESSAGES: tuple[KernelMessage, ...] = (
    KernelMessage(
        MessageKind.XID,
        rf"NVRM: Xid \((?:PCI:)?{PCI}(?:\.\d)?[^)]*\): (?P<code>\d+),?"
        r"(?: pid='?(?P<pid>\d+|<unknown>)'?)?(?:, name=(?P<process>[^,]*))?"
        r"(?: \w+ (?P<severity>Fatal|Nonfatal) )?",
        "",
        "",
    ),
    KernelMessage(MessageKind.XID, IS_GONE, "", ""),
    KernelMessage(
        MessageKind.SXID, rf"SXid \(PCI:{PCI}(?:\.\d)?\): (?P<code>\d+)", "", RESTART_FABRIC
    ),
    KernelMessage(
        MessageKind.OOM_KILLER,
        r"(?:Memory cgroup out|Out) of memory:? Kill(?:ed)? process (?P<pid>\d+)"
        r" \((?P<process>.*?)\)",
        "out of memory: killed process {pid} ({process})",
        "give the job more memory, or let it use less: fewer data loader workers, smaller buffers",
        ends_process=True,
    ),
    KernelMessage(
        MessageKind.GPU_RESET,
        r"NVRM: .*(?P<what>NV_ERR_RESET_REQUIRED)",
        "the NVIDIA driver asks for a reset of a GPU",
        Action.RESET_GPU,
        is_serious=True,
    ),
    KernelMessage(
        MessageKind.GPU_RESET,
        r"NVRM: .*[pP]ostRxDet(?:ect)?LinkMask.*failed",
        "NVLinks to another GPU did not come up",
        Action.NVLINK,
        is_serious=True,
    ),
    KernelMessage(
        MessageKind.GPU_RESET,
        rf"amdgpu {PCI}(?:\.\d)?: (?:amdgpu: )?(?P<what>GPU reset (?:begin|succeeded|failed)"
        r"|GPU mode\d reset|ring \S+ timeout|\[gfxhub\d*\] (?:no-retry )?page fault)",
        "AMD GPU: {what}",
        "restart the job; drain the host if it returns",
        ends_process=True,
    ),
    KernelMessage(
        MessageKind.FAULT,
        r"(?:traps: )?(?P<process>[^\s\[]+)\[(?P<pid>\d+)\]:? (?P<what>segfault|general protection"
        r" fault|trap invalid opcode|trap divide error|trap int3)",
        "{process} ended with a fault in C code ({what})",
        "look at the core dump, or run it with `PYTHONFAULTHANDLER=1`",
        ends_process=True,
    ),
    KernelMessage(
        MessageKind.MACHINE_CHECK,
        r"EDAC (?P<name>\S+): \d+ UE\b(?:.*? on (?P<what>[^\s(]+))?",
        "uncorrected memory error ({what})",
        "drain the host and replace the memory module",
        is_serious=True,
    ),
    KernelMessage(
        MessageKind.MACHINE_CHECK,
        r"EDAC (?P<name>\S+): \d+ CE\b(?:.*? on (?P<what>[^\s(]+))?",
        "corrected memory errors ({what})",
        "replace the memory module if their number grows",
    ),
    KernelMessage(
        MessageKind.MACHINE_CHECK,
        r"(?P<what>\[Hardware Error\]: (?:CPU \d+: Machine Check|event severity: \w+"
        r"|Machine check events logged|(?:Corrected|Uncorrected|Deferred)\b[\w, ]* error))",
        "hardware error of a CPU or of memory ({what})",
        "look at `ras-mc-ctl --summary` or the BMC's log; drain the host if it is not corrected",
    ),
    KernelMessage(
        MessageKind.PCIE,
        r"AER: (?P<what>(?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error|can't recover"
        r"|device recovery failed)",
        "PCIe error ({what})",
        "drain the host and restart it; have the device or its slot replaced if it returns",
        is_serious=True,
    ),
    KernelMessage(
        MessageKind.PCIE,
        r"AER: (?P<what>(?:Multiple )?(?:Corrected|Correctable|Uncorrected|Uncorrectable)"
        r"(?: \((?:Non-)?Fatal\))? error)|DPC: (?:containment event|.*error detected)",
        "PCIe error ({what})",
        "look at `lspci -vv` for the width and speed of the link; drain the host if it returns",
    ),
    KernelMessage(
        MessageKind.DISK,
        r"nvme (?P<what>nvme\d+): (?:I/O \d+|I/O tag \d+|controller is down|Device not ready|"
        r"resetting controller|Abort status|Removing after probe failure)",
        "NVMe disk {what} does not answer",
        "look at `nvme smart-log`; move the job's files to another disk",
    ),
    KernelMessage(
        MessageKind.DISK,
        r"(?:I/O error, dev|Buffer I/O error on dev(?:ice)?|medium error, dev) (?P<what>[\w-]+)",
        "I/O error of disk {what}",
        "look at `smartctl -a`; move the job's files to another disk",
    ),
    KernelMessage(
        MessageKind.FILE_SYSTEM,
        r"(?P<what>EXT4-fs error|XFS \(\S+\): .*(?:I/O error|[Cc]orruption)|LustreError:"
        r"|nfs: server \S+ not responding|Remounting filesystem read-only|BTRFS error)",
        "file system: {what}",
        "check the file system and its server; checkpoints and input may stall",
    ),
    KernelMessage(
        MessageKind.LINK,
        rf"mlx5_core (?P<what>{PCI}\.\d).*(?:Port module event\[error\]: module \d+, (?P<name>.*)"
        r"|(?P<power>insufficient power on the PCIe slot)"
        r"|(?P<heat>[Hh]igh temperature on sensors))",
        "network adapter {what}: {name}{power}{heat}",
        "check its transceiver and cable, its cooling and its slot",
    ),
    KernelMessage(
        MessageKind.NETWORK_RESET,
        rf"(?P<what>mlx5_core|bnxt_en|ice|i40e|efa|ena) {PCI}.*(?:health|[Rr]eset|recover|"
        r"TX timeout|fatal error|firmware (?:assert|fatal)|assert_var)",
        "network adapter {what} was reset, or failed",
        "look at the adapter's firmware and its slot; drain the host if it returns",
    ),
    KernelMessage(
        MessageKind.NETWORK_RESET,
        r"NETDEV WATCHDOG: .*?(?P<what>\S+) \(\S+\): transmit queue \d+ timed out",
        "network adapter: transmit queue of {what} timed out",
        "look at the adapter's firmware and its slot; drain the host if it returns",
    ),
    KernelMessage(
        MessageKind.LINK,
        r"(?P<what>\w+): (?:NIC )?[Ll]ink is [Dd]own|(?:mlx5_core|bnxt_en) \S+ (?P<name>\w+): "
        r"(?:Link down|Port: \d+ Link DOWN)",
        "network link {what} went down",
        "check cable, transceiver and switch port",
    ),
    KernelMessage(
        MessageKind.HUNG_TASK,
        r"task (?P<process>.+?):(?P<pid>\d+) blocked for more than (?P<what>\d+) seconds",
        "{process} has been blocked in the kernel for more than {what} s",
        "it waits for storage or for a driver: look at the file system and at the other messages",
    ),
    KernelMessage(
        MessageKind.LOCKUP,
        r"(?:soft lockup - CPU#\d+ stuck for (?P<what>\d+)s! \[(?P<process>.+?):(?P<pid>\d+)\]"
        r"|rcu: INFO: rcu_\w+ (?:detected|self-detected) stall)",
        "a CPU was stuck in the kernel",
        "drain the host; look at the messages before it",
    ),
    KernelMessage(
        MessageKind.THERMAL,
        r"temperature above threshold, cpu clock throttled",
        "CPUs are throttled because they are too hot",
        "check fans and air flow of the host",
    ),
)
"""Rows are tried in order; the first that matches counts.

Source: the drivers' and the kernel's sources; tests/collector/host/test_kernel_messages.py has
recorded lines with their places.
"""

PREFIX = re.compile(
    r"^(?:\w{3} +\d+ [\d:]+ \S+ kernel: |\d{4}-\d\d-\d\dT\S+ \S+ kernel: |kern +:\w+ *: )?"
    r"(?:\[[\w: .]+\] )?"
)
"""What syslog, or dmesg, writes before a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMessage:
    """An allow-listed line, read."""

    kind: MessageKind
    text: str
    remedy: str
    ends_process: bool
    is_serious: bool
    line: str
    code: int | None = None
    pid: int | None = None
    process: str = ""
    pci: str = ""
    """Address of the device without its function, in lower case: "0000:3b:00"."""


def read_message(line: str) -> ReadMessage | None:
    """Return what a line of the kernel's log means; None if it is not allow-listed."""
    plain = PREFIX.sub("", line.strip(), count=1)[:MAX_LINE]
    for message in MESSAGES:
        match = re.search(message.pattern, plain)
        if match is not None:
            return _read(message, match, plain)
    return None


def _read(message: KernelMessage, match: re.Match[str], line: str) -> ReadMessage:
    groups = {name: value or "" for name, value in match.groupdict().items()}
    groups.setdefault("process", "")
    groups["what"] = groups.get("what") or groups.get("name") or ""
    pid = groups.get("pid", "")
    code = int(groups["code"]) if groups.get("code", "").isdigit() else None
    text, remedy, ends = message.meaning, message.remedy, message.ends_process
    is_serious = message.is_serious
    if message.kind is MessageKind.XID:
        code = 79 if code is None else code
        xid = XIDS.get(code, UNKNOWN_XID)
        is_mild = groups.get("severity") == "Nonfatal"
        severity = SEVERITIES.get(groups.get("severity", ""), "")
        text, remedy = f"Xid {code}: {xid.meaning}{severity}", xid.action.value
        ends = xid.action not in {Action.IGNORE, Action.FOLLOW} and not is_mild
        is_serious = xid.action in SERIOUS and not is_mild
    elif message.kind is MessageKind.SXID:
        severity = "non-fatal" if "Non-fatal" in line else "fatal" if "Fatal" in line else ""
        meaning = SXIDS.get(code or 0, "see NVIDIA's list of SXids")
        text = f"SXid {code}: {meaning}{f' ({severity})' if severity else ''}"
        ends = is_serious = severity == "fatal"
    else:
        text = text.format_map(groups)
    return ReadMessage(
        kind=message.kind,
        text=text,
        remedy=remedy,
        ends_process=ends,
        is_serious=is_serious,
        line=line,
        code=code,
        pid=int(pid) if pid.isdigit() else None,
        process=groups["process"],
        pci=groups.get("pci", "").lower()[-10:],
    )
