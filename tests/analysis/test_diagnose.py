"""Every cause as a fault of a simulated cluster. The simulator shares no code with the analysis."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.report import Severity
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Noise, RankOrder, Scenario, TpDetail
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.report.report import Finding

BASE = Scenario(dp=4, pp=4, tp=2, num_steps=14, num_microbatches=8, seed=11)
STAGE_1 = (8, 9, 10, 11, 12, 13, 14, 15)


def diagnosis(*faults: str, scenario: Scenario = BASE) -> tuple[Finding, ...]:
    faulty = replace(scenario, faults=parse_simulated_faults(faults))
    return analyze_run(SimulatedSource(faulty), "simulated").findings


def summary(
    findings: tuple[Finding, ...],
) -> list[tuple[str, tuple[int, ...], tuple[int, int] | None]]:
    return [(finding.cause, finding.ranks, finding.steps) for finding in findings]


SLOW = pytest.mark.slow
COARSE: dict[str, Any] = {"tp_detail": TpDetail.COARSE}
ONE_GROUP: dict[str, Any] = {"dp": 32, "pp": 1, "tp": 1, "record_samples": False}
HALF_OF_A_STAGE = [f"slow-compute:rank={rank},factor=1.2,steps=4-7" for rank in (8, 9, 11, 14)]
TWICE = [f"clock-throttle:rank=5,factor=1.3,steps={step}-{step}" for step in (2, 9)]

ONE_FINDING = {
    "untraced partners are one worker": (
        ["slow-compute:rank=5,factor=1.2,steps=4-9"], {}, "slow-compute", (4, 5), (4, 9),
        "one worker",
    ),
    "one slow step of untraced partners": (
        ["slow-compute:rank=5,factor=1.3,steps=6-6"], {}, "slow-compute", (4, 5), (6, 6), "",
    ),
    "a device that is throttled at times": (
        TWICE, COARSE, "clock-throttle", (5,), (2, 9), "in 2 of the 8 steps 2 to 9",
    ),
    "a lower clock singles out the slow partner": (
        ["clock-throttle:rank=9,factor=1.3,steps=8-13"], {}, "clock-throttle", (9,), (8, 13),
        "GPU clock",
    ),
    "a stage that is slow for a while on one host has slow ranks": (
        ["slow-compute:host=1,factor=1.2,steps=4-9"], {}, "slow-compute", STAGE_1, (4, 9), "",
    ),
    "half of a stage that became slow": (
        HALF_OF_A_STAGE, {"dp": 8, "pp": 2, "tp": 1, "num_steps": 10}, "slow-compute",
        (8, 9, 11, 14), (4, 7), "",
    ),
    "a stage that is always longer has more work": (
        ["stage-imbalance:stage=1,factor=1.3"], {}, "stage-imbalance", STAGE_1, (0, 13), "",
    ),
    "a rank all of whose links are slow": (
        ["slow-link:rank=9,factor=3,steps=5-13"], {}, "slow-link", (9,), (5, 13), "",
    ),
    "a host that launches late is no slow device": (
        ["host-stall:rank=7,ms=5"], {}, "host-stall", (7,), (0, 13), "",
    ),
    "all ranks of a stalling host are one finding": (
        ["host-stall:host=1,ms=5"], {}, "host-stall", STAGE_1, (0, 13), "",
    ),
    "missing input in spans": (
        ["data-stall:rank=3,ms=80,steps=5-9,spans=yes"], {}, "data-stall", (3,), (5, 9), "",
    ),
    "missing input without spans": (
        ["data-stall:rank=3,ms=80,steps=5-9,spans=no"], {}, "data-stall", (3,), (5, 9), "",
    ),
    "traced partners: the slow one alone": (
        ["slow-compute:rank=5,factor=1.2,steps=4-9"], COARSE, "slow-compute", (5,), (4, 9), "",
    ),
    "an overlapped schedule": (
        ["slow-compute:rank=21,factor=1.2"], {**COARSE, "overlap": True}, "slow-compute", (21,),
        (0, 13), "",
    ),
    "an interleaved schedule": (
        ["slow-compute:rank=21,factor=1.2"], {**COARSE, "overlap": True, "vpp": 2},
        "slow-compute", (21,), (0, 13), "",
    ),
}  # fmt: skip
"""Faults, changes of `BASE`, and cause, ranks, steps and a part of the evidence of the finding."""

SLOW_CASES = frozenset([*ONE_FINDING][-3:])


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[SLOW] if case in SLOW_CASES else []) for case in ONE_FINDING],
)
def test_a_fault_is_one_finding_with_its_ranks_and_steps(case: str) -> None:
    faults, changes, cause, ranks, steps, text = ONE_FINDING[case]

    findings = diagnosis(*faults, scenario=replace(BASE, **changes))

    assert summary(findings) == [(cause, ranks, steps)]
    assert text in findings[0].evidence


@pytest.mark.parametrize(
    ("fault", "changes", "causes"),
    [
        # A job with one group has no baseline if it is slow from the first step on.
        ("network-degradation:factor=2", ONE_GROUP, ["healthy"]),
        # One slow step of the network needs counters.
        ("network-degradation:factor=3,steps=8-8", {"record_samples": False}, ["healthy"]),
        ("checkpoint:every=4,ms=300,spans=yes", {}, ["healthy", "checkpoint"]),
        ("checkpoint:every=4,ms=300,spans=no", {}, ["healthy", "common-pause"]),
        pytest.param("gc-pause:ms=200,probability=0.01,spans=yes", {}, ["gc-pause"], marks=SLOW),
        pytest.param("gc-pause:ms=200,probability=0.01,spans=no", {}, ["gc-pause"], marks=SLOW),
        pytest.param("sequence-imbalance:spread=0.4", {}, ["sequence-imbalance"], marks=SLOW),
        # Unequal sequences are reported only if they cost much.
        pytest.param("sequence-imbalance:spread=0.03", {}, ["healthy"], marks=SLOW),
    ],
)
def test_a_fault_of_the_whole_job_has_its_cause(
    fault: str, changes: dict[str, Any], causes: list[str]
) -> None:
    findings = diagnosis(fault, scenario=replace(BASE, **changes))

    assert [finding.cause for finding in findings] == causes


def test_transfers_that_nothing_can_be_compared_with_are_not_called_healthy() -> None:
    # GIVEN a job with one group between hosts, whose slow link takes most of every step
    scenario = replace(BASE, dp=8, pp=1, tp=1, ranks_per_host=1)

    (found,) = diagnosis("slow-link:rank=3,factor=12", scenario=scenario)
    (usual,) = diagnosis(scenario=scenario)

    assert (found.cause, usual.cause) == ("insufficient-evidence", "healthy")
    assert "no alike link shows whether they are slower" in found.evidence


def test_a_slow_link_is_not_blamed_on_the_ranks_at_its_ends() -> None:
    healthy, link = diagnosis("slow-link:src=8,dst=16,factor=3")

    # One pair of 64 costs too little for an alarm.
    assert (healthy.cause, link.severity) == ("healthy", Severity.MINOR)
    assert summary((link,)) == [("slow-link", (8, 16), (0, 13))]


@pytest.mark.parametrize(
    ("reason", "word"),
    [("congestion", "congestion"), ("retransmit", "retransmit"), ("flap", "link-flap")],
)
def test_a_degraded_network_is_reported_with_the_counters_that_rose(reason: str, word: str) -> None:
    (finding,) = diagnosis(f"network-degradation:factor=2,reason={reason},steps=8-13")

    assert finding.cause == "network-degradation"
    assert word in finding.evidence


def test_one_slow_step_of_the_network_is_found_if_counters_confirm_it() -> None:
    *_, finding = diagnosis("network-degradation:factor=3,reason=flap,steps=8-8")

    assert (finding.cause, finding.steps) == ("network-degradation", (8, 8))
    assert "link-flap counters rose" in finding.evidence


def test_a_slow_network_of_a_job_with_one_group_is_found_from_its_onset_on() -> None:
    alone = replace(BASE, **ONE_GROUP)

    (finding,) = diagnosis("network-degradation:factor=2,steps=3-13", scenario=alone)

    assert (finding.cause, finding.steps) == ("network-degradation", (3, 13))


def test_a_job_that_always_waits_for_its_input_is_named_whole() -> None:
    (finding,) = diagnosis("data-stall:ms=80,spans=yes")

    assert (finding.cause, len(finding.ranks)) == ("data-stall", 32)
    assert finding.recoverable_ratio == pytest.approx(1.0, abs=0.1)


def test_members_that_enter_late_in_turn_are_a_launch_skew() -> None:
    (finding,) = diagnosis("launch-skew:ms=90,stage=1")

    assert (finding.cause, finding.ranks) == ("launch-skew", (8, 10, 12, 14))
    assert finding.steps is not None
    assert finding.steps[0] <= 3


def test_unequal_sequences_are_found_without_declared_lengths() -> None:
    (finding,) = diagnosis(
        "sequence-imbalance:spread=0.4", scenario=replace(BASE, record_lengths=False)
    )

    assert finding.cause == "sequence-imbalance"
    assert "in forward and backward together" in finding.evidence


@pytest.mark.slow
def test_a_crash_a_hang_and_a_wrong_setting_need_no_replay() -> None:
    crash = diagnosis("crash:rank=3,step=9,kind=cuda-oom")
    hang = diagnosis("hang:rank=3,step=9", scenario=replace(BASE, tp_detail=TpDetail.COARSE))
    setting = diagnosis("misconfiguration:rank=3")

    found = [(finding.cause, finding.ranks) for finding in (*crash, *hang, *setting)]
    assert found == [("crash", (3,)), ("hang", (3,)), ("misconfiguration", (3,))]


def test_a_layout_that_cannot_fill_its_pipeline_is_reported_with_its_gain() -> None:
    healthy, finding = diagnosis(scenario=replace(BASE, num_microbatches=3))

    assert healthy.cause == "healthy"
    # 3 micro-batches on 4 stages: the bubble is 3/3. With 6 it would be 3/6: 1 - 1.5/2 less time.
    assert finding.cause == "layout"
    assert "100 %" in finding.evidence
    assert "25 % less" in finding.evidence


def test_tensor_parallel_groups_across_hosts_are_reported() -> None:
    spread = replace(BASE, dp=8, pp=2, rank_order=RankOrder.DP_FIRST)

    healthy, finding = diagnosis(scenario=spread)

    assert healthy.cause == "healthy"
    assert finding.cause == "layout"
    assert "span several hosts" in finding.evidence


@pytest.mark.slow
def test_three_faults_at_once_are_all_named() -> None:
    findings = diagnosis(
        "slow-compute:rank=4,factor=1.3", "slow-link:rank=26,factor=3", "data-stall:rank=20,ms=60",
        scenario=replace(BASE, dp=8),
    )  # fmt: skip

    named = {finding.cause: finding.ranks for finding in findings}
    assert named.keys() == {"slow-compute", "slow-link", "data-stall"}
    assert named["slow-compute"] == (4, 5)
    assert 26 in named["slow-link"]
    assert named["data-stall"] == (20,)


@pytest.mark.parametrize("seed", range(4))
def test_variable_lengths_drift_and_a_noisy_network_raise_no_alarm(seed: int) -> None:
    noise = Noise(
        sequence_spread=0.05,
        drift_ratio=0.02,
        drift_period_steps=20,
        transfer_jitter_ratio=0.2,
        rank_bias_ratio=0.01,
        compute_jitter_ratio=0.02,
    )

    findings = diagnosis(scenario=replace(BASE, noise=noise, seed=seed))

    assert [finding.cause for finding in findings] == ["healthy"]


def test_a_job_that_straggles_in_one_step_is_not_called_healthy() -> None:
    # GIVEN one step with a slow link, and too few alike ones to compare with
    faults = parse_simulated_faults(["slow-link:src=0,dst=3,factor=200"])
    scenario = Scenario(dp=3, pp=2, tp=1, num_steps=1, faults=faults)

    report = analyze_run(SimulatedSource(scenario), "simulated")

    assert report.slowdown is not None
    assert report.slowdown > 1.1
    assert [finding.cause for finding in report.findings] == ["insufficient-evidence"]
    assert "a slow link or host needs 3 steps" in report.findings[0].evidence


def test_both_directions_of_a_slow_link_are_no_noise_to_each_other() -> None:
    scenario = Scenario(dp=8, pp=2, tp=1, num_steps=1)

    findings = diagnosis("slow-link:src=0,dst=8,factor=20", scenario=scenario)

    assert summary(findings) == [("slow-link", (0, 8), (0, 0))]
