"""Mixes of parallelisms: no finding in healthy runs, and an exact finding for each fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run, read_operations
from rankscope.analysis.breakdown.waterfall import build_waterfall
from rankscope.analysis.replay.critical_path import critical_path, operation_slack
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Noise, Scenario, TpDetail
from rankscope.trainer.simulator.schedule import Schedule
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding, RunReport

RUN = "simulated"
NUM_STEPS, ONSET = 8, 3
UNEQUAL = Noise(expert_spread=0.2)
"""Tokens that move between experts: a rank's experts compute 20 % more or less each time."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "16: dp4 pp4 zero-bubble": {
        "dp": 4, "pp": 4, "num_microbatches": 8, "schedule": Schedule.ZERO_BUBBLE,
    },
    "32: dp8 pp4 zero-bubble-v": {
        "dp": 8, "pp": 4, "vpp": 2, "num_microbatches": 8, "schedule": Schedule.ZERO_BUBBLE_V,
    },
    "32: dp4 tp2 pp4 interleaved zero-bubble": {
        "dp": 4, "pp": 4, "tp": 2, "vpp": 2, "num_microbatches": 4, "overlap": True,
        "schedule": Schedule.ZERO_BUBBLE, "tp_detail": TpDetail.COARSE,
    },
    "32: dp8 ep4 pp4": {"dp": 8, "ep": 4, "pp": 4, "num_microbatches": 8, "noise": UNEQUAL},
    "64: dp4 cp2 tp2 pp4 interleaved, sequence-parallel, FSDP": {
        "dp": 4, "cp": 2, "tp": 2, "pp": 4, "vpp": 2, "num_microbatches": 4, "num_layers": 8,
        "prefetch": True, "overlap": True, "tp_detail": TpDetail.SEQUENCE,
    },
    "64: dp4 ep4 cp2 tp2 pp4 zero-bubble": {
        "dp": 4, "ep": 4, "cp": 2, "tp": 2, "pp": 4, "num_microbatches": 4, "overlap": True,
        "schedule": Schedule.ZERO_BUBBLE, "tp_detail": TpDetail.COARSE, "noise": UNEQUAL,
    },
    "256: dp16 ep8 tp4 pp4": {
        "dp": 16, "ep": 8, "tp": 4, "pp": 4, "num_microbatches": 4, "noise": UNEQUAL,
        "tp_detail": TpDetail.COARSE,
    },
}  # fmt: skip
FAULTS = {
    "slow-compute": "rank={rank},factor=1.3,steps={onset}-{last}",
    "slow-link": "rank={rank},factor=6,steps={onset}-{last}",
    "stage-imbalance": "stage=3,factor=1.3",
    "data-stall": "rank={rank},ms=150,steps={onset}-{last}",
}
NO_ALARM = {"healthy", "layout"}

QUICK = {
    "16: dp4 pp4 zero-bubble",
    "32: dp8 ep4 pp4",
    "64: dp4 cp2 tp2 pp4 interleaved, sequence-parallel, FSDP",
}
EACH_LAYOUT = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout in QUICK else pytest.mark.nightly)
        for layout in LAYOUTS
    ],
)


def scenario_of(layout: str, *faults: str) -> Scenario:
    settings = LAYOUTS[layout]
    plain = Scenario(
        **settings, num_steps=NUM_STEPS, seed=5, ranks_per_host=2 * settings.get("tp", 1)
    )
    specs = [
        f"{fault}:{FAULTS[fault]}".format(
            rank=plain.world_size // 2 + 1, onset=ONSET, last=NUM_STEPS - 1
        )
        for fault in faults
    ]
    return replace(plain, faults=parse_simulated_faults(specs))


def alarms(report: RunReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.cause not in NO_ALARM]


@pytest.mark.slow
@EACH_LAYOUT
def test_healthy_run_is_replayed_exactly_and_has_no_alarm(layout: str) -> None:
    report = analyze_run(SimulatedSource(scenario_of(layout)), RUN)

    assert alarms(report) == []
    assert report.replay_error_ratio is not None
    assert report.replay_error_ratio < 1e-6
    assert report.quality.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@EACH_LAYOUT
def test_fault_is_the_only_alarm_with_its_ranks_and_steps(layout: str, fault: str) -> None:
    source = SimulatedSource(scenario_of(layout, fault))

    report = analyze_run(source, RUN)

    (label,) = (each for each in source.labels if each.cause == fault)
    found = [(each.cause, each.ranks, each.steps) for each in alarms(report)]
    assert found == [(label.cause, label.visible_ranks, label.steps)]


@pytest.mark.slow
@EACH_LAYOUT
def test_parts_of_the_waterfall_sum_to_each_step_exactly(layout: str) -> None:
    source = SimulatedSource(scenario_of(layout, "slow-compute"))
    run, spans, steps = source.run_info(RUN), source.spans(RUN, last=1), source.steps(RUN, last=1)

    waterfall = build_waterfall(run, read_operations(run, spans, steps), steps)

    assert (waterfall.time_ns.sum(axis=2) == waterfall.total_ns).all()
    assert (waterfall.time_ns >= 0).all()
    assert waterfall.total_ns.sum() == (steps.end_ns - steps.start_ns).sum()


@EACH_LAYOUT
def test_critical_path_covers_the_step_and_has_no_slack(layout: str) -> None:
    source = SimulatedSource(scenario_of(layout))
    run, spans, steps = source.run_info(RUN), source.spans(RUN, last=0), source.steps(RUN, last=0)
    model = read_operations(run, spans, steps).model

    path, slack = critical_path(model), operation_slack(model)

    assert path.start_ns[0] == 0
    np.testing.assert_allclose(path.start_ns[1:], path.end_ns[:-1], atol=1)
    assert path.end_ns[-1] == path.step_ns[0]
    by_row = dict(zip(slack.rows.tolist(), slack.slack_ns.tolist(), strict=True))
    assert max(abs(by_row[row]) for row in path.operation.tolist()) < 1
    assert slack.slack_ns.min() > -1


@pytest.mark.parametrize(
    ("layout", "formula_ratio"),
    [
        # (p - 1) / (v m) x (F + B - W) / (F + B + W) = 3 / 8 x 1 / 3 and 3 / 16 x 1 / 3.
        ("16: dp4 pp4 zero-bubble", 1 / 8),
        ("32: dp8 pp4 zero-bubble-v", 1 / 16),
    ],
)
def test_measured_bubble_is_near_the_formula_of_the_schedule(
    layout: str, formula_ratio: float
) -> None:
    report = analyze_run(SimulatedSource(scenario_of(layout)), RUN)

    assert report.waterfall is not None
    assert report.waterfall.bubble is not None
    assert report.waterfall.bubble.formula_ratio == pytest.approx(formula_ratio, rel=0.01)
    assert report.waterfall.bubble.measured_ratio == pytest.approx(formula_ratio, rel=0.15)


def test_expert_that_always_gets_twice_the_tokens_is_not_a_slow_rank() -> None:
    hot = replace(scenario_of("32: dp8 ep4 pp4"), expert_weights=(2.0, 1.0, 1.0, 1.0))

    (found,) = alarms(analyze_run(SimulatedSource(hot), RUN))

    # Four ranks share the experts; the first of each four has the busy one.
    assert (found.cause, found.ranks) == ("sequence-imbalance", tuple(range(0, 32, 4)))
