"""CPU time of sampling a host once per second.

    python -m benchmarks.host_sampling

Measures the CPU time of each source by the clock of the thread. RDMA ports are ordinary files in a
tree like that of mlx5: a real port queries its firmware and costs more.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rankscope.collector.host.rdma import DRIVER_COUNTERS, PORT_COUNTERS, RdmaSource
from rankscope.collector.host.sample import SourceAbsentError
from rankscope.collector.host.sampler import host_sources

if TYPE_CHECKING:
    from rankscope.collector.host.sample import Source

NUM_ROUNDS = 100
PAUSE_S = 0.05
MS = 1_000_000
NUM_PORTS = 8


def write_ports(root: Path, num_ports: int) -> Path:
    """Write a tree of active ports as ordinary files and return its root."""
    for number in range(num_ports):
        port = root / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        for folder, names in (("counters", PORT_COUNTERS), ("hw_counters", DRIVER_COUNTERS)):
            (port / folder).mkdir()
            for name in names:
                (port / folder / name).write_text("123456\n")
    return root


def cost_ms(source: Source) -> tuple[float, int]:
    """Return (median CPU time, samples of the last round; -1 if absent)."""
    costs_ns = []
    num_samples = 0
    for _ in range(NUM_ROUNDS):
        began_ns = time.thread_time_ns()
        try:
            num_samples = len(source.read(time.time_ns()))
        except SourceAbsentError:
            num_samples = -1
        costs_ns.append(time.thread_time_ns() - began_ns)
        time.sleep(PAUSE_S)
    return statistics.median(costs_ns[1:]) / MS, num_samples


def main() -> None:
    """Print the tables of docs/samples.md."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print(f"{len(psutil.pids())} processes, Python {sys.version.split()[0]}")
        total_ms = 0.0
        for source in host_sources(root / "spool"):
            median_ms, num_samples = cost_ms(source)
            total_ms += median_ms
            print(f"{source.name:12} {median_ms:6.2f} ms  {num_samples} samples")
        print(f"{'together':12} {total_ms:6.2f} ms")
        median_ms, num_samples = cost_ms(RdmaSource(write_ports(root / "ports", NUM_PORTS)))
        print(f"rdma, {NUM_PORTS} ports as files: {median_ms:.2f} ms  {num_samples} samples")


if __name__ == "__main__":
    main()
