"""A port for a server that is stopped and comes back: nobody else is given it meanwhile."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
NUM_PORTS = 10_000
"""How many below the kernel's own to choose from: two tests that choose at once seldom meet."""

FIRST_UNPRIVILEGED = 1024


def fixed_port(*, num_ports: int = NUM_PORTS) -> int:
    """Return a port of the loopback on which nobody listens, outside those of the kernel's choice.

    From its range the kernel gives a port to every client that connects: also that of a server
    that is down just now.
    """
    first = int(EPHEMERAL.read_text(encoding="ascii").split()[0])
    lowest = max(FIRST_UNPRIVILEGED, first - num_ports)
    assert lowest < first, f"{EPHEMERAL} leaves no port to a server of ours: it begins at {first}"
    # By the kernel's randomness: tests set the seed of Python's, in each process the same.
    start = secrets.randbelow(first - lowest)
    for place in range(first - lowest):
        port = lowest + (start + place) % (first - lowest)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"every port from {lowest} to {first - 1} is taken")
