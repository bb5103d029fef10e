"""What the network interfaces of a host move and lose, and whether their links stand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .ethtool import device_statistics, pause_and_marks
from .sample import PART_MARK, Sample, SourceAbsentError, read_number, read_text
from .totals import GrowingTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path("/sys/class/net")

COUNTERS = {
    "statistics/tx_bytes": "nic-sent-bytes",
    "statistics/rx_bytes": "nic-received-bytes",
    "statistics/rx_errors": "nic-receive-errors",
    "statistics/tx_errors": "nic-transmit-errors",
    "statistics/rx_dropped": "nic-dropped-packets",
    "carrier_down_count": "nic-link-down-events",
}
"""Source: Linux, ``Documentation/ABI/testing/sysfs-class-net`` and ``-statistics``."""

BYTES_PER_S_PER_MEGABIT = 125_000
LOOPBACK_TYPE = 772


class NicSource:
    """The physical interfaces of a host; where it has none (a container), those that are up.

    Args:
        root: Folder of the kernel's interfaces.
        statistics_of: Returns a driver's own statistics of an interface.
    """

    name = "nic"

    def __init__(
        self,
        root: Path = ROOT,
        *,
        statistics_of: Callable[[str], Mapping[str, int]] = device_statistics,
    ) -> None:
        self._root = root
        self._statistics_of = statistics_of
        self._totals = GrowingTotals()

    def read(self, at_ns: int) -> list[Sample]:
        """Return the growth of each counter since the first reading, each link's state and speed.

        Raises:
            SourceAbsentError: The host has no interface but the loopback.
        """
        found = _interfaces(self._root)
        if not found:
            raise SourceAbsentError(f"no network interface under {self._root}: no NIC samples")
        gauges = []
        for path in found:
            for file, name in COUNTERS.items():
                raw = read_number(path / file)
                if raw is not None and raw >= 0:
                    self._totals.count(name, path.name, raw)
            for name, text, raw in pause_and_marks(self._statistics_of(path.name)):
                self._totals.count(name, path.name, raw, counter=text)
            gauges += _gauges(path, at_ns)
        return self._totals.samples(at_ns) + gauges


def _interfaces(root: Path) -> list[Path]:
    every = [
        path
        for path in sorted(root.glob("*"))
        if path.is_dir() and read_number(path / "type") != LOOPBACK_TYPE
    ]
    physical = [path for path in every if (path / "device").exists()]
    return physical or [path for path in every if read_text(path / "operstate") == "up"]


def _gauges(path: Path, at_ns: int) -> list[Sample]:
    """Return state and speed; the kernel says ``unknown`` and -1 where it knows neither."""
    found = []
    state = read_text(path / "operstate")
    if state is not None and state != "unknown":
        found.append(Sample(at_ns, f"nic-link-is-up{PART_MARK}{path.name}", float(state == "up")))
    speed = read_number(path / "speed")
    if speed is not None and speed > 0:
        value = float(speed * BYTES_PER_S_PER_MEGABIT)
        found.append(Sample(at_ns, f"nic-speed-bytes-per-s{PART_MARK}{path.name}", value))
    return found
