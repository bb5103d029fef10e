"""Checks of the Ethernet interfaces: their link, their speed, their errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_count
from rankscope.collector.host.sample import read_number

from ..result import Outcome, error, healthy, not_applicable, summarize, warning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..host import Host

CLASS = "/sys/class/net"
NO_INTERFACE = "this host has no physical Ethernet interface"
ETHERNET_TYPE = 1
IS_UP = 0x1
"""Flag of an interface that an administrator has started. Source: netdevice(7)."""

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
    interfaces = _interfaces(host)
    if not interfaces:
        yield not_applicable(NO_INTERFACE)
        return
    speeds = {path.name: read_number(path / "speed") or 0 for path in interfaces}
    drivers = {path.name: (path / "device" / "driver").resolve().name for path in interfaces}
    remedy = "check its cable, transceiver and switch port"
    outcomes = []
    for path in interfaces:
        name, output = path.name, host.tool("ethtool", path.name)
        settings = parse_ethtool("" if output is None else output.text)
        if host.read(path / "carrier") == "0" or settings.has_link is False:
            outcomes.append(warning("the interface is up and has no link", remedy, part=name))
            continue
        speed = settings.speed_mb_per_s or speeds[name]
        if settings.is_half_duplex or host.read(path / "duplex") == "half":
            outcomes.append(error(f"half duplex at {speed:,} Mb/s", remedy, part=name))
        like = max(speeds[other] for other in speeds if drivers[other] == drivers[name])
        most = settings.supported_mb_per_s or 0
        if 0 < speed < max(like, most):
            text = f"the link runs at {speed:,} Mb/s, and could at {max(like, most):,}"
            outcomes.append(warning(text, remedy, part=name))
    text = f"{format_count(len(interfaces), 'interface')} with a link"
    if outcomes:
        yield from outcomes
    else:
        known = sorted({f"{speed:,} Mb/s" for speed in speeds.values() if speed > 0})
        yield healthy(", ".join([text, *known]), value=", ".join(known))


def check_errors(host: Host) -> Iterator[Outcome]:
    """Find interfaces whose error counters grow now; others are counted since the boot."""
    interfaces = _interfaces(host)
    if not interfaces:
        yield not_applicable(NO_INTERFACE)
        return
    before = {path.name: _counters(path) for path in interfaces}
    host.pause(PAUSE_S)
    outcomes = []
    for path in interfaces:
        now = _counters(path)
        grown = {
            name: value - before[path.name][name]
            for name, value in now.items()
            if value > before[path.name].get(name, value)
        }
        counted = {name: value for name, value in now.items() if value}
        remedy = "check its cable, transceiver and switch port"
        if grown:
            text = f"counters grow within {PAUSE_S:g} s: {_counts(grown)}"
            outcomes.append(error(text, remedy, part=path.name))
        elif counted:
            outcomes.append(warning(f"counted: {_counts(counted)}", remedy, part=path.name))
    text = f"{format_count(len(interfaces), 'interface')} without errors"
    yield from summarize(outcomes, num=len(interfaces) + 1, healthy_text=text)


def _counters(path: Path) -> dict[str, int]:
    found = {name: read_number(path / "statistics" / name) for name in ERRORS}
    return {name: value for name, value in found.items() if value is not None and value >= 0}


def _counts(counters: dict[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in counters.items())
