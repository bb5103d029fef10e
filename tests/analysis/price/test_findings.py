"""What a finding cost, against the same cluster simulated without the fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.sources.simulated_source import SimulatedSource
from rankscope.trainer.simulator.fault import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario, TpDetail

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding

CLUSTER = Scenario(dp=4, pp=4, tp=2, num_steps=8, num_microbatches=8, ranks_per_host=4, seed=3)


def findings_of(scenario: Scenario) -> tuple[Finding, ...]:
    return analyze_run(SimulatedSource(scenario), "simulated").findings


def true_slowdown(scenario: Scenario) -> float:
    return _mean_step(scenario) / _mean_step(replace(scenario, faults=()))


def _mean_step(scenario: Scenario) -> float:
    steps = SimulatedSource(scenario).steps("simulated")
    last = int(steps.step.max())
    whole = steps.end_ns[steps.step == last].max() - steps.start_ns[steps.step == 0].min()
    return float(whole) / (last + 1)


@pytest.mark.parametrize("detail", [TpDetail.COLLAPSED, TpDetail.COARSE])
@pytest.mark.parametrize(
    "spec",
    [
        "slow-compute:rank=9,factor=1.8",
        "stage-imbalance:stage=1,factor=1.5",
        "host-stall:rank=5,ms=15",
        "data-stall:rank=2,ms=120,spans=yes",
        "data-stall:rank=2,ms=120,spans=no",
        "slow-link:rank=0,factor=3",
    ],
)
def test_the_slowdown_is_that_of_the_run_over_the_run_without_the_fault(
    spec: str, detail: TpDetail
) -> None:
    # GIVEN one fault
    planted = replace(CLUSTER, tp_detail=detail, faults=parse_simulated_faults([spec]))

    # WHEN it is found
    (finding,) = findings_of(planted)

    # THEN it costs what the simulator says, and mending it wins nearly all there is to win
    assert finding.cause == spec.split(":", maxsplit=1)[0]
    assert finding.slowdown == pytest.approx(true_slowdown(planted), rel=0.05)
    assert finding.recoverable_ratio is not None
    assert 0.5 < finding.recoverable_ratio <= 1.0


def test_of_two_equally_slow_ranks_each_has_its_full_slowdown_and_little_to_recover() -> None:
    both = parse_simulated_faults(
        ["slow-compute:rank=8,factor=1.6", "slow-compute:rank=10,factor=1.6"]
    )
    planted = replace(CLUSTER, tp=1, faults=both)
    alone = true_slowdown(replace(planted, faults=both[:1]))

    found = findings_of(planted)

    assert [finding.cause for finding in found] == ["slow-compute", "slow-compute"]
    for finding in found:
        assert finding.slowdown == pytest.approx(alone, rel=0.05)
        assert finding.recoverable_ratio is not None
        assert finding.recoverable_ratio < 0.3
