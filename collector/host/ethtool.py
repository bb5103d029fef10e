"""A network driver's own statistics, as ``ethtool -S`` shows them: pause frames and ECN marks."""

from __future__ import annotations

import ctypes
import fcntl
import re
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
"""mlx5's statistics and our names; those of one name are summed.
Source: Linux, ``Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst``."""


def pause_and_marks(statistics: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """Yield (our name, the driver's, value) of what its statistics say of pause, marks, losses."""
    for text, value in statistics.items():
        for pattern, name in PATTERNS:
            if pattern.fullmatch(text):
                yield name, text, value


def device_statistics(interface: str) -> dict[str, int]:
    """Return a driver's statistics of an interface, {} where it has none or won't tell."""
    name = interface.encode()
    if len(name) > MAX_NAME_BYTES:
        return {}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            return _ask(sock, name)
    except OSError:
        return {}


def parse_statistics(strings: bytes, values: bytes) -> dict[str, int]:
    """Return name -> value of two parallel arrays; names without a value are left out."""
    num = min(len(strings) // STRING_BYTES, len(values) // 8)
    numbers = struct.unpack_from(f"={num}Q", values)
    names = (strings[each * STRING_BYTES : (each + 1) * STRING_BYTES] for each in range(num))
    texts = (raw.partition(b"\0")[0].decode("ascii", "replace").strip() for raw in names)
    return dict(zip(texts, numbers, strict=True))


def _ask(sock: socket.socket, name: bytes) -> dict[str, int]:
    info = _request(sock, name, struct.pack("=I", GET_DRIVER_INFO).ljust(DRIVER_INFO_BYTES, b"\0"))
    (num,) = struct.unpack_from("=I", info, NUM_STATISTICS_OFFSET)
    if not 0 < num <= MAX_STATISTICS:
        return {}
    head = struct.pack("=III", GET_STRINGS, STATISTICS_SET, num)
    strings = _request(sock, name, head + bytes(num * STRING_BYTES))[len(head) :]
    # A driver that gained statistics since writes past this number: leave it room.
    head = struct.pack("=II", GET_STATISTICS, num)
    values = _request(sock, name, head + bytes(2 * num * 8))[len(head) :]
    return parse_statistics(strings, values[: num * 8])


def _request(sock: socket.socket, name: bytes, data: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(data, len(data))
    ifreq = struct.pack("16sP16x", name, ctypes.addressof(buffer))
    fcntl.ioctl(sock.fileno(), SIOCETHTOOL, ifreq)
    return buffer.raw
