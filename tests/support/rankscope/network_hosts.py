"""Hosts as network namespaces of this machine, with adapters whose speed is limited."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RATE = "400mbit"
"""Of a good adapter: far below what this machine copies, so that the limit is what is measured."""


def may_make_namespaces() -> bool:
    """Return whether this user may make network namespaces, and limit the speed of links."""
    name = f"rs{os.getpid()}t"
    try:
        _ip("netns", "add", name)
        try:
            _limit(name, "lo", RATE)
        finally:
            _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class NetworkHosts:
    """Hosts with adapters ``n0``, ``n1``, ... of `RATE`, one bridge for the adapters of one number.

    Args:
        num_hosts: Number of hosts.
        num_adapters: Number of adapters of each.
    """

    def __init__(self, num_hosts: int, num_adapters: int) -> None:
        self._base = f"rs{os.getpid() % 10_000}"
        self.adapters = [f"n{lane}" for lane in range(num_adapters)]
        self.names = [f"{self._base}h{number}" for number in range(num_hosts)]

    @contextmanager
    def up(self) -> Iterator[None]:
        """Make the hosts, and remove them in the end."""
        bridges = [f"{self._base}b{lane}" for lane in range(len(self.adapters))]
        try:
            for bridge in bridges:
                _ip("link", "add", bridge, "type", "bridge")
                _ip("link", "set", bridge, "up")
            for number, name in enumerate(self.names):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                for lane, bridge in enumerate(bridges):
                    self._attach(name, lane, bridge, address=f"10.79.{lane}.{number + 1}/24")
            yield
        finally:
            for command in [
                *(("netns", "del", name) for name in self.names),
                *(("link", "del", bridge) for bridge in bridges),
            ]:
                subprocess.run(["ip", *command], check=False, capture_output=True)

    def _attach(self, name: str, lane: int, bridge: str, *, address: str) -> None:
        outer, inner = f"{name}v{lane}", f"n{lane}"
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        _ip("link", "set", outer, "master", bridge, "up")
        _ip("-n", name, "addr", "add", address, "dev", inner)
        _ip("-n", name, "link", "set", inner, "up")
        _limit(name, inner, RATE)

    def limit(self, number: int, interface: str, rate: str) -> None:
        """Limit what an interface of a host sends, such as to ``50mbit``."""
        _limit(self.names[number], interface, rate)

    def start(
        self, number: int, command: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command on a host; its output is kept."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], *command],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _limit(name: str, interface: str, rate: str) -> None:
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
    command = ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", interface, *limit]
    subprocess.run(command, check=True, capture_output=True)
