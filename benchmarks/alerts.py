"""False and missed alarms of the alert rules over simulated runs.

Healthy runs have checkpoints, evaluations of three steps in a row, varying sequence lengths, steps
of varying tokens, a slow drift of the speed, or none of them; faulty ones have a planted drop
beside the same. Each run is analysed as it grows, so an alarm counts even if a later analysis takes
it back, once as it is and once as if its MFU were unknown.

    nice -n 19 python -m benchmarks.alerts --runs 300 --seed 7
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rankscope.analysis.alert_rules import FINDING, MFU_DROP, STEP_TIME_RISE, find_conditions
from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.arrays.grouping import sorted_unique
from rankscope.analysis.report.tracked_findings import FindingTracker
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Noise, Scenario
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

NUM_STEPS = 42
ONSET = 30
RUN = "simulated"
KINDS = ("plain", "checkpoints", "evaluations", "lengths", "tokens", "drift", "all")
DROP_RATIO = 0.10
RULES = (MFU_DROP, STEP_TIME_RISE, FINDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Alarms of one run."""

    seed: int
    kind: str
    cost: float
    """Share of the steps' time that the planted fault takes after the onset, or, in a healthy run,
    that unequal lengths take: against the same run without it. Planned pauses are left out."""

    alarms: tuple[str, ...]
    """Rule and cause of each alarm, at any time."""

    found_by: tuple[str, ...]
    """Rules with an active alarm three steps after the onset."""


def main() -> None:
    """Run the benchmark and print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="healthy runs, and as many faulty")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--log", type=Path, help="append one line of JSON for each run")
    options = parser.parse_args()
    seeds = range(options.seed * 100_000, options.seed * 100_000 + options.runs)
    healthy: list[Outcome] = []
    faulty: list[Outcome] = []
    for seed in seeds:
        for is_faulty, outcomes in ((False, healthy), (True, faulty)):
            outcomes.append(measure(seed, is_faulty=is_faulty))
            if options.log is not None:
                line = {"is_faulty": is_faulty, **asdict(outcomes[-1])}
                with options.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    due = [each for each in faulty if each.cost >= DROP_RATIO]
    rows = {
        kind: {
            "healthy": sum(each.kind == kind for each in healthy),
            "with an alarm": sum(each.kind == kind and bool(each.alarms) for each in healthy),
            "drops of 10 % and more": sum(each.kind == kind for each in due),
            "found within 3 steps": sum(each.kind == kind and bool(each.found_by) for each in due),
            **{
                f"by `{rule}`": sum(each.kind == kind and rule in each.found_by for each in due)
                for rule in RULES
            },
        }
        for kind in KINDS
    }
    alarms = [
        f"{each.seed} ({each.kind}, lengths cost {each.cost:.1%}): {', '.join(each.alarms)}"
        for each in healthy
        if each.alarms
    ]
    missed = [f"{each.seed} ({each.kind}, {each.cost:.1%})" for each in due if not each.found_by]
    if options.json:
        print(json.dumps({"kinds": rows, "alarms": alarms, "missed": missed}))
        return
    print("| runs with |", " | ".join(rows["plain"]), "|")
    print("| --- |", " | ".join("---:" for _ in rows["plain"]), "|")
    for kind, numbers in rows.items():
        print(f"| {kind} |", " | ".join(map(str, numbers.values())), "|")
    print("alarms of healthy runs:", "; ".join(alarms) or "none")
    print("missed drops:", "; ".join(missed) or "none")


def measure(seed: int, *, is_faulty: bool) -> Outcome:
    """Simulate a run, analyse it as it grows, and return its alarms."""
    chance = random.Random(seed)  # no secret
    kind = KINDS[seed % len(KINDS)]
    faults = planned_pauses(kind, chance)
    if is_faulty:
        # Of a step nearly all is compute, so this share of it is lost, or a little less.
        factor = 1 / (1 - chance.uniform(0.09, 0.45))
        where = f"rank={chance.randrange(4)},factor={factor:.3f},steps={ONSET}-{NUM_STEPS - 1}"
        faults.append(f"slow-compute:{where}")
    noise = Noise()
    if kind in {"lengths", "all"}:
        noise = replace(noise, sequence_spread=chance.uniform(0.05, 0.2))
    if kind in {"tokens", "all"}:
        period = chance.choice((1, 4, 10))
        spread = chance.uniform(0.1, 0.4)
        noise = replace(noise, token_spread=spread, token_period_steps=period)
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
    # Equal seeds have equal noise, so the difference is the cost.
    without = replace(scenario, faults=parse_simulated_faults(faults[:-1]))
    if not is_faulty:
        without = replace(scenario, noise=replace(noise, sequence_spread=0.0))
    report, alarms, found_by = _follow(SimulatedSource(scenario))
    return Outcome(
        seed=seed,
        kind=kind,
        cost=1 - _step_s(without, report) / _step_s(scenario, report),
        alarms=alarms,
        found_by=found_by,
    )


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


def _follow(source: SimulatedSource) -> tuple[RunReport, tuple[str, ...], tuple[str, ...]]:
    """Analyse a run as it grows; return the last report, its alarms, and those after the onset."""
    tracker = FindingTracker(RUN)
    alarms: set[str] = set()
    found_by: set[str] = set()
    reports = []
    for last in (12, 20, ONSET - 1, ONSET + 2, NUM_STEPS - 1):
        report = analyze_run(source, RUN, last=last)
        reports.append(report)
        tracker.update(report, at_ns=last)
        for known in (report, _without_mfu(report)):
            for each in find_conditions(known, tracker.findings):
                cause = each.finding.cause if each.finding is not None else ""
                if each.is_active:  # what is over raises nothing
                    alarms.add(f"{each.rule} {cause}".strip())
                if last == ONSET + 2 and each.is_active and (each.steps or (0, 0))[1] >= ONSET:
                    found_by.add(each.rule)
    return reports[-1], tuple(sorted(alarms)), tuple(sorted(found_by))


def _without_mfu(report: RunReport) -> RunReport:
    flops = {} if report.mfu is None else report.mfu.flops_by_step
    tokens = {step: round(num) for step, num in flops.items()}
    return replace(report, mfu=None, mfu_shape=None, tokens_by_step=tokens)


def _step_s(scenario: Scenario, report: RunReport) -> float:
    """Return the mean step time after the onset, without planned pauses."""
    steps = SimulatedSource(scenario).steps(RUN, first=ONSET)
    seconds = (steps.end_ns - steps.start_ns) / 1e9
    planned = {*report.planned_steps}
    return fmean(
        seconds[steps.step == step].max()
        for step in sorted_unique(steps.step).tolist()
        if step not in planned
    )


if __name__ == "__main__":
    main()
