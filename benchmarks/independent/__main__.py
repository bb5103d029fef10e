"""Accuracy on independently generated runs: `python -m benchmarks.independent --first 0 --num
60`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.independent.cases import FAMILIES_OF, MAKERS, Case, case_of
from benchmarks.independent.run_one import (
    analyse,
    clocks_of,
    lay_out,
    step_bounds,
    step_ns,
)
from benchmarks.independent.spool_bytes import UNIX_NS, SpoolOptions
from rankscope.collector.store.store import open_store

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store

CAUSES = ("healthy", *MAKERS)


def case_by_number(number: int, cause: str | None = None, family: str | None = None) -> Case:
    """Return a case; its number determines cause and job unless they are given."""
    chosen = cause or CAUSES[number % len(CAUSES)]
    families = FAMILIES_OF.get(chosen)
    if family is None and families:
        family = families[number // len(CAUSES) % len(families)]
    return case_of(number, chosen, family)


def samples_of(
    case: Case, step_bounds: list[tuple[int, int]], *, factor: float = 1.0
) -> list[dict[str, Any]]:
    """Return three clock samples of each device per step, lower if it is throttled.

    Args:
        case: The run.
        step_bounds: Start and end of each step, ns from the start of the job.
        factor: Factor on all times of the run.
    """
    if not case.is_throttle_sampled:
        return []
    places = case.job.places
    found = []
    for rank in range(places.world_size):
        for step, (start, end) in enumerate(step_bounds):
            slow = 1.0
            for fault in case.faults:
                if fault.cause == "clock-throttle" and rank in fault.ranks and fault.is_on(step):
                    slow = fault.factor
            for part in range(3):
                at_ns = start + (end - start) * (2 * part + 1) // 6
                at_ns = UNIX_NS + case.job.seed * 10**12 + round(at_ns * factor)
                found.append(
                    {
                        "run_id": "", "host": places.host(rank),
                        "device": places.place_of(rank) % places.ranks_per_host,
                        "at_ns": at_ns, "name": "gpu-clock-hz", "value": 1.7e9 / slow,
                    }
                )  # fmt: skip
    return found


def run_case(
    case: Case, store: Store | None, folder: Path, *, asks_truth: bool = False
) -> dict[str, Any]:
    """Run one case and return its faults and findings."""
    began = time.process_time()
    running, ranks = lay_out(case.job, case.faults)
    clocks = clocks_of(case.job, off_ns=case.clock_off_ns)
    run_id = f"case-{case.number}-{case.cause.replace(' ', '-')}"
    options = SpoolOptions(run_id=run_id, clocks=clocks)
    bounds = step_bounds(running, ranks)
    report = analyse(
        store, folder, running, ranks, options,
        measured_error_ns=case.clock_error_ns, samples=samples_of(case, bounds),
    )  # fmt: skip
    true_slowdown = None
    if asks_truth and len(case.faults) == 1 and case.faults[0].how not in ("", "last stage"):
        plain = replace(case.job, warm_up=1.0, checkpoint_every=0, evaluate_every=0)
        with_it, without = (step_ns(*lay_out(plain, faults)) for faults in (case.faults, ()))
        true_slowdown = float(with_it.mean() / without.mean())
    return {
        "number": case.number,
        "cause": case.cause,
        "family": case.family,
        "job": repr(case.job),
        "clock": (case.clock_off_ns, case.clock_error_ns),
        "faults": [
            {"cause": f.cause, "how": f.how, "ranks": f.ranks, "first": f.first, "last": f.last,
             "factor": f.factor, "ms": f.ms, "has_spans": f.has_spans}
            for f in case.faults
        ],
        "true_slowdown": true_slowdown,
        **finding_rows(report),
        "cpu_s": time.process_time() - began,
    }  # fmt: skip


def finding_rows(report: RunReport) -> dict[str, Any]:
    """Return the findings of a report."""
    return {
        "num_spans": report.num_spans,
        "steps": (report.steps[0], report.steps[-1], len(report.steps)),
        "replay_error": report.replay_error_ratio,
        "slowdown": report.slowdown,
        "warnings": report.quality.warnings,
        "findings": [
            {"cause": f.cause, "ranks": f.ranks, "steps": f.steps, "slowdown": f.slowdown,
             "recoverable": f.recoverable_ratio, "severity": f.severity, "confidence": f.confidence,
             "evidence": f.evidence}
            for f in report.findings
        ],
    }  # fmt: skip


def main() -> None:
    """Run the requested cases and print one line of JSON each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.independent")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--num", type=int, default=32)
    parser.add_argument("--cause", choices=CAUSES)
    parser.add_argument("--family")
    parser.add_argument("--truth", action="store_true", help="lay out the same without the fault")
    parser.add_argument("--eager", action="store_true", help="sends do not wait for receives")
    parser.add_argument("--numbers", type=int, nargs="*", help="only these")
    parser.add_argument("--store", action="store_true", help="through a store, not in memory")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(
            dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        ) as folder,
        open_store(f"chdb://{folder}/store") if asked.store else nullcontext() as store,
    ):
        for number in asked.numbers or range(asked.first, asked.first + asked.num):
            case = case_by_number(number, asked.cause, asked.family)
            case = replace(case, job=replace(case.job, eager_sends=asked.eager))
            try:
                found = run_case(case, store, Path(folder) / "spool", asks_truth=asked.truth)
            except Exception:  # noqa: BLE001  # a case that fails is a result too
                found = {"number": number, "cause": case.cause, "error": traceback.format_exc()}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
