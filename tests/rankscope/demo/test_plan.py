from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.demo.plan import is_found, outcome_line, plan_demo
from rankscope.tracer.topology import Layout
from rankscope.trainer.errors import ConfigError
from tests.support.dashboard.builders import report

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

LAYOUT = Layout(pp=2, dp=2, tp=2)


def with_findings(*causes: tuple[str, tuple[int, ...]]) -> RunReport:
    template = report().findings[0]
    findings = tuple(replace(template, cause=cause, ranks=ranks) for cause, ranks in causes)
    return replace(report(), findings=findings)


def test_the_default_fault_is_a_slow_rank_5_after_a_third_of_the_steps() -> None:
    assert plan_demo(layout=LAYOUT, num_steps=30, fault=None).spec == (
        "slow-compute:rank=5,factor=1.8,steps=10-29"
    )


def test_with_fewer_ranks_the_last_rank_is_slow() -> None:
    plan = plan_demo(layout=Layout(dp=2, tp=2), num_steps=12, fault=None)

    assert plan.spec == "slow-compute:rank=3,factor=1.8,steps=4-11"


@pytest.mark.parametrize(("pp", "num_layers"), [(1, 2), (2, 2), (3, 3), (4, 4), (8, 8)])
def test_all_stages_have_the_same_number_of_layers(pp: int, num_layers: int) -> None:
    plan = plan_demo(layout=Layout(pp=pp), num_steps=3, fault="none")

    assert plan.num_layers == num_layers


@pytest.mark.parametrize("fault", ["crash:rank=5,step=4", "hang:rank=5,step=4"])
def test_a_fault_that_ends_the_training_is_refused(fault: str) -> None:
    # tests/integration/test_bad_input.py has other faults that are.
    with pytest.raises(ConfigError, match="ends the training"):
        plan_demo(layout=LAYOUT, num_steps=30, fault=fault)


@pytest.mark.parametrize(
    ("findings", "found"),
    [
        ([("slow-compute", (5,))], True),
        ([("slow-compute", (5,)), ("stage-imbalance", (4, 5, 6, 7))], True),
        ([("slow-compute", (4, 5))], False),  # names another rank too
        ([("slow-compute", (5,)), ("slow-compute", (4,))], True),  # another rank was slow as well
        ([("slow-compute", (4,)), ("slow-compute", (5,))], False),
        ([("slow-compute", (4,))], False),
        ([("stage-imbalance", (4, 5, 6, 7)), ("slow-compute", (5,))], False),  # not first
        ([("healthy", ())], False),
        ([("insufficient-evidence", ())], False),
    ],
)
def test_the_fault_is_found_if_its_rank_comes_before_any_other(
    findings: list[tuple[str, tuple[int, ...]]],
    found: bool,  # noqa: FBT001  # the expectation
) -> None:
    plan = plan_demo(layout=LAYOUT, num_steps=30, fault="slow-compute:rank=5,factor=1.8")

    assert is_found(with_findings(*findings), plan) is found


def test_two_faulty_ranks_may_be_named_by_one_finding_or_by_two() -> None:
    plan = plan_demo(layout=LAYOUT, num_steps=30, fault="slow-compute:rank=1+6,factor=1.8")

    assert is_found(with_findings(("slow-compute", (1, 6))), plan)
    assert is_found(with_findings(("slow-compute", (6,)), ("slow-compute", (1,))), plan)
    assert not is_found(with_findings(("slow-compute", (6,))), plan)


def test_a_slow_stage_is_found_if_all_its_ranks_are_named() -> None:
    plan = plan_demo(layout=LAYOUT, num_steps=30, fault="stage-imbalance:stage=1,factor=1.5")

    assert is_found(with_findings(("stage-imbalance", (4, 5, 6, 7))), plan)
    assert not is_found(with_findings(("slow-compute", (4, 5, 6, 7))), plan)


def test_without_a_fault_only_healthy_is_right() -> None:
    plan = plan_demo(layout=LAYOUT, num_steps=30, fault="none")

    assert is_found(with_findings(("healthy", ())), plan)
    assert not is_found(with_findings(("insufficient-evidence", ())), plan)
    assert not is_found(with_findings(("slow-compute", (5,))), plan)
    assert outcome_line(with_findings(("healthy", ())), plan) == "fault: none   found: yes"


@pytest.mark.parametrize(
    ("fault", "findings", "found"),
    [
        ("gc-pause", [("gc-pause", (1, 6))], True),
        ("gc-pause", [("host-stall", (1,)), ("gc-pause", (1, 6))], False),
        ("launch-skew:ms=500,stage=1,tp=1", [("launch-skew", (5, 7))], True),
        ("launch-skew:ms=500,stage=1,tp=1", [("launch-skew", (1, 3))], False),
        ("checkpoint:every=4,ms=800", [("healthy", ()), ("checkpoint", (0, 1))], True),
        ("checkpoint:every=4,ms=800", [("data-stall", (0, 1)), ("checkpoint", (0, 1))], False),
        ("clock-throttle:rank=5,factor=1.5", [("slow-compute", (5,))], True),
        ("clock-throttle:rank=5,factor=1.5", [("clock-throttle", (5,))], True),
        ("slow-compute:rank=5,factor=1.5", [("clock-throttle", (5,))], False),
        ("slow-link:src=5,dst=4,factor=40", [("slow-link", (4, 5))], True),
    ],
)
def test_other_faults_are_found_if_they_come_first(
    fault: str, findings: list[tuple[str, tuple[int, ...]]], *, found: bool
) -> None:
    plan = plan_demo(layout=LAYOUT, num_steps=30, fault=fault)

    assert is_found(with_findings(*findings), plan) is found
