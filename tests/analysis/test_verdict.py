from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.report.report import Finding, RunReport, Starved, StepTimes, WaitsOn
from rankscope.analysis.verdict import verdict_sentence
from rankscope.tracer.topology import Layout
from tests.support.dashboard.builders import report


def told(cause: str, ranks: tuple[int, ...], *, waiting: tuple[int, ...] = (0,)) -> RunReport:
    """GIVEN a step of 2.0 s that would be 1.0 s, a tenth of which others wait for rank 5."""
    finding = Finding(
        cause=cause,
        ranks=ranks,
        steps=(0, 29),
        slowdown=1.5,
        recoverable_ratio=0.5,
        confidence=0.99,
        evidence="numbers",
    )
    starved = tuple(
        Starved(rank=rank, wait_ratio=0.1, waits_on=(WaitsOn(rank=5, ratio=0.1),))
        for rank in waiting
    )
    times = StepTimes(actual=2.0, replayed=2.0, ideal=1.0)
    return replace(report(), findings=(finding,), starved=starved, step_time_s=times)


def test_others_wait_for_one_rank_and_mending_it_wins() -> None:
    assert verdict_sentence(told("slow-compute", (5,))) == (
        "Rank 5 (dp 0, stage 1, tp 1) is truly slow (slow-compute)."
        " Rank 0 only waits for it, 10 % of its step."
        " Mending it wins back 50 % of the time lost to slowness, 500 ms a step."
    )


def test_others_wait_for_several_ranks_and_mending_them_wins() -> None:
    sentence = verdict_sentence(told("host-stall", (5, 7), waiting=(0, 1)))

    assert sentence == (
        "Ranks 5 and 7 launch late: their host stalls (host-stall)."
        " 2 other ranks only wait for them, rank 0 most: 10 % of its step."
        " Mending them wins back 50 % of the time lost to slowness, 500 ms a step."
    )


@pytest.mark.parametrize("cause", ["stage-imbalance", "slow-link"])
def test_a_stage_and_a_link_are_one_thing_though_they_have_several_ranks(cause: str) -> None:
    sentence = verdict_sentence(told(cause, (5, 7)))

    assert "Rank 0 only waits for it, 10 % of its step." in sentence
    assert "Mending it wins back" in sentence


def test_many_waiting_ranks_are_counted_with_a_separator() -> None:
    layout = Layout(dp=1537, pp=4, tp=2)
    waiting = tuple(rank for rank in range(12_296) if rank not in (5, 7))
    many = replace(told("slow-compute", (5, 7), waiting=waiting), layout=layout, world_size=12_296)

    assert "12,294 other ranks only wait for them" in verdict_sentence(many)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("hang", "hangs, and all others wait for it in step 12 (hang)."),
        ("crash", "failed first in step 12 (crash)."),
    ],
)
def test_how_a_job_ended_names_the_step_and_no_waits_of_those_before(cause: str, said: str) -> None:
    made = told(cause, (5,))
    ended = replace(made.findings[0], steps=(12, 12), recoverable_ratio=None)

    sentence = verdict_sentence(replace(made, findings=(ended,)))

    assert sentence == f"Rank 5 (dp 0, stage 1, tp 1) {said}"
