"""Counters of an exported trace: MFU by step, samples of devices and hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.breakdown.mfu import read_mfu
from rankscope.tracer.span import NONE

from .chrome_trace import Counter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from rankscope.analysis.trace.context import SampleTable
    from rankscope.analysis.trace.tables import RunInfo, SpanTable

    from .store_source import StoreSource

JOB = "job"

SHOWN_SAMPLES = frozenset({
    "gpu-clock-hz", "gpu-memory-clock-hz", "gpu-power-w", "gpu-temperature-c",
    "gpu-utilisation-ratio", "gpu-memory-used-bytes",
    "cpu-busy-ratio", "cpu-frequency-hz", "memory-used-bytes",
})  # fmt: skip
"""Samples that are levels; of counters that only grow, a drawing shows nothing."""


class TraceCounters:
    """Counters of a run, for one block of whole steps after another.

    Args:
        ranks: Only the devices of these; empty: all.
    """

    def __init__(self, source: StoreSource, run: RunInfo, ranks: Collection[int]) -> None:
        self._source, self._run = source, run
        self._rank_of = {
            (rank.host, rank.local_rank): number
            for number, rank in run.ranks.items()
            if not ranks or number in ranks
        }
        self._hosts = {host for host, _ in self._rank_of}
        steps = source.steps(run.run_id)
        self._mfu = read_mfu(source, run.run_id, steps)
        """Of all steps: the time of one is counted from the end of the one before."""

        numbers, place = np.unique(steps.step, return_inverse=True)
        begin_ns = np.zeros(len(numbers), dtype=np.int64)
        np.maximum.at(begin_ns, place, steps.start_ns)
        self._begin_ns = dict(zip(numbers.tolist(), begin_ns.tolist(), strict=True))
        self._until_ns = 0

    def of_block(self, spans: SpanTable) -> Iterator[Counter]:
        """Yield the counters of the steps of a block, each once."""
        numbers = spans.step[spans.step != NONE]
        if not len(numbers):
            return
        first, last = int(numbers.min()), int(numbers.max())
        for step, value in (self._mfu.by_step if self._mfu else {}).items():
            if first <= step <= last:
                yield Counter(JOB, "MFU", self._begin_ns[step], value)
        context = self._source.context(self._run.run_id, first=first, last=last)
        yield from self._samples(context.samples)

    def _samples(self, samples: SampleTable) -> Iterator[Counter]:
        codes = [code for code, name in enumerate(samples.names) if name in SHOWN_SAMPLES]
        shown = np.isin(samples.name, codes) & (samples.at_ns > self._until_ns)
        self._until_ns = int(samples.at_ns.max(initial=self._until_ns))
        columns = (samples.host, samples.device, samples.name, samples.at_ns, samples.value)
        for host, device, name, at_ns, value in zip(
            *(column[shown].tolist() for column in columns), strict=True
        ):
            where = samples.hosts[host]
            owner = self._rank_of.get((where, device))
            if owner is not None:
                yield Counter(owner, samples.names[name], at_ns, value)
            elif device == NONE and where in self._hosts:
                yield Counter(f"host {where}", samples.names[name], at_ns, value)
