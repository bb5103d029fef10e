"""The speed of single links between ranks, set on the kernel's sockets; Linux only.

gloo keeps one TCP connection between each two ranks of a group. The kernel
sends on a socket no faster than its ``SO_MAX_PACING_RATE``, which any process
may set on its own sockets: a slow link is then slow for every operation that
sends over it, and both ends see the transfer itself take longer. The first two
segments of a message (up to 128 KiB on the loopback) leave at once, and what
follows waits for them; so messages should be larger than that.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..errors import LinkError

if TYPE_CHECKING:
    from collections.abc import Mapping

SO_MAX_PACING_RATE = 47
"""Source: Linux, ``include/uapi/asm-generic/socket.h``."""

NOMINAL_BYTES_PER_S = 100_000_000
"""Speed of every link of a job in which one is to be slow, so that ``factor`` means something."""

FDS = Path("/proc/self/fd")

Ends = tuple[tuple[str, int], tuple[str, int]]
"""Address and port of a connection here and there."""


class Links:
    """This rank's connections to other ranks; all ranks must make one at the same time."""

    def __init__(self) -> None:
        mine = _connections()
        told: list[list[Ends]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, list(mine))
        by_ends = {ends: rank for rank, known in enumerate(told) for ends in known}
        self._fds: dict[int, list[int]] = {}
        for (here, there), fd in mine.items():
            peer = by_ends.get((there, here))
            if peer is not None and peer != dist.get_rank():
                self._fds.setdefault(peer, []).append(fd)

    @property
    def num_connections(self) -> int:
        """Connections to other ranks, over all groups."""
        return sum(map(len, self._fds.values()))

    def set_slowness(self, factors: Mapping[int, float]) -> None:
        """Let every link send at the nominal speed, that to a peer at ``1 / factor`` of it.

        Raises:
            LinkError: The kernel refuses.
        """
        for peer, fds in self._fds.items():
            for fd in fds:
                _set_rate(fd, round(NOMINAL_BYTES_PER_S / factors.get(peer, 1.0)))


def _connections() -> dict[Ends, int]:
    """Return the descriptor of each TCP connection of this process."""
    found: dict[Ends, int] = {}
    for path in list(FDS.iterdir()):
        fd = int(path.name)
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    here, there = connection.getsockname()[:2], connection.getpeername()[:2]
                    found[(here[0], here[1]), (there[0], there[1])] = fd
        except OSError:
            continue  # no socket, closed meanwhile, or one that listens
    return found


def _set_rate(fd: int, bytes_per_s: int) -> None:
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
    except OSError as problem:
        raise LinkError(
            f"a link's speed cannot be set on this system: {problem}; slow-link needs Linux"
        ) from problem
