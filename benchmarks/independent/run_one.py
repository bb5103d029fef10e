"""Storing and analysis of one spool, as for a run of a user."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.independent.faults import Plan
from benchmarks.independent.jobs import Running
from benchmarks.independent.memory import read_spool
from benchmarks.independent.spool_bytes import UNIX_NS, Clock, SpoolOptions, write_spool
from rankscope.analysis.analyze import analyze_run
from rankscope.collector.clock.map import ClockMap
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.independent.faults import Fault
    from benchmarks.independent.job import Job
    from benchmarks.independent.machine import Rank
    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store
    from rankscope.tracer.spool import SpoolIdentity


@dataclass
class KnownClocks:
    """Clocks as measured by an agent: the offset of each host with an error."""

    store: Store
    offset_ns: Mapping[str, int]
    error_ns: int

    def clock_map(self, identity: SpoolIdentity, *, declared_error_ns: int = -1) -> ClockMap:
        """Return the measured clock map of a host, and store its error."""
        del declared_error_ns
        offset = self.offset_ns[identity.host]
        row = {
            "host": identity.host, "boot_id": identity.boot_id.hex(), "at_ns": UNIX_NS,
            "offset_ns": offset, "drift_ppb": 0, "clock_error_ns": self.error_ns,
        }  # fmt: skip
        self.store.insert_rows("clock", [row])
        return ClockMap.fixed(offset)


def clocks_of(job: Job, *, off_ns: int) -> dict[str, Clock]:
    """Return clocks with anchor errors of up to ``off_ns``."""
    rng = np.random.default_rng((job.seed, 5))
    hosts = sorted({job.places.host(rank) for rank in range(job.places.world_size)})
    return {
        host: Clock(
            base_ns=int(rng.integers(10**12, 10**14)),
            unix_ns=UNIX_NS + job.seed * 10**12,
            anchor_error_ns=int(rng.integers(-off_ns, off_ns + 1)),
        )
        for host in hosts
    }


def lay_out(job: Job, faults: Sequence[Fault]) -> tuple[Running, list[Rank]]:
    """Lay out a job; return it with its ranks."""
    running = Running(job, Plan(faults, job.seed))
    return running, running.ranks()


def step_bounds(running: Running, ranks: Sequence[Rank]) -> list[tuple[int, int]]:
    """Return the time of each step's compute on the first rank, ns from the start of the job.

    A host that runs ahead ends a step before its device begins it.
    """
    at = running.moments.solve()
    computed: dict[int, list[int]] = {}
    for each in ranks[0].records:
        if each.track == "compute":
            computed.setdefault(each.step, []).extend((int(at[each.start]), int(at[each.end])))
    return [(min(times), max(times)) for _, times in sorted(computed.items())]


def step_ns(running: Running, ranks: Sequence[Rank]) -> NDArray[np.int64]:
    """Return the duration of each step over all ranks, on the hosts."""
    at = running.moments.solve()
    num = running.job.num_steps
    first, last = np.full(num, np.iinfo(np.int64).max), np.zeros(num, dtype=np.int64)
    for rank in ranks:
        for step, start, end in rank.steps:
            first[step] = min(first[step], at[start])
            last[step] = max(last[step], at[end])
    took: NDArray[np.int64] = last - first
    return took


def analyse(  # noqa: PLR0913  # a run and its options
    store: Store | None,
    folder: Path,
    running: Running,
    ranks: Sequence[Rank],
    options: SpoolOptions,
    *,
    measured_error_ns: int | None,
    samples: Sequence[Mapping[str, object]] = (),
) -> RunReport:
    """Write the spool, tail it into the store, and analyse the run."""
    write_spool(folder, running, ranks, options)
    if store is None:
        error_ns = None if measured_error_ns is None else 2 * measured_error_ns
        source = read_spool(folder / options.run_id, clock_error_ns=error_ns, samples=samples)
        shutil.rmtree(folder / options.run_id)
        return analyze_run(source, options.run_id)
    if samples:
        store.insert_rows("samples", samples)
    clocks = None
    if measured_error_ns is not None:
        clocks = KnownClocks(
            store,
            {
                host: clock.unix_ns + clock.anchor_error_ns - clock.base_ns
                for host, clock in options.clocks.items()
            },
            measured_error_ns,
        )
    tail = SpoolTail(folder, StoreWriter(store), only_run=options.run_id, clocks=clocks)
    while tail.poll().num_cuts:
        pass
    shutil.rmtree(folder / options.run_id)
    return analyze_run(StoreSource(store), options.run_id)
