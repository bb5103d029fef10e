"""Time of a live analysis, and number of steps until it reports a fault.

    python -m benchmarks.online [--ranks 256 2048 12288] [--steps 14]

A simulated job with one rank that is slowed by 1.5 from step 8 on, analysed after each step by the
window, analysis and tracking of `rankscope serve`. The simulated steps are in memory, so the time
of the store is not included.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.tracked_findings import FindingTracker
from rankscope.analysis.trace.tables import RunSummary
from rankscope.server.reports import Reports
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario, TpDetail
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.trace.context import RunContext
    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable

RUN = "simulated"
ONSET = 8
SLOW_RANK = 5
TP, PP = 8, 4


class Growing:
    """A simulated run of which only the first steps have arrived."""

    def __init__(self, source: SimulatedSource) -> None:
        self._source = source
        self.last = -1

    def runs(self) -> tuple[RunSummary, ...]:
        """Return the run."""
        info, steps = self.run_info(RUN), self.steps(RUN)
        return (
            RunSummary(
                run_id=RUN,
                source_format="simulated",
                state="running",
                world_size=info.world_size,
                layout=info.layout,
                num_spans=int(len(self.spans(RUN, first=self.last)) * (self.last + 1)),
                num_steps=self.last + 1,
                started_ns=int(steps.start_ns.min()),
            ),
        )

    def run_info(self, run_id: str) -> RunInfo:
        """Return the summary of the run."""
        return self._source.run_info(run_id)

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the steps that have arrived."""
        return self._source.steps(run_id, first=first, last=self._until(last))

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of steps."""
        return self._source.spans(run_id, first=first, last=self._until(last))

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return the context of steps."""
        return self._source.context(run_id, first=first, last=self._until(last))

    def _until(self, last: int | None) -> int:
        return self.last if last is None else min(last, self.last)


def measure(num_ranks: int, num_steps: int) -> dict[str, Any]:
    """Analyse a job after each of its steps."""
    scenario = Scenario(
        dp=num_ranks // (TP * PP),
        tp=TP,
        pp=PP,
        num_steps=num_steps,
        num_microbatches=8,
        tp_detail=TpDetail.COLLAPSED,
        faults=parse_simulated_faults(
            [f"slow-compute:rank={SLOW_RANK},factor=1.5,steps={ONSET}-{num_steps - 1}"]
        ),
        seed=1,
    )
    source = Growing(SimulatedSource(scenario))
    reports, tracker = Reports(source), FindingTracker(RUN)
    turns, reported_after = [], None
    for step in range(num_steps):
        source.last = step
        (summary,) = source.runs()
        begin = time.perf_counter()
        report = reports.refresh(summary)
        if report is None:
            continue
        tracker.update(report, at_ns=int(report.steps[-1]))
        seconds = time.perf_counter() - begin
        turns.append((len(report.steps), report.num_spans, seconds))
        named = {one.finding.cause for one in tracker.open_findings}
        if reported_after is None and "slow-compute" in named:
            reported_after = step - ONSET + 1
    newest = turns[-3:]
    return {
        "ranks": num_ranks,
        "spans_a_step": turns[0][1],
        "steps_in_window": newest[-1][0],
        "turn_s": {
            "first": round(turns[0][2], 3),
            "median": round(statistics.median(seconds for *_, seconds in turns), 3),
            "last": round(newest[-1][2], 3),
        },
        "named_after_steps": reported_after,
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }


def main() -> None:
    """Print one line of JSON per size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[256, 2048, 12288])
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    for num_ranks in options.ranks:
        print(json.dumps(measure(num_ranks, options.steps)))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
