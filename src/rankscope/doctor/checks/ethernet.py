"""Checks of the Ethernet interfaces: their link, their speed, their errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_count
from rankscope.collector.host.sample import read_number

from ..host import COMMANDS
from ..result import Outcome, error, healthy, not_applicable, warning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..host import Host

CLASS = "/sys/class/net"
NO_INTERFACE = "this host has no physical Ethernet interface"
ETHERNET_TYPE = 1
IS_UP = 0x1
"""Flag of an interface that an administrator has started. Source: netdevice(7)."""

STATISTIC = re.compile(r"^\s+([a-z][\w.]*): (\d+)\s*$", re.MULTILINE)
"""Counter of `ethtool -S`; those of single queues have brackets or a number before their name."""

PHYSICAL_ERRORS = frozenset(
    {
        "rx_crc_errors_phy", "rx_symbol_err_phy", "rx_pcs_symbol_err_phy", "tx_errors_phy",
        "rx_fcs_err_frames", "rx_align_err_frames", "rx_fec_uncorrectable_blocks",
        "rx_crc_errors.nic", "illegal_bytes.nic", "rx_crc_errors", "rx_fcs_errors",
        "module_bus_stuck", "module_high_temp", "module_bad_shorted",
    }
)  # fmt: skip
"""Frames that a link has damaged, and alarms of its transceiver, in the words of mlx5, bnxt_en,
i40e, ice and others. Source: the drivers below Linux, ``drivers/net/ethernet``."""

ALLOWANCES = {
    "bw_in_allowance_exceeded": "beyond the limit of received bandwidth:",
    "bw_out_allowance_exceeded": "beyond the limit of sent bandwidth:",
    "pps_allowance_exceeded": "beyond the limit of packets per second:",
    "conntrack_allowance_exceeded": "beyond the limit of connections:",
    "linklocal_allowance_exceeded": "beyond the limit of requests to local services:",
}
"""Packets that a cloud has queued or dropped beyond the limits of the instance.
Source: Amazon EC2, "Monitor network performance for ENA settings"."""

DROPS = (
    "rx_discards_phy",
    "tx_discards_phy",
    "rx_out_of_buffer",
    "rx_stat_discard",
    "rx_dropped.nic",
)
PACKETS = ("rx_packets_phy", "rx_packets", "rx_ucast_frames", "rx_unicast.nic")
MIN_DROP_RATIO = 1e-5
"""Share of packets from which on drops cost speed: a few are dropped in bursts on every host.
Source: choice; RoCE is slower from about this loss on."""

SOFT_KINDS = frozenset({*ALLOWANCES.values(), *DROPS})
"""Errors that load explains, so that a growing counter is a warning too."""

ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EthernetSettings:
    """Settings of an interface, as `ethtool INTERFACE` prints them."""

    speed_mb_per_s: int | None
    """Mb/s; None if unknown, as without a link."""

    supported_mb_per_s: int | None
    """The fastest supported link mode."""

    is_half_duplex: bool
    has_link: bool | None


def parse_ethtool(text: str) -> EthernetSettings:
    """Return the settings in the output of `ethtool INTERFACE`. Source: ethtool(8)."""
    speed = re.search(r"^\s*Speed: (\d+)Mb/s", text, re.MULTILINE)
    modes = re.search(r"Supported link modes:(.*?)(?:Supported pause|$)", text, re.DOTALL)
    supported = [int(mode) for mode in re.findall(r"(\d+)base", modes[1] if modes else "")]
    link = re.search(r"^\s*Link detected: (\w+)", text, re.MULTILINE)
    return EthernetSettings(
        speed_mb_per_s=None if speed is None else int(speed[1]),
        supported_mb_per_s=max(supported, default=None),
        is_half_duplex=re.search(r"^\s*Duplex: Half", text, re.MULTILINE) is not None,
        has_link=None if link is None else link[1] == "yes",
    )


def _interfaces(host: Host) -> list[Path]:
    """Return the physical Ethernet interfaces that an administrator has started."""
    return [
        path
        for path in host.glob(f"{CLASS}/*")
        if (path / "device").exists()
        and read_number(path / "type") == ETHERNET_TYPE
        and int(host.read(path / "flags") or "0", 16) & IS_UP
    ]


def check_link(host: Host) -> Iterator[Outcome]:
    """Find interfaces without a link, with half duplex, or slower than their like or their card."""
    interfaces = _named(host, "ethtool")
    if not interfaces:
        yield not_applicable(NO_INTERFACE)
        return
    settings = {name: parse_ethtool(host.tool_text(("ethtool", name))) for name in interfaces}
    speeds = {
        name: settings[name].speed_mb_per_s or read_number(path / "speed") or 0
        for name, path in interfaces.items()
    }
    drivers = {name: _driver(path) for name, path in interfaces.items()}
    remedy = "check its cable, transceiver and switch port"
    outcomes = []
    for name, path in interfaces.items():
        speed = speeds[name]
        if host.read(path / "carrier") == "0" or settings[name].has_link is False:
            outcomes.append(warning("the interface is up and has no link", remedy, part=name))
            continue
        if settings[name].is_half_duplex or host.read(path / "duplex") == "half":
            outcomes.append(error(f"half duplex at {speed:,} Mb/s", remedy, part=name))
        like = max(speeds[other] for other in speeds if drivers[other] == drivers[name])
        most = max(like if drivers[name] else 0, settings[name].supported_mb_per_s or 0)
        if 0 < speed < most:
            text = f"the link runs at {speed:,} Mb/s, and could at {most:,}"
            outcomes.append(warning(text, remedy, part=name))
    text = f"{format_count(len(interfaces), 'interface')} with a link"
    known = sorted({f"{speed:,} Mb/s" for speed in speeds.values() if speed > 0})
    if outcomes:
        yield from outcomes
    elif not known and not any(
        settings[name].has_link or host.read(path / "carrier") for name, path in interfaces.items()
    ):
        yield not_applicable("no interface shows its link or its speed")
    else:
        yield healthy(", ".join([text, *known]), value=", ".join(known))


def _driver(path: Path) -> str:
    """Return the name of an interface's driver; "" if it is unknown."""
    link = path / "device" / "driver"
    return link.resolve().name if link.exists() else ""


def check_errors(host: Host) -> Iterator[Outcome]:
    """Find interfaces whose error counters grow now; others are counted since the boot."""
    names = _named(host, "ethtool -S")
    if not names:
        yield not_applicable(NO_INTERFACE)
        return
    before = {name: _errors(host, name, path) for name, path in names.items()}
    if not any(known for _, known in before.values()):
        yield not_applicable("the interfaces show no error counters")
        return
    host.pause(PAUSE_S)
    outcomes = []
    for name, path in names.items():
        earlier, (now, _) = before[name][0], _errors(host, name, path)
        grown = {kind: value - earlier.get(kind, value) for kind, value in now.items()}
        grown = {kind: value for kind, value in grown.items() if value > 0}
        counted = {kind: value for kind, value in now.items() if value}
        remedy = "check its cable, transceiver and switch port"
        if any(kind in ALLOWANCES.values() for kind in counted):
            remedy = "use a larger instance, or fewer jobs on it"
        if grown:
            text = f"counters grow within {PAUSE_S:g} s: {_counts(grown)}"
            make = error if grown.keys() - SOFT_KINDS else warning
            outcomes.append(make(text, remedy, part=name))
        elif counted:
            outcomes.append(warning(f"counted: {_counts(counted)}", remedy, part=name))
    text = f"{format_count(len(names), 'interface')} without errors"
    yield from outcomes or [healthy(text)]


def _named(host: Host, tool: str) -> dict[str, Path]:
    """Return the interfaces; of a recorded host also those that only a tool's output names."""
    prefix = f"{tool.replace(' ', '_')}_"
    files = host.glob(f"{COMMANDS}/{prefix}[a-z]*") if host.is_recorded else []
    recorded = (path.name.removeprefix(prefix) for path in files)
    return {name: host.path(f"{CLASS}/{name}") for name in recorded} | {
        path.name: path for path in _interfaces(host)
    }


def _errors(host: Host, name: str, path: Path) -> tuple[dict[str, int], bool]:
    """Return the errors of an interface by kind, and whether it shows any counter."""
    read = {kind: read_number(path / "statistics" / kind) for kind in ERRORS}
    of_kernel = {kind: num for kind, num in read.items() if num is not None and num >= 0}
    output = host.tool_again("ethtool", "-S", name)
    statistics = {
        kind: int(number)
        for kind, number in STATISTIC.findall("" if output is None else output.text)
    }
    errors = of_kernel | {kind: num for kind, num in statistics.items() if kind in PHYSICAL_ERRORS}
    errors |= {
        words: statistics[kind] for kind, words in ALLOWANCES.items() if statistics.get(kind)
    }
    packets = max((statistics.get(kind, 0) for kind in PACKETS), default=0)
    errors |= {
        kind: statistics[kind]
        for kind in DROPS
        if statistics.get(kind, 0) > MIN_DROP_RATIO * packets
    }
    return errors, bool(of_kernel or statistics)


def _counts(counters: dict[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in counters.items())
