"""Every cause as a fault of a simulated cluster. The simulator shares no code with the analysis."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.report import Severity
from rankscope.trainer.simulator.fault import parse_simulated_faults
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


def test_with_tensor_parallelism_untraced_both_partners_are_named_as_one_worker() -> None:
    findings = diagnosis("slow-compute:rank=5,factor=1.2,steps=4-9")

    assert summary(findings) == [("slow-compute", (4, 5), (4, 9))]
    assert "one worker" in findings[0].evidence


@pytest.mark.slow
def test_with_tensor_parallelism_traced_the_slow_partner_alone_is_named() -> None:
    traced = replace(BASE, tp_detail=TpDetail.COARSE)

    findings = diagnosis("slow-compute:rank=5,factor=1.2,steps=4-9", scenario=traced)

    assert summary(findings) == [("slow-compute", (5,), (4, 9))]


def test_an_intermittently_throttled_device_is_found_by_its_clock_in_these_steps() -> None:
    traced = replace(BASE, tp_detail=TpDetail.COARSE)
    faults = (f"clock-throttle:rank=5,factor=1.3,steps={step}-{step}" for step in (2, 9))

    findings = diagnosis(*faults, scenario=traced)

    assert summary(findings) == [("clock-throttle", (5,), (2, 9))]
    assert "in 2 of the 8 steps 2 to 9" in findings[0].evidence


def test_one_slow_step_of_a_worker_with_untraced_partners_is_found() -> None:
    # GIVEN tensor parallelism that is not traced: both ranks of the worker are longer
    findings = diagnosis("slow-compute:rank=5,factor=1.3,steps=6-6")

    assert summary(findings) == [("slow-compute", (4, 5), (6, 6))]


@pytest.mark.slow
@pytest.mark.parametrize("vpp", [1, 2])
def test_interleaved_and_overlapped_schedules_hide_no_slow_rank(vpp: int) -> None:
    scenario = replace(BASE, vpp=vpp, overlap=True, tp_detail=TpDetail.COARSE)

    findings = diagnosis("slow-compute:rank=21,factor=1.2", scenario=scenario)

    assert summary(findings) == [("slow-compute", (21,), (0, 13))]


def test_a_throttled_clock_singles_out_the_slow_partner() -> None:
    findings = diagnosis("clock-throttle:rank=9,factor=1.3,steps=8-13")

    assert summary(findings) == [("clock-throttle", (9,), (8, 13))]
    assert "GPU clock" in findings[0].evidence


def test_a_stage_that_is_slow_for_a_while_on_one_host_has_slow_ranks() -> None:
    findings = diagnosis("slow-compute:host=1,factor=1.2,steps=4-9")

    assert summary(findings) == [("slow-compute", STAGE_1, (4, 9))]


def test_half_of_a_stage_that_became_slow_is_named_without_the_other_half() -> None:
    scenario = replace(BASE, dp=8, pp=2, tp=1, num_steps=10)
    faults = [f"slow-compute:rank={rank},factor=1.2,steps=4-7" for rank in (8, 9, 11, 14)]

    findings = diagnosis(*faults, scenario=scenario)

    assert summary(findings) == [("slow-compute", (8, 9, 11, 14), (4, 7))]


def test_transfers_that_nothing_can_be_compared_with_are_not_called_healthy() -> None:
    # GIVEN a job with one group between hosts, whose slow link takes most of every step
    scenario = replace(BASE, dp=8, pp=1, tp=1, ranks_per_host=1)

    (found,) = diagnosis("slow-link:rank=3,factor=12", scenario=scenario)
    (usual,) = diagnosis(scenario=scenario)

    assert (found.cause, usual.cause) == ("insufficient-evidence", "healthy")
    assert "no alike link shows whether they are slower" in found.evidence


def test_a_stage_that_is_always_longer_has_more_work() -> None:
    findings = diagnosis("stage-imbalance:stage=1,factor=1.3")

    assert summary(findings) == [("stage-imbalance", STAGE_1, (0, 13))]


def test_a_slow_link_is_not_blamed_on_the_ranks_at_its_ends() -> None:
    healthy, link = diagnosis("slow-link:src=8,dst=16,factor=3")

    # One pair of 64 costs too little for an alarm.
    assert (healthy.cause, link.severity) == ("healthy", Severity.MINOR)
    assert summary((link,)) == [("slow-link", (8, 16), (0, 13))]


def test_a_rank_all_of_whose_links_are_slow_is_named_alone() -> None:
    findings = diagnosis("slow-link:rank=9,factor=3,steps=5-13")

    assert summary(findings) == [("slow-link", (9,), (5, 13))]


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
    alone = replace(BASE, dp=32, pp=1, tp=1, record_samples=False)

    (finding,) = diagnosis("network-degradation:factor=2,steps=3-13", scenario=alone)

    assert (finding.cause, finding.steps) == ("network-degradation", (3, 13))


def test_a_job_with_one_group_has_no_baseline_if_it_is_slow_from_the_first_step_on() -> None:
    alone = replace(BASE, dp=32, pp=1, tp=1, record_samples=False)

    findings = diagnosis("network-degradation:factor=2", scenario=alone)

    assert [finding.cause for finding in findings] == ["healthy"]


def test_one_slow_step_of_the_network_without_counters_is_not_reported() -> None:
    without_counters = replace(BASE, record_samples=False)

    findings = diagnosis(
        "network-degradation:factor=3,reason=flap,steps=8-8", scenario=without_counters
    )

    assert [finding.cause for finding in findings] == ["healthy"]


@pytest.mark.slow
@pytest.mark.parametrize("spans", ["yes", "no"])
def test_pauses_that_ranks_take_in_turn_are_garbage_collection(spans: str) -> None:
    findings = diagnosis(f"gc-pause:ms=200,probability=0.01,spans={spans}")

    assert [finding.cause for finding in findings] == ["gc-pause"]


def test_a_host_that_launches_late_is_no_slow_device() -> None:
    findings = diagnosis("host-stall:rank=7,ms=5")

    assert summary(findings) == [("host-stall", (7,), (0, 13))]


def test_all_ranks_of_a_stalling_host_are_one_finding() -> None:
    findings = diagnosis("host-stall:host=1,ms=5")

    assert summary(findings) == [("host-stall", STAGE_1, (0, 13))]


@pytest.mark.parametrize("spans", ["yes", "no"])
def test_a_rank_that_waits_for_its_input_is_named(spans: str) -> None:
    findings = diagnosis(f"data-stall:rank=3,ms=80,steps=5-9,spans={spans}")

    assert summary(findings) == [("data-stall", (3,), (5, 9))]


def test_a_job_that_always_waits_for_its_input_is_named_whole() -> None:
    (finding,) = diagnosis("data-stall:ms=80,spans=yes")

    assert (finding.cause, len(finding.ranks)) == ("data-stall", 32)
    assert finding.recoverable_ratio == pytest.approx(1.0, abs=0.1)


def test_members_that_enter_late_in_turn_are_a_launch_skew() -> None:
    (finding,) = diagnosis("launch-skew:ms=90,stage=1")

    assert (finding.cause, finding.ranks) == ("launch-skew", (8, 10, 12, 14))
    assert finding.steps is not None
    assert finding.steps[0] <= 3


@pytest.mark.parametrize(("spans", "cause"), [("yes", "checkpoint"), ("no", "common-pause")])
def test_pauses_of_all_ranks_raise_no_alarm(spans: str, cause: str) -> None:
    findings = diagnosis(f"checkpoint:every=4,ms=300,spans={spans}")

    assert [finding.cause for finding in findings] == ["healthy", cause]


@pytest.mark.slow
def test_unequal_sequences_are_reported_only_if_they_cost_much() -> None:
    assert [f.cause for f in diagnosis("sequence-imbalance:spread=0.4")] == ["sequence-imbalance"]
    assert [f.cause for f in diagnosis("sequence-imbalance:spread=0.03")] == ["healthy"]


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

    assert [(finding.cause, finding.ranks) for finding in crash] == [("crash", (3,))]
    assert [(finding.cause, finding.ranks) for finding in hang] == [("hang", (3,))]
    assert [(finding.cause, finding.ranks) for finding in setting] == [("misconfiguration", (3,))]


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
    scenario = Scenario(
        dp=3,
        pp=2,
        tp=1,
        num_steps=1,
        faults=parse_simulated_faults(["slow-link:src=0,dst=3,factor=200"]),
    )

    report = analyze_run(SimulatedSource(scenario), "simulated")

    assert report.slowdown is not None
    assert report.slowdown > 1.1
    assert [finding.cause for finding in report.findings] == ["insufficient-evidence"]
    assert "a slow link or host needs 3 steps" in report.findings[0].evidence


def test_both_directions_of_a_slow_link_are_no_noise_to_each_other() -> None:
    scenario = Scenario(
        dp=8,
        pp=2,
        tp=1,
        num_steps=1,
        faults=parse_simulated_faults(["slow-link:src=0,dst=8,factor=20"]),
    )

    report = analyze_run(SimulatedSource(scenario), "simulated")

    assert summary(report.findings) == [("slow-link", (0, 8), (0, 0))]
