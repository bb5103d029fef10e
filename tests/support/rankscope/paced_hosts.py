"""Hosts as processes that pass a token around in their groups, each with a pace of its own."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

PACE_S = 0.002
"""Time for which a good host holds the token."""

SLOW_RATIO = 3.0
NUM_TURNS = 4


class PacedHosts:
    """The part of `rankscope.doctor.active.trials.World` that group tests use, without torch.

    A group's time is that of its token: as a ring all-reduce, it is as slow as its hosts together,
    and is measured, with the noise of this machine.

    Args:
        num_hosts: Number of hosts, each a process.
        slow: Numbers of those that take `SLOW_RATIO` as long.
    """

    def __init__(self, num_hosts: int, slow: Collection[int]) -> None:
        self.hosts = [f"n{number:02}" for number in range(num_hosts)]
        context = multiprocessing.get_context("fork")
        self._stack = ExitStack()
        self._ends: list[Connection] = []
        for number in range(num_hosts):
            own, other = context.Pipe()
            pace_s = PACE_S * (SLOW_RATIO if number in slow else 1.0)
            process = context.Process(target=_hold, args=(other, pace_s), daemon=True)
            process.start()
            other.close()
            self._ends.append(own)
            self._stack.callback(process.join)
            self._stack.callback(own.send_bytes, b"")

    def ranks_of(self, host: str) -> list[int]:
        """Return the rank of a host."""
        return [self.hosts.index(host)]

    def time_groups(
        self, groups: Sequence[Sequence[int]], *, interface: str = ""
    ) -> dict[str, list[float]]:
        """Return the time of a token per host of each group; all groups work at once."""
        del interface
        begun_s = time.perf_counter()
        done_s = [0.0] * len(groups)
        turns = [[rank for _ in range(NUM_TURNS) for rank in group] for group in groups]
        holders = {self._ends[turn[0]]: place for place, turn in enumerate(turns)}
        position = [0] * len(groups)
        for end in holders:
            end.send_bytes(b"x")
        while holders:
            for ready in wait([*holders]):
                end = next(end for end in holders if end is ready)
                place = holders.pop(end)
                end.recv_bytes()
                position[place] += 1
                if position[place] == len(turns[place]):
                    done_s[place] = (time.perf_counter() - begun_s) / len(turns[place])
                    continue
                following = self._ends[turns[place][position[place]]]
                holders[following] = place
                following.send_bytes(b"x")
        return {"all-reduce": done_s}

    def close(self) -> None:
        """End the processes."""
        self._stack.close()


def _hold(end: Connection, pace_s: float) -> None:
    """Hold each token for a time, then give it back; an empty one ends it."""
    while end.recv_bytes():
        time.sleep(pace_s)
        end.send_bytes(b"x")
