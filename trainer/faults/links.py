"""The speed of single links between ranks, set on the sockets of gloo. Linux only.

gloo keeps one TCP connection between each two ranks of a group. The kernel sends on a socket no
faster than its ``SO_MAX_PACING_RATE``, which a process may set on its own sockets. A slow link is
then slow for every operation that sends over it, and the transfer takes longer on both ends. The
first two segments of a message (up to 128 KiB on the loopback) are sent at once, so messages should
be larger than that.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..errors import LinkError
from ..parallel import broadcast_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

SO_MAX_PACING_RATE = 47
"""Source: Linux, ``include/uapi/asm-generic/socket.h``."""

NOMINAL_BYTES_PER_S = 100_000_000
"""Speed of the healthy links of a job with a slow link, to which ``factor`` relates."""

FDS = Path("/proc/self/fd")

Ends = tuple[tuple[str, int], tuple[str, int]]
"""Address and port of both ends of a connection, the local one first."""


class Links:
    """This rank's connections to other ranks. All ranks must create one together."""

    def __init__(self) -> None:
        mine = _connections()
        by_ends: dict[Ends, int] = {}
        for rank in range(dist.get_world_size()):
            for here, there in broadcast_plain(list(mine), src=rank, group=None):
                by_ends[(here[0], here[1]), (there[0], there[1])] = rank
        self._fds: dict[int, list[int]] = {}
        for (here, there), fd in mine.items():
            peer = by_ends.get((there, here))
            if peer is not None and peer != dist.get_rank():
                self._fds.setdefault(peer, []).append(fd)

    @property
    def num_connections(self) -> int:
        """Number of connections to other ranks, over all groups."""
        return sum(map(len, self._fds.values()))

    def set_slowness(self, factors: Mapping[int, float]) -> None:
        """Set every link to the nominal speed, divided by the factor of its peer.

        Raises:
            LinkError: The kernel refuses to set it.
        """
        for peer, fds in self._fds.items():
            for fd in fds:
                try:
                    with socket.socket(fileno=os.dup(fd)) as connection:
                        connection.setsockopt(
                            socket.SOL_SOCKET,
                            SO_MAX_PACING_RATE,
                            round(NOMINAL_BYTES_PER_S / factors.get(peer, 1.0)),
                        )
                except OSError as problem:
                    raise LinkError(
                        f"the speed of a link cannot be set on this system ({problem}):"
                        " slow-link needs Linux"
                    ) from problem


def _connections() -> dict[Ends, int]:
    """Return the file descriptor of each TCP connection of this process."""
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
            continue  # Not a socket, closed since, or a listening socket.
    return found
