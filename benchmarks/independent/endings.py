"""Crashes and hangs, through a store: `python -m benchmarks.independent.endings`."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.independent.cases import JOBS
from benchmarks.independent.faults import Fault
from benchmarks.independent.run_one import clocks_of, lay_out
from benchmarks.independent.spool_bytes import End, SpoolOptions, write_spool
from rankscope.analysis.analyze import analyze_run
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource

if TYPE_CHECKING:
    from benchmarks.independent.job import Job
    from rankscope.collector.store.store import Store

OOM = {"type": "torch.OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2 GiB",
       "traceback": "..."}  # fmt: skip
LOST = {"type": "torch.distributed.DistBackendError",
        "message": "NCCL error: remote process exited or there was a network error",
        "traceback": "..."}  # fmt: skip
RANK = 5


def run_ending(store: Store, folder: Path, job: Job, run_id: str, *, crashes: bool) -> str:
    """Crash or hang rank 5 in the middle of a job, and return the findings."""
    step = job.num_steps // 2
    hang = Fault(
        cause="hang", how="data", ranks=(RANK,), first=step, last=step, ms=1e9, has_spans=False
    )
    running, ranks = lay_out(job, () if crashes else (hang,))
    at = running.moments.solve()
    _, start, end = ranks[RANK].steps[step]
    if crashes:
        stopped = int(at[start] + at[end]) // 2
        ends = {rank: End(at_ns=stopped + 10**9, exception=LOST) for rank in range(len(ranks))}
        ends[RANK] = End(at_ns=stopped, exception=OOM)
    else:
        # A minute later the others are blocked by rank 5.
        ends = {rank: End(at_ns=int(at[start]) + 60 * 10**9) for rank in range(len(ranks))}
    options = SpoolOptions(run_id=run_id, clocks=clocks_of(job, off_ns=0), ends=ends)
    write_spool(folder, running, ranks, options)
    minutes = count(10**12, 60 * 10**9)
    tail = SpoolTail(
        folder, StoreWriter(store), only_run=run_id, monotonic_ns=lambda: next(minutes)
    )
    for _ in range(6):
        tail.poll()
    found = analyze_run(StoreSource(store), run_id).findings
    return "; ".join(f"{each.cause} {each.ranks}: {each.evidence}" for each in found)


def main() -> None:
    """Print the findings of a crash and a hang in each kind of job."""
    with tempfile.TemporaryDirectory() as folder, open_store(f"chdb://{folder}/store") as store:
        for name, jobs in JOBS.items():
            if name == "large":
                continue
            job = replace(jobs[0], num_steps=4)
            for crashes in (True, False):
                run_id = f"{name}-{'crash' if crashes else 'hang'}"
                found = run_ending(store, Path(folder) / "spool", job, run_id, crashes=crashes)
                sys.stdout.write(f"{run_id}: {found[:400]}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
