"""Accuracy of the diagnosis on simulated clusters with labelled faults.

    python -m benchmarks.diagnosis [--seed 1] [--share 1.0] [--jobs 2] [--out FILE.jsonl]
    python -m benchmarks.diagnosis --summary FILE.jsonl

Simulates and analyses every scenario of a seed (`benchmarks.diagnosis_scenarios`), writes one line
of JSON each, and prints the tables of docs/laboratory.md. The simulator shares no code with the
analysis, but belongs to the same project: `benchmarks.independent` is a generator by another
author.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.diagnosis_scenarios import Labelled, scenarios
from benchmarks.diagnosis_summary import summary
from rankscope.analysis.analyze import analyze_run
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import StepTable

RUN = "simulated"
PRICED = frozenset(
    {"slow-compute", "clock-throttle", "slow-link", "host-stall", "data-stall", "stage-imbalance"}
)
"""Causes whose slowdown is measured by simulating the scenario without the fault as well."""

LATENCY_STEPS = 3
LARGEST_TWICE = 2048
"""Largest number of ranks for which the true slowdown is simulated."""

LARGEST_EARLY = 256
"""Largest number of ranks for which the analysis is repeated three steps after the onset."""


def run_one(labelled: Labelled) -> dict[str, Any]:
    """Simulate and analyse one scenario."""
    begin = time.perf_counter()
    source = SimulatedSource(labelled.scenario)
    simulated = time.perf_counter()
    report = analyze_run(source, RUN)
    analysed = time.perf_counter()
    found: dict[str, Any] = {
        "number": labelled.number,
        "size": labelled.size,
        "world_size": labelled.scenario.world_size,
        "strength": labelled.strength,
        "healthy": labelled.is_healthy,
        "faults": [str(fault) for fault in labelled.scenario.faults],
        "truth": [
            {
                "cause": label.cause,
                "ranks": label.ranks,
                "visible_ranks": label.visible_ranks,
                "steps": label.steps,
            }
            for label in source.labels
        ],
        "findings": _findings(report),
        "num_spans": report.num_spans,
        "replay_error_ratio": report.replay_error_ratio,
        "simulate_s": simulated - begin,
        "analyze_s": analysed - simulated,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    single = len(source.labels) == 1 and labelled.scenario.world_size <= LARGEST_TWICE
    if single and source.labels[0].cause in PRICED:
        found["true_slowdown"] = _true_slowdown(labelled, source.steps(RUN))
        if labelled.scenario.world_size <= LARGEST_EARLY:
            onset = source.labels[0].steps[0]
            early = analyze_run(source, RUN, last=onset + LATENCY_STEPS - 1)
            found["early_findings"] = _findings(early)
    return found


def _findings(report: RunReport) -> list[dict[str, Any]]:
    return [
        {
            "cause": finding.cause,
            "ranks": finding.ranks if len(finding.ranks) <= 64 else finding.ranks[:64],
            "num_ranks": len(finding.ranks),
            "steps": finding.steps,
            "slowdown": finding.slowdown,
            "recoverable_ratio": finding.recoverable_ratio,
            "severity": finding.severity,
            "confidence": finding.confidence,
        }
        for finding in report.findings
    ]


def _true_slowdown(labelled: Labelled, steps: StepTable) -> float:
    """Return the mean step time over that of the same run without its fault."""
    without = SimulatedSource(replace(labelled.scenario, faults=()))
    return _mean_step(steps) / _mean_step(without.steps(RUN))


def _mean_step(steps: StepTable) -> float:
    first, last = np.unique(steps.step)[[0, -1]]
    whole = steps.end_ns[steps.step == last].max() - steps.start_ns[steps.step == first].min()
    return float(whole) / float(last - first + 1)


def run_all(every: list[Labelled], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield the result of each scenario, in order."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_one, every, chunksize=1)


def main() -> None:
    """Run the scenarios, or summarise results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the scenarios of each size")
    parser.add_argument("--sizes", nargs="*", default=(), help="small, 2048, 12288; all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("diagnosis.jsonl"))
    parser.add_argument("--summary", type=Path, help="print the tables of an earlier run")
    options = parser.parse_args()
    if options.summary is None:
        every = list(scenarios(options.seed, share=options.share, sizes=tuple(options.sizes)))
        with options.out.open("w") as out:
            for number, result in enumerate(run_all(every, options.jobs)):
                out.write(json.dumps(result) + "\n")
                out.flush()
                print(f"\r{number + 1} of {len(every)} scenarios", end="", file=sys.stderr)
        print(file=sys.stderr)
    lines = (options.summary or options.out).read_text().splitlines()
    print(summary([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()
