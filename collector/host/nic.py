"""Traffic, losses and links of a host's network interfaces, and their drivers' statistics.

Pause frames and ECN marks come from the driver (``ethtool -S``), all else from sysfs.
"""

from __future__ import annotations

import ctypes
import fcntl
import re
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from .sample import PART_MARK, CounterTotals, Sample, SourceAbsentError, read_number, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


SIOCETHTOOL = 0x8946
GET_DRIVER_INFO = 0x03
GET_STRINGS = 0x1B
GET_STATISTICS = 0x1D
STATISTICS_SET = 1
"""Source: Linux, ``include/uapi/linux/ethtool.h``: ``ETHTOOL_GDRVINFO``, ``_GSTRINGS``,
``_GSTATS``, ``ETH_SS_STATS``."""

DRIVER_INFO_BYTES = 196
NUM_STATISTICS_OFFSET = 180
STRING_BYTES = 32
MAX_STATISTICS = 8192
MAX_NAME_BYTES = 15

PATTERNS = (
    (re.compile(r"rx_prio\d+_pause|rx_global_pause"), "nic-pause-received-frames"),
    (re.compile(r"tx_prio\d+_pause|tx_global_pause"), "nic-pause-sent-frames"),
    (re.compile(r"rx_ecn_mark"), "nic-ecn-marked-packets"),
    (re.compile(r"rx_discards_phy"), "nic-discarded-packets"),
    (re.compile(r"rx_symbol_err_phy"), "nic-symbol-errors"),
)
"""Statistics of mlx5 and our names. Those of the same name are summed.
Source: Linux, ``Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst``."""

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

SNMP = Path("/proc/net/snmp")
RESENT_NAME = "tcp-resent-segments"

BYTES_PER_S_PER_MEGABIT = 125_000
LOOPBACK_TYPE = 772


def congestion_counters(statistics: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """Yield (our name, the driver's name, value) of pause frames, ECN marks and losses."""
    for text, value in statistics.items():
        for pattern, name in PATTERNS:
            if pattern.fullmatch(text):
                yield name, text, value


def resent_segments(path: Path = SNMP) -> int | None:
    """Return how many TCP segments the host sent again since its start; None if it is unknown."""
    lines = [line.split() for line in (read_text(path) or "").splitlines()]
    tables = [line for line in lines if line[:1] == ["Tcp:"]]
    for names, values in zip(tables[::2], tables[1::2], strict=False):
        found = dict(zip(names, values, strict=False)).get("RetransSegs", "")
        if found.isdigit():
            return int(found)
    return None


def device_statistics(interface: str) -> dict[str, int]:
    """Return a driver's statistics of an interface; {} if it has none or refuses them."""
    name = interface.encode()
    if len(name) > MAX_NAME_BYTES:
        return {}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            return _read_statistics(sock, name)
    except OSError:
        return {}


def parse_statistics(strings: bytes, values: bytes) -> dict[str, int]:
    """Return values by name from two parallel arrays. Names without a value are left out."""
    num = min(len(strings) // STRING_BYTES, len(values) // 8)
    numbers = struct.unpack_from(f"={num}Q", values)
    names = (strings[each * STRING_BYTES : (each + 1) * STRING_BYTES] for each in range(num))
    texts = (raw.partition(b"\0")[0].decode("ascii", "replace").strip() for raw in names)
    return dict(zip(texts, numbers, strict=True))


def _read_statistics(sock: socket.socket, name: bytes) -> dict[str, int]:
    info = _ioctl(sock, name, struct.pack("=I", GET_DRIVER_INFO).ljust(DRIVER_INFO_BYTES, b"\0"))
    (num,) = struct.unpack_from("=I", info, NUM_STATISTICS_OFFSET)
    if not 0 < num <= MAX_STATISTICS:
        return {}
    head = struct.pack("=III", GET_STRINGS, STATISTICS_SET, num)
    strings = _ioctl(sock, name, head + bytes(num * STRING_BYTES))[len(head) :]
    # A driver that gained statistics meanwhile writes more than `num`: leave space for them.
    head = struct.pack("=II", GET_STATISTICS, num)
    values = _ioctl(sock, name, head + bytes(2 * num * 8))[len(head) :]
    return parse_statistics(strings, values[: num * 8])


def _ioctl(sock: socket.socket, name: bytes, data: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(data, len(data))
    ifreq = struct.pack("16sP16x", name, ctypes.addressof(buffer))
    fcntl.ioctl(sock.fileno(), SIOCETHTOOL, ifreq)
    return buffer.raw


class NicSource:
    """Physical interfaces of a host. If there are none (in a container), those that are up."""

    name = "nic"

    def __init__(
        self,
        root: Path = ROOT,
        *,
        statistics_of: Callable[[str], Mapping[str, int]] = device_statistics,
    ) -> None:
        self._root = root
        self._statistics_of = statistics_of
        self._totals = CounterTotals()

    def read(self, at_ns: int) -> list[Sample]:
        """Return each counter's growth since the first reading, and each link's state and speed.

        Raises:
            SourceAbsentError: The host has no interface except the loopback.
        """
        interfaces = _interfaces(self._root)
        if not interfaces:
            raise SourceAbsentError(f"no network interface under {self._root}: no NIC samples")
        gauges = []
        for path in interfaces:
            for file, name in COUNTERS.items():
                raw = read_number(path / file)
                if raw is not None and raw >= 0:
                    self._totals.add_reading(name, path.name, raw)
            for name, text, raw in congestion_counters(self._statistics_of(path.name)):
                self._totals.add_reading(name, path.name, raw, counter=text)
            gauges += _gauges(path, at_ns)
        resent = resent_segments()
        if resent is not None:
            gauges.append(Sample(at_ns, RESENT_NAME, float(resent)))
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
    """Return state and speed, unless the kernel reports ``unknown`` or -1."""
    samples = []
    state = read_text(path / "operstate")
    if state is not None and state != "unknown":
        samples.append(Sample(at_ns, f"nic-link-is-up{PART_MARK}{path.name}", float(state == "up")))
    speed = read_number(path / "speed")
    if speed is not None and speed > 0:
        value = float(speed * BYTES_PER_S_PER_MEGABIT)
        samples.append(Sample(at_ns, f"nic-speed-bytes-per-s{PART_MARK}{path.name}", value))
    return samples
