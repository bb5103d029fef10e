from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.causes.hang import HAD_ENDED, OTHER_ORDER
from rankscope.analysis.report.network import WaitedLink
from rankscope.analysis.report.report import Finding, RunReport, Starved, StepTimes, WaitsOn
from rankscope.analysis.verdict import verdict_sentence
from rankscope.tracer.topology import Coords, Layout
from tests.support.dashboard.builders import report


def diagnosed(cause: str, ranks: tuple[int, ...], *, waiting: tuple[int, ...] = (0,)) -> RunReport:
    """Return a diagnosis: a step takes 2 s, ideally 1; ranks wait for rank 5, or for its link to
    rank 7 if that is the cause, for 10 % of it.
    """
    finding = Finding(
        cause=cause,
        ranks=ranks,
        steps=(0, 29),
        slowdown=1.5,
        recoverable_ratio=0.5,
        saved_s=0.5,
        confidence=0.99,
        evidence="numbers",
    )
    is_link = cause == "slow-link"
    on = WaitsOn(rank=None if is_link else 5, link=3 if is_link else None, ratio=0.1)
    starved = tuple(Starved(rank=rank, wait_ratio=0.1, waits_on=(on,)) for rank in waiting)
    return replace(
        report(),
        findings=(finding,),
        starved=starved,
        waited_links={3: WaitedLink(members=(5, 7), kind="pp-send", is_pair=True)},
        step_time_s=StepTimes(actual=2.0, replayed=2.0, ideal=1.0),
    )


def test_one_rank_is_held_up_by_another_and_a_fix_saves_time() -> None:
    assert verdict_sentence(diagnosed("slow-compute", (5,))) == (
        "Rank 5 (dp 0, stage 1, tp 1) computes slowly (slow-compute)."
        " Rank 0 is held up by it (10 % of each step)."
        " Fixing it would save 500 ms per step (25 %)."
    )


def test_several_ranks_are_held_up_by_several() -> None:
    sentence = verdict_sentence(diagnosed("host-stall", (5, 7), waiting=(0, 1)))

    assert sentence == (
        "Ranks 5 and 7 launch late because their host stalls (host-stall)."
        " 2 ranks are held up by them; rank 0 loses most (10 % of each step)."
        " Fixing them would save 500 ms per step (25 %)."
    )


@pytest.mark.parametrize("cause", ["stage-imbalance", "slow-link"])
def test_a_stage_and_a_link_are_one_thing_though_they_have_several_ranks(cause: str) -> None:
    sentence = verdict_sentence(diagnosed(cause, (5, 7)))

    assert "Rank 0 is held up by it (10 % of each step)." in sentence
    assert "Fixing it would save" in sentence


@pytest.mark.parametrize(
    ("ranks", "subject"),
    [
        ((5,), "Rank 5 (dp 0, stage 1, tp 1) has a slow link"),
        ((5, 7), "The link between ranks 5 and 7 is slow"),
        ((0, 2, 4, 6), "Ranks 0, 2, 4 and 6 share a slow link"),
    ],
)
def test_a_slow_link_is_named_by_its_ends(ranks: tuple[int, ...], subject: str) -> None:
    assert verdict_sentence(diagnosed("slow-link", ranks)).startswith(f"{subject} (slow-link).")


def test_a_slow_link_of_a_whole_group_is_named_by_the_group() -> None:
    layout = Layout(dp=4, pp=2, tp=2)
    coords = {rank: Coords(dp=rank // 2 % 4, pp=rank // 8, tp=rank % 2) for rank in range(16)}
    slow = replace(
        diagnosed("slow-link", (8, 10, 12, 14)), layout=layout, coords=coords, world_size=16
    )

    assert verdict_sentence(slow).startswith(
        "A link of data-parallel group (stage 1, tp 0), 4 ranks, is slow (slow-link)."
    )


def test_many_waiting_ranks_are_counted_with_a_separator() -> None:
    layout = Layout(dp=1537, pp=4, tp=2)
    waiting = tuple(rank for rank in range(12_296) if rank not in (5, 7))
    many = diagnosed("slow-compute", (5, 7), waiting=waiting)

    sentence = verdict_sentence(replace(many, layout=layout, world_size=12_296))

    assert "12,294 ranks are held up by them" in sentence


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        ("hang", "hangs in step 12 (hang). All other ranks wait for it."),
        ("crash", "failed first in step 12 (crash)."),
    ],
)
def test_how_a_job_ended_names_the_step_and_no_waits_of_those_before(
    cause: str, sentence: str
) -> None:
    made = diagnosed(cause, (5,))
    ended = replace(made.findings[0], steps=(12, 12), saved_s=None)

    found = verdict_sentence(replace(made, findings=(ended,)))

    assert found == f"Rank 5 (dp 0, stage 1, tp 1) {sentence}"


def test_the_verdict_of_a_crash_has_its_reason() -> None:
    made = diagnosed("crash", (5,))
    evidence = "rank 5 (host h1) failed first: host out of memory (oom-kill); 7 others followed"
    ended = replace(made.findings[0], steps=None, saved_s=None, evidence=evidence)

    sentence = verdict_sentence(replace(made, findings=(ended,)))

    assert sentence.endswith("failed first (crash): host out of memory (oom-kill).")


def test_a_rank_that_had_no_more_batches_does_not_hang_by_itself() -> None:
    made = diagnosed("hang", (5,))
    ended = replace(made.findings[0], steps=(12, 12), evidence=f"rank 5 is missing; {HAD_ENDED}")

    sentence = verdict_sentence(replace(made, findings=(ended,)))

    assert "ended before the others in step 12 (hang). All other ranks wait for it." in sentence


def test_a_rank_that_hangs_in_another_communication_is_said_to() -> None:
    made = diagnosed("hang", (5,))
    unlike = replace(made.findings[0], evidence=f"no rank is silent; {OTHER_ORDER}")

    sentence = verdict_sentence(replace(made, findings=(unlike,)))

    assert "All other ranks wait for it, which is in another communication." in sentence


def test_other_findings_are_listed_beside_a_healthy_run() -> None:
    healthy = diagnosed("healthy", ())
    checkpoint = replace(healthy.findings[0], cause="checkpoint")

    found = verdict_sentence(replace(healthy, findings=(*healthy.findings, checkpoint)))

    assert found == "Healthy: numbers. Also found: checkpoint (25 % of the step time)."
