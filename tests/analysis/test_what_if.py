"""Steps replayed with changes, compared with the report and with a job without the fault."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.price.operation_sets import EmptyPartError, Part, price_part
from rankscope.analysis.replay.replayer import Replayer
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.what_if import PlayError, RunPlay, open_play
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario
from tests.support.rankscope.simulated_source import SimulatedSource

CLUSTER = Scenario(dp=4, pp=2, tp=2, num_steps=8, num_microbatches=8, ranks_per_host=4, seed=3)
SLOW = "slow-compute:rank=9,factor=1.8"


def source_of(*specs: str) -> SimulatedSource:
    return SimulatedSource(replace(CLUSTER, faults=parse_simulated_faults(specs)))


def mean_recorded_ns(play: RunPlay) -> float:
    return fmean(play.step(step).recorded_ns for step in play.reading.steps)


@pytest.fixture(scope="module")
def slow() -> RunPlay:
    return open_play(source_of(SLOW), "simulated")


@pytest.mark.parametrize(
    "specs",
    [
        (SLOW,),
        ("slow-link:rank=0,factor=3",),
        ("data-stall:rank=2,ms=120,spans=yes",),
        ("stage-imbalance:stage=1,factor=1.5",),
        (SLOW, "slow-link:rank=0,factor=3"),
    ],
)
def test_a_fixed_finding_saves_what_the_report_says(specs: tuple[str, ...]) -> None:
    source = source_of(*specs)
    play = open_play(source, "simulated")
    report = analyze_run(source, "simulated")
    alarms = [finding for finding in report.findings if finding.saved_s]

    assert len(alarms) == len(specs)
    for finding in alarms:
        saved_ns = [play.step(step).fix(finding).saved_ns for step in report.steps]
        assert fmean(saved_ns) / 1e9 == pytest.approx(finding.saved_s, rel=1e-9)


@pytest.mark.parametrize("spec", [SLOW, "slow-link:rank=0,factor=3", "host-stall:rank=5,ms=40"])
def test_the_predicted_step_is_that_of_the_job_without_the_fault(spec: str) -> None:
    source = source_of(spec)
    play, finding = open_play(source, "simulated"), analyze_run(source, "simulated").top_finding
    predicted_ns = fmean(play.step(step).fix(finding).played_ns for step in play.reading.steps)
    without_ns = mean_recorded_ns(open_play(source_of(), "simulated"))

    assert predicted_ns == pytest.approx(without_ns, rel=0.02)
    assert mean_recorded_ns(play) > 1.05 * without_ns


def test_a_healed_part_takes_what_the_what_if_returns(slow: RunPlay) -> None:
    part = Part(rank=9)
    priced = price_part(
        Replayer(slow.reading.model), np.asarray(slow.reading.model.rank == 9, dtype=np.bool_)
    )
    played_ns = [slow.step(step).heal(part).played_ns for step in slow.reading.steps]
    assert played_ns == pytest.approx(priced.step_ns.tolist(), rel=1e-12)


def test_two_findings_are_fixed_one_after_the_other() -> None:
    source = source_of(SLOW, "slow-link:rank=0,factor=3")
    play, report = open_play(source, "simulated"), analyze_run(source, "simulated")
    first, second = [finding for finding in report.findings if finding.saved_s]
    both_ns = fmean(play.step(step).fix(first).fix(second).played_ns for step in play.reading.steps)
    without_ns = mean_recorded_ns(open_play(source_of(), "simulated"))
    assert both_ns == pytest.approx(without_ns, rel=0.02)


def test_a_rank_at_twice_the_speed_shortens_the_critical_path(slow: RunPlay) -> None:
    step = slow.step(4)
    faster = step.scale(Part(rank=9), 1 / 1.8)

    assert 9 in step.critical_path().rank
    assert faster.played_ns < step.played_ns
    whole_ns = faster.played_ns + faster.overlap_ns
    assert faster.critical_path().step_ns[0] == pytest.approx(whole_ns, rel=1e-9)
    assert step.played_ns == step.recorded_ns, "a play is not changed by those made from it"


def test_swapped_hosts_take_their_speed_with_them(slow: RunPlay) -> None:
    hosts = [slow.run.ranks[rank].host for rank in (9, 0)]
    swapped = slow.step(4).swap_hosts(*hosts)
    model = swapped.recorded_step.model
    of_rank = {
        rank: swapped.times.duration_ns[(model.rank == rank) & model.on_device].sum()
        / swapped.recorded_step.recorded.duration_ns[(model.rank == rank) & model.on_device].sum()
        for rank in (9, 1, 12)
    }
    assert (of_rank[9] < 0.7, of_rank[1] > 1.3, of_rank[12]) == (True, True, 1.0)


def test_balanced_stages_have_equal_compute() -> None:
    play = open_play(source_of("stage-imbalance:stage=1,factor=1.5"), "simulated")
    balanced = play.step(4).balance_stages()
    compute, stage = balanced.recorded_step.compute_rows, balanced.recorded_step.model.stage
    spent = np.bincount(stage[compute], weights=balanced.times.duration_ns[compute])

    assert spent[0] == pytest.approx(spent[1])
    assert balanced.played_ns < balanced.recorded_ns
    again = play.step(4).balance_stages({0: 1, 1: 3})
    assert again.played_ns > balanced.recorded_ns


def test_changes_that_are_impossible_are_refused(slow: RunPlay) -> None:
    step = slow.step(4)
    healthy = analyze_run(source_of(), "simulated").top_finding
    with pytest.raises(PlayError, match="no operation"):
        step.fix(healthy)
    with pytest.raises(PlayError, match="hosts:"):
        step.swap_hosts("nowhere", "node-0")
    with pytest.raises(PlayError, match="each stage"):
        step.balance_stages({0: 1})
    with pytest.raises(PlayError, match="multiplied"):
        step.scale(Part(rank=9), -1)
    with pytest.raises(EmptyPartError):
        step.scale(Part(rank=99), 0.5)
    with pytest.raises(EmptyRunError, match="step 99"):
        slow.step(99)
