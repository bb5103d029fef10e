"""False and missed alarms of the alert rules over simulated runs.

Healthy runs have checkpoints, evaluations of three steps in a row, varying sequence lengths, a slow
drift of the speed, or none of them; faulty ones have a planted drop beside the same. Each run is
analysed as it grows, so an alarm counts even if a later analysis takes it back.

    nice python -m benchmarks.alerts --runs 300 --seed 7
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean

from rankscope.analysis.alert_rules import FINDING, MFU_DROP, STEP_TIME_RISE, find_conditions
from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.tracked_findings import FindingTracker
from rankscope.trainer.simulator.fault import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Noise, Scenario
from tests.support.rankscope.simulated_source import SimulatedSource

NUM_STEPS = 42
ONSET = 30
RUN = "simulated"
KINDS = ("plain", "checkpoints", "evaluations", "lengths", "drift", "all")
DROP_RATIO = 0.10
DROPS = (MFU_DROP, STEP_TIME_RISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Alarms of one run."""

    kind: str
    depth: float
    """True drop of the steps per second after the onset, planned pauses left out."""

    alarms: tuple[str, ...]
    """Rule and cause of each alarm, at any time."""

    is_found: bool
    """Whether an alarm was active three steps after the onset."""


def main() -> None:
    """Run the benchmark and print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="healthy runs, and as many faulty")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seeds = range(options.seed * 100_000, options.seed * 100_000 + options.runs)
    healthy = [measure(seed, is_faulty=False) for seed in seeds]
    faulty = [measure(seed, is_faulty=True) for seed in seeds]
    due = [each for each in faulty if each.depth >= DROP_RATIO]
    rows = {
        kind: {
            "healthy": sum(each.kind == kind for each in healthy),
            "false": sum(each.kind == kind and bool(each.alarms) for each in healthy),
            "drops of 10 % and more": sum(each.kind == kind for each in due),
            "found within 3 steps": sum(each.kind == kind and each.is_found for each in due),
        }
        for kind in KINDS
    }
    false = Counter(alarm for each in healthy for alarm in each.alarms)
    if options.json:
        print(json.dumps({"kinds": rows, "false": false}))
        return
    print("| runs with |", " | ".join(rows["plain"]), "|")
    print("| --- |", " | ".join("---:" for _ in rows["plain"]), "|")
    for kind, numbers in rows.items():
        print(f"| {kind} |", " | ".join(map(str, numbers.values())), "|")
    print("false alarms:", dict(false) or "none")


def measure(seed: int, *, is_faulty: bool) -> Outcome:
    """Simulate a run, analyse it as it grows, and return its alarms."""
    chance = random.Random(seed)  # no secret
    kind = KINDS[seed % len(KINDS)]
    faults = planned_pauses(kind, chance)
    if is_faulty:
        factor = 1.0 + chance.uniform(0.14, 0.8)
        where = f"rank={chance.randrange(4)},factor={factor:.3f},steps={ONSET}-{NUM_STEPS - 1}"
        faults.append(f"slow-compute:{where}")
    noise = Noise()
    if kind in {"lengths", "all"}:
        noise = replace(noise, sequence_spread=chance.uniform(0.05, 0.2))
    if kind in {"drift", "all"}:
        noise = replace(noise, drift_ratio=0.05, drift_period_steps=80)
    scenario = Scenario(
        dp=4,
        pp=1,
        num_steps=NUM_STEPS,
        num_microbatches=chance.choice((4, 8)),
        noise=noise,
        faults=parse_simulated_faults(faults),
        seed=seed,
    )
    return _follow(SimulatedSource(scenario), kind, is_faulty=is_faulty)


def planned_pauses(kind: str, chance: random.Random) -> list[str]:
    """Return the planned pauses of a kind of run, as faults of the simulator."""
    found = []
    if kind in {"checkpoints", "all"}:
        spans = chance.choice(("yes", "no"))
        found.append(f"checkpoint:every={chance.randint(5, 9)},ms=600,spans={spans}")
    if kind in {"evaluations", "all"}:
        first = chance.randint(8, 20)
        found.append(f"checkpoint:every=1,steps={first}-{first + 2},ms={chance.randint(200, 900)}")
    return found


def _follow(source: SimulatedSource, kind: str, *, is_faulty: bool) -> Outcome:
    tracker = FindingTracker(RUN)
    alarms: set[str] = set()
    is_found = False
    report = None
    for last in (12, 20, ONSET - 1, ONSET + 2, NUM_STEPS - 1):
        report = analyze_run(source, RUN, last=last)
        tracker.update(report, at_ns=last)
        for each in find_conditions(report, tracker.findings):
            cause = each.finding.cause if each.finding is not None else ""
            if each.is_active or each.rule != FINDING:
                alarms.add(f"{each.rule} {cause}".strip())
            if last == ONSET + 2 and each.is_active and (each.steps or (0, 0))[1] >= ONSET:
                is_found = True
    depth = 0.0
    if report is not None and is_faulty:
        planned = set(report.planned_steps)
        seconds = {
            step: s for step, s in report.actual_s_by_step.items() if step not in planned and step
        }
        before = fmean(s for step, s in seconds.items() if step < ONSET)
        after = fmean(s for step, s in seconds.items() if step >= ONSET)
        depth = 1 - before / after
    return Outcome(kind=kind, depth=depth, alarms=tuple(sorted(alarms)), is_found=is_found)


if __name__ == "__main__":
    main()
