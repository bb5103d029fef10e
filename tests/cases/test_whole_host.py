"""Hosts that are slow as a whole, and what a fix of them saves: simulated, so the cost is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Noise, Scenario, TpDetail
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.analysis.report.report import RunReport

pytestmark = pytest.mark.slow

HOST = tuple(range(8, 16))
NOISY = Noise(compute_jitter_ratio=0.03, rank_bias_ratio=0.02)


def mean_step_s(source: SimulatedSource) -> float:
    """Return the mean step time of a simulated job."""
    steps = source.steps("simulated")
    whole_ns = steps.end_ns.max() - steps.start_ns[steps.step == 0].min()
    return float(whole_ns) / len(np.unique(steps.step)) / 1e9


def simulate(*faults: str, job: Mapping[str, Any]) -> tuple[RunReport, float]:
    """Return the report of a simulated job, and what its faults cost a step."""
    scenario = Scenario(num_steps=24, faults=parse_simulated_faults(faults), **job)
    source = SimulatedSource(scenario)
    healthy = SimulatedSource(replace(scenario, faults=()))
    return analyze_run(source, "simulated"), mean_step_s(source) - mean_step_s(healthy)


@pytest.mark.parametrize(
    ("factor", "job"),
    [
        (1.2, {"dp": 16, "pp": 1, "tp": 2}),
        *(
            pytest.param(1.2, job, marks=pytest.mark.nightly)
            for job in (
                {"dp": 32, "pp": 1},
                {"dp": 32, "pp": 1, "noise": NOISY},
                {"dp": 16, "pp": 2, "noise": NOISY},
            )
        ),
        (1.1, {"dp": 64, "pp": 1, "noise": NOISY}),
        (1.1, {"dp": 16, "pp": 2, "tp": 2}),
    ],
)
def test_ranks_of_one_host_that_are_slow_together_are_that_host(
    factor: float, job: dict[str, Any]
) -> None:
    report, cost_s = simulate(f"slow-compute:host=1,factor={factor},steps=4-23", job=job)

    (found,) = report.findings
    assert (found.cause, found.ranks, found.steps) == ("slow-compute", HOST, (4, 23))
    assert "host sim-00001" in found.evidence
    assert found.saved_s == pytest.approx(cost_s, rel=0.1)


def test_a_host_whose_clocks_are_low_is_throttled_as_a_whole() -> None:
    job = {"dp": 64, "pp": 1, "noise": NOISY}
    report, cost_s = simulate("clock-throttle:host=1,factor=1.1,steps=4-23", job=job)

    (found,) = report.findings
    assert (found.cause, found.ranks) == ("clock-throttle", HOST)
    assert found.saved_s == pytest.approx(cost_s, rel=0.1)


def test_one_slow_rank_of_a_host_is_that_rank() -> None:
    report, cost_s = simulate("slow-compute:rank=9,factor=1.5,steps=4-23", job={"dp": 32, "pp": 1})

    (found,) = report.findings
    assert found.ranks == (9,)
    assert found.saved_s == pytest.approx(cost_s, rel=0.1)


@pytest.mark.parametrize(
    "job",
    [
        {"dp": 2, "pp": 2, "tp": 8},
        {"dp": 8, "pp": 2, "tp": 2},
        pytest.param({"dp": 2, "pp": 4, "tp": 4}, marks=pytest.mark.nightly),
        pytest.param({"dp": 4, "pp": 4, "tp": 4}, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("steps", [(4, 23), (0, 23)])
def test_a_host_whose_links_to_others_are_slow_is_named_with_all_its_ranks(
    job: dict[str, int], steps: tuple[int, int]
) -> None:
    first, last = steps
    faults = [f"slow-link:rank={rank},factor=6,steps={first}-{last}" for rank in HOST]
    report, cost_s = simulate(*faults, job=job)

    (found,) = report.findings
    assert (found.cause, found.ranks, found.steps) == ("slow-link", HOST, steps)
    assert "the links of host sim-00001" in found.evidence
    assert found.saved_s == pytest.approx(cost_s, rel=0.1)


@pytest.mark.parametrize("detail", [TpDetail.COARSE, TpDetail.FULL])
def test_not_all_ranks_are_slower_than_their_peers(detail: TpDetail) -> None:
    # GIVEN a job of context-parallel ranks whose sequences are unequal and not declared
    fault = "sequence-imbalance:spread=0.4,steps=6-23"
    job = {"dp": 2, "pp": 1, "cp": 4, "tp_detail": detail, "record_lengths": False}
    report, _ = simulate(fault, job=job)

    assert {each.cause for each in report.findings} <= {
        "sequence-imbalance", "insufficient-evidence", "healthy"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ms", "job"), [(80, {"dp": 4, "pp": 1}), (80, {"dp": 8, "pp": 1}), (80, {"dp": 8, "pp": 4})]
)
def test_a_launch_skew_costs_what_its_members_are_late(ms: int, job: dict[str, int]) -> None:
    report, cost_s = simulate(f"launch-skew:ms={ms}", job=job)

    assert report.findings[0].cause == "launch-skew"
    assert report.findings[0].saved_s == pytest.approx(cost_s, rel=0.1)


@pytest.mark.parametrize(
    ("fault", "job"),
    [
        ("stage-imbalance:stage=1,factor=1.4", {"dp": 2, "pp": 2}),
        ("stage-imbalance:stage=0,factor=1.4", {"dp": 2, "pp": 2}),
        ("slow-compute:rank=1,factor=1.5", {"dp": 2, "pp": 2}),
        ("slow-compute:rank=1,factor=1.5", {"dp": 4, "pp": 1}),
        ("checkpoint:every=7,ms=500", {"dp": 4, "pp": 1}),
    ],
)
def test_the_bar_has_the_whole_price_of_a_finding(fault: str, job: dict[str, int]) -> None:
    report, cost_s = simulate(fault, job=job)

    cause = fault.partition(":")[0]
    parts = {part.name: part.seconds for part in report.step_parts}
    (found,) = (each for each in report.findings if each.cause == cause)
    assert found.saved_s == pytest.approx(cost_s, rel=0.1)
    assert parts[cause] == pytest.approx(found.saved_s)


@pytest.mark.parametrize(
    "fault", ["host-stall:host=1,ms=5,steps=0-23", "data-stall:host=1,ms=100,steps=4-23"]
)
@pytest.mark.parametrize("job", [{"dp": 32, "pp": 1}, {"dp": 16, "pp": 2}, {"dp": 8, "pp": 4}])
def test_a_host_that_is_late_is_one_finding_with_one_price(fault: str, job: dict[str, int]) -> None:
    report, cost_s = simulate(fault, job=job)

    (found,) = report.findings
    assert (found.cause, found.ranks) == (fault.partition(":")[0], HOST)
    assert found.saved_s == pytest.approx(cost_s, rel=0.1)
