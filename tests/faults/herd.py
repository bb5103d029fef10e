"""Restart of a collector under the agents of 64 hosts.

``python -m tests.faults.herd FOLDER`` runs with the real interval of probes (10 minutes) and prints
the requests and CPU time of the collector before and after.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rankscope.collector.store.location import read_server_file
from tests.faults.cycles import RUN, WholePath
from tests.faults.many_agents import spool_of
from tests.support.collector.spool_builder import SpoolBuilder, this_host

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_AGENTS = 64
NUM_PROCESSES = 2
ROWS_A_BURST = 10
LOOK_S = 0.5
WORST_S = 2.0
STEADY_REQUESTS_PER_S = 2.0 * NUM_AGENTS
"""One probe and one body of cuts per second from each agent. A busy machine has fewer, so later
values are compared with this and not with the measured ones."""

REAL_STEADY_AFTER_S = 260.0
"""An agent probes once per second when it is 256 s old."""

COUNTED = re.compile(r'^rankscope_http_requests_total\{.*route="(/v1/[a-z]+)".*\} ([0-9.e+]+)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Counters of a collector at one moment."""

    at_s: float
    num_requests: int
    """Requests of agents since its start."""

    cpu_s: float
    """CPU time of it and its decoders since their start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Rates of a collector over a period."""

    seconds: float
    requests_per_s: float
    most_requests_per_s: float
    """Rate in the worst `WORST_S` or more."""

    cpu_ratio: float
    """CPU seconds per second."""

    cpu_s_a_request: float


@dataclass(kw_only=True)
class Herd(WholePath):
    """A collector and 64 agents with one rank each."""

    rows_a_burst: int = ROWS_A_BURST
    is_soon_steady: bool = True

    def commands(self) -> dict[str, list[str]]:
        commands = super().commands()
        del commands["agent"]
        share = NUM_AGENTS // NUM_PROCESSES
        for number in range(NUM_PROCESSES):
            numbers = [str(number * share), str(share)]
            commands[f"agents-{number}"] = [
                sys.executable, "-m", "tests.faults.many_agents", self.url, str(self.spool),
                *numbers, *(["--soon-steady"] if self.is_soon_steady else []),
            ]  # fmt: skip
        return commands

    def begin_ranks(self) -> list[SpoolBuilder]:
        return [
            SpoolBuilder(spool_of(self.spool, rank), run_id=RUN, rank=rank, **this_host())
            for rank in range(NUM_AGENTS)
        ]

    def look(self) -> Look:
        """Return the current counters of the collector."""
        server = read_server_file(self.store)
        assert server is not None
        figures: list[str] = []

        def is_stored() -> bool:
            text = self.ask("/metrics", Authorization=f"Bearer {server.token}")
            figures[:] = (text or "").splitlines()
            return bool(figures)

        self.wait_for(is_stored)
        counts = [found[2] for line in figures if (found := COUNTED.match(line))]
        return Look(
            at_s=time.monotonic(),
            num_requests=round(sum(map(float, counts))),
            cpu_s=cpu_seconds(self.pid_of("collector")),
        )

    def watch(self, is_done: Callable[[float], bool]) -> Pace:
        """Write and read the counters until ``is_done`` of the elapsed seconds."""
        looks = [self.look()]
        while not is_done(looks[-1].at_s - looks[0].at_s):
            self.write()
            time.sleep(LOOK_S)
            looks.append(self.look())
        return pace_of(looks)

    def write_while(self, is_so: Callable[[], bool]) -> None:
        """Write while a condition holds."""
        while is_so():
            self.write()
            time.sleep(LOOK_S)

    def num_written(self) -> int:
        """Return the number of written rows."""
        with (self.folder / "oracle").open("rb") as lines:
            return sum(b'"attempt"' in line for line in lines)


def pace_of(looks: list[Look]) -> Pace:
    """Return the rates between the first and the last reading."""
    first, last = looks[0], looks[-1]
    seconds, num_requests = last.at_s - first.at_s, last.num_requests - first.num_requests
    rates = [
        (after.num_requests - before.num_requests) / (after.at_s - before.at_s)
        for place, before in enumerate(looks)
        for after in looks[place:]
        if after.at_s - before.at_s >= WORST_S or (before, after) == (first, last)
    ]
    return Pace(
        seconds=round(seconds, 1),
        requests_per_s=round(num_requests / seconds, 1),
        most_requests_per_s=round(max(rates), 1),
        cpu_ratio=round((last.cpu_s - first.cpu_s) / seconds, 3),
        cpu_s_a_request=round((last.cpu_s - first.cpu_s) / max(num_requests, 1), 5),
    )


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    total = 0.0
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def restart(herd: Herd, *, steady_s: float, recovery_s: float) -> tuple[Pace, Pace]:
    """Kill and restart the collector; return its rates before, and after it answers again.

    Args:
        herd: A herd whose agents are in a steady state.
        steady_s: Duration of the measurement before.
        recovery_s: Shortest duration of the measurement after; it lasts until the rows of the
            outage are stored.
    """
    steady = herd.watch(lambda seconds: seconds >= steady_s)
    herd.kill_only("collector")
    herd.write()
    herd.start("collector")
    herd.write_while(lambda: not herd.is_ready())
    num_waiting = herd.num_written()
    recovery = herd.watch(
        lambda seconds: seconds >= recovery_s and herd.num_stored() >= num_waiting
    )
    return steady, recovery


def main() -> None:
    """Run with the real interval, and print both rates."""
    folder = Path(sys.argv[1])
    with Herd(folder=folder, chooser=random.Random(1), is_soon_steady=False) as herd:
        herd.watch(lambda seconds: seconds >= REAL_STEADY_AFTER_S)
        steady, recovery = restart(herd, steady_s=30, recovery_s=30)
        herd.drain()
        verdict = herd.verdict()
    sys.stdout.write(
        json.dumps(
            {"steady": asdict(steady), "recovery": asdict(recovery), "clean": verdict.is_clean},
            indent=2,
        )
        + "\n"
    )
    steady_cpu_ratio = steady.cpu_s_a_request * STEADY_REQUESTS_PER_S
    is_calm = (
        recovery.most_requests_per_s < 2 * STEADY_REQUESTS_PER_S
        and recovery.cpu_ratio < 2 * steady_cpu_ratio
    )
    sys.exit(0 if verdict.is_clean and is_calm else 1)


if __name__ == "__main__":
    main()
