"""Cost of what the agent reads of its host: samples, logs, kernel log, checks.

    python -m benchmarks.agent_cost [--seconds 150] [--ranks 8] [--json FILE]

A real agent sends the records of light gloo ranks to a real server, twice: with everything (logs,
host sampling, kernel log, examinations at its start, at the job's start, and when asked), and with
`--no-samples`. CPU time is that of the process and its ended children, over all of the time after
the first step; memory is the largest of a reading each second (RSS, and PSS without shared pages).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.integration.programs import COMMAND, environment, serving
from tests.integration.watched_job import spool_of, start_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
WAIT_S = 120.0
MAX_CORES, MAX_MORE_MIB = 0.01, 60.0
"""What all this may cost: CPUs, and more memory than without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of an agent."""

    seconds: float
    cores: float
    rss_mib: float
    pss_mib: float


def measure(folder: Path, *flags: str, num_ranks: int, seconds: float) -> Cost:
    """Return the cost of an agent with some flags beside its ranks."""
    folder.mkdir()
    with (
        serving(store=folder / "store") as server,
        start_ranks(folder, num_ranks, 1_000_000) as ranks,
        subprocess.Popen(
            [
                *(*COMMAND, "agent", "--spool", str(spool_of(folder))),
                *("--collector", server.url, *flags),
            ],
            env=environment(folder / "store", RANKSCOPE_TOKEN=server.token),
            stderr=(folder / "agent.log").open("w"),
        ) as process,
    ):
        try:
            _wait_for_step(folder, ranks)
            return _watch(psutil.Process(process.pid), seconds)
        finally:
            process.terminate()


def _wait_for_step(folder: Path, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not (folder / "step").exists():
        if time.monotonic() > deadline_s or any(rank.poll() is not None for rank in ranks):
            raise RuntimeError((folder / "logs" / "rank-0.log").read_text())
        time.sleep(0.5)


def _watch(agent: psutil.Process, seconds: float) -> Cost:
    begun_s, begun_cpu_s = time.monotonic(), _cpu_s(agent)
    rss = pss = 0
    while time.monotonic() - begun_s < seconds:
        memory = agent.memory_full_info()
        rss, pss = max(rss, memory.rss), max(pss, memory.pss)
        time.sleep(1.0)
    lasted_s = time.monotonic() - begun_s
    cores = (_cpu_s(agent) - begun_cpu_s) / lasted_s
    return Cost(seconds=lasted_s, cores=cores, rss_mib=rss / MIB, pss_mib=pss / MIB)


def _cpu_s(agent: psutil.Process) -> float:
    return float(sum(agent.cpu_times()[:4]))


def main() -> None:
    """Print both costs and their difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = str(folder / "all" / "logs" / "*.log")
        counts = {"num_ranks": options.ranks, "seconds": options.seconds}
        plain = measure(folder / "plain", "--no-samples", **counts)
        whole = measure(folder / "all", "--logs", logs, **counts)
    more = {
        "cores": whole.cores - plain.cores,
        "rss_mib": whole.rss_mib - plain.rss_mib,
        "pss_mib": whole.pss_mib - plain.pss_mib,
    }
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "num_ranks": options.ranks,
        "num_processes": len(psutil.pids()),
        "no-samples": asdict(plain),
        "all": asdict(whole),
        "more": more,
        "is_met": more["cores"] <= MAX_CORES and more["rss_mib"] <= MAX_MORE_MIB,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
