"""Ports for servers that stop and start again: no other process gets them in between."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
NUM_PORTS = 10_000
"""Number of ports to choose from, below the kernel's own: two tests rarely choose the same."""

FIRST_UNPRIVILEGED = 1024


def fixed_port(*, num_ports: int = NUM_PORTS) -> int:
    """Return a free port of the loopback, below the range from which the kernel chooses.

    The kernel gives ports of its range to clients, even the port of a server that is down.
    """
    first = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
    lowest = max(FIRST_UNPRIVILEGED, first - num_ports)
    assert lowest < first, f"{EPHEMERAL} leaves no port for a server: it begins at {first}"
    # Not from `random`, which the tests seed with the same number in each process.
    first_choice = secrets.randbelow(first - lowest)
    for index in range(first - lowest):
        port = lowest + (first_choice + index) % (first - lowest)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"every port from {lowest} to {first - 1} is taken")
