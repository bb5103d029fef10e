"""Ranks that wait for input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes.data_stall import find_data_stalls
from rankscope.analysis.replay.model import Place
from rankscope.tracer.span import SpanKind
from tests.support.analysis.cluster import MS, Compute
from tests.support.analysis.gap_builders import Gap, gaps_with, host_candidates
from tests.support.analysis.one_group import ALL_REDUCE, findings_of, work

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankscope.analysis.causes.candidate import Candidate
    from tests.support.analysis.cluster import Action

TWO_STAGES = (0, 0, 0, 0, 1, 1, 1, 1)
ALL_EIGHT = tuple(range(8))


def stalls(
    gaps: list[Gap],
    *,
    stage: Sequence[int] = (0, 0, 0, 0),
    num_steps: int = 12,
    left_out: Sequence[int] = (),
) -> tuple[Candidate, ...]:
    """Return the stalls of ranks with these gaps; some steps are not searched."""
    steps = ~np.isin(np.arange(num_steps), left_out)
    nothing = np.zeros(len(gaps), dtype=np.bool_)
    return find_data_stalls(gaps_with(gaps, stage=stage, num_steps=num_steps), steps, nothing)


def test_input_that_all_ranks_miss_is_found_in_a_short_run() -> None:
    # GIVEN nine steps, in which the input of every rank takes 30 to 50 ms from step 2 on
    late_ms = dict(enumerate((50, 45, 32, 38, 30, 45, 38), start=2))
    gaps: list[Gap] = [
        (step, rank, Place.INPUT, ms) for step, ms in late_ms.items() for rank in ALL_EIGHT
    ]

    found = stalls(gaps, stage=TWO_STAGES, left_out=(9, 10, 11))

    # THEN each stage has it, which `detect` merges
    assert [(each.ranks, each.steps) for each in found] == [
        (ALL_EIGHT[:4], (2, 8)),
        (ALL_EIGHT[4:], (2, 8)),
    ]


def test_the_worst_step_of_a_stall_of_all_ranks_is_part_of_it() -> None:
    # GIVEN data spans of 30 to 45 ms on every rank from step 4 on, and of 70 ms in step 4, which
    # alone looks like a common pause
    late_ms = dict(enumerate((70, 38, 30, 40, 36, 45, 38, 40), start=4))
    gaps = [(step, rank, Place.DATA, ms) for step, ms in late_ms.items() for rank in ALL_EIGHT]

    found = host_candidates(gaps_with(gaps, stage=TWO_STAGES, num_steps=12))

    assert [(each.cause.name, each.ranks, each.steps) for each in found] == [
        ("data-stall", ALL_EIGHT, (4, 11))
    ]


def test_the_last_rank_to_return_from_a_checkpoint_does_not_wait_for_input() -> None:
    # GIVEN a common pause in step 4, and rank 6 that loses another 20 ms in step 5
    gaps: list[Gap] = [(5, 6, Place.INPUT, 20), (9, 0, Place.INPUT, 0)]

    assert stalls(gaps, stage=TWO_STAGES, left_out=(4,)) == ()
    # AND without the pause, or for longer than that step, it is its input
    (found,) = stalls(gaps, stage=TWO_STAGES)
    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (6,), (5, 5))
    longer: list[Gap] = [(5, 6, Place.INPUT, 20), (6, 6, Place.INPUT, 20)]
    (found,) = stalls(longer, stage=TWO_STAGES, left_out=(4,))
    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (6,), (5, 6))


@pytest.mark.parametrize("first", [4, 1, 0])
def test_a_rank_with_one_peer_waits_for_input_from_its_onset_on(first: int) -> None:
    # GIVEN two stages of two ranks; rank 2 waits for 60 or 75 ms from some step on, so that the
    # usual step of this rank is one in which it waits
    gaps: list[Gap] = [
        (step, 2, Place.DATA, 75 if step in (8, 9, 10) else 60) for step in range(first, 12)
    ]

    (found,) = stalls(gaps, stage=(0, 0, 1, 1))

    # THEN the whole is found, not only the 15 ms by which three steps are worse
    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (2,), (first, 11))
    assert found.excess_ratio >= 0.3


@pytest.mark.parametrize("stage", [(0, 0), (0, 0, 0), (0, 0, 0, 1)])
def test_a_rank_with_one_or_two_peers_is_compared_with_them(stage: tuple[int, ...]) -> None:
    # GIVEN rank 1 that waits for 31 ms in every step, and peers that wait for 1 ms
    gaps: list[Gap] = [
        (step, rank, Place.INPUT, 31 if rank == 1 else 1)
        for step in range(12)
        for rank in range(len(stage))
    ]

    (found,) = stalls(gaps, stage=stage)

    # THEN it loses 30 of 100 ms, though all of its own steps are alike
    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (1,), (0, 11))
    assert found.excess_ratio == pytest.approx(0.3)


def test_two_ranks_of_a_stage_that_wait_equally_long_are_one_stall() -> None:
    # GIVEN two ranks of three that wait for 30 ms in each step
    gaps: list[Gap] = [(step, rank, Place.INPUT, 30) for step in range(12) for rank in (0, 1)]

    (found,) = stalls(gaps, stage=(0, 0, 0))

    assert (found.cause.name, found.ranks) == ("data-stall", (0, 1))
    assert found.evidence == (
        "ranks 0 and 1 lose 30.0 ms per step waiting for input (30 % of the compute)"
        " in steps 0 to 11"
    )


def test_intermittent_waiting_is_one_stall_from_the_first_step_to_the_last() -> None:
    # GIVEN a loader that opens another file in every fifth step: 40 ms of 100 ms of compute
    gaps: list[Gap] = [(step, 2, Place.DATA, 40) for step in (1, 6, 11)]

    (found,) = stalls(gaps, num_steps=16)

    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (2,), (1, 11))
    assert found.shown_steps == (1, 6, 11)
    assert found.excess_ratio == pytest.approx(0.4)
    assert found.evidence == (
        "rank 2 loses 40.0 ms per step waiting for input (40 % of the compute)"
        " in 3 of the 11 steps 1 to 11; its peers lose none"
    )


def test_the_rests_of_checkpoints_are_no_intermittent_waiting() -> None:
    # GIVEN rank 2, the last to return from checkpoints in steps 4 and 9
    gaps: list[Gap] = [(step, 2, Place.INPUT, 40) for step in (5, 10)]

    assert stalls(gaps, num_steps=16, left_out=(4, 9)) == ()


def training_step() -> Iterator[Action]:
    yield from work(SpanKind.FORWARD, 10 * MS, microbatch=0)
    yield from work(SpanKind.BACKWARD, 20 * MS, microbatch=0)
    yield ALL_REDUCE
    yield from work(SpanKind.OPTIMIZER, MS)


def test_a_host_that_launches_late_after_its_input_is_there_does_not_wait_for_input() -> None:
    def script(rank: int, step: int) -> Iterator[Action]:
        # GIVEN data spans of 0.3 ms, and rank 2 that launches 11 ms later from step 3 on
        yield from work(SpanKind.DATA, 0.3 * MS)
        if rank == 2 and step >= 3:
            yield Compute(11 * MS)
        yield from training_step()

    (found,) = findings_of(script, num_steps=10)

    assert (found.cause, found.ranks, found.steps) == ("host-stall", (2,), (3, 9))


@pytest.mark.parametrize("evaluating_ranks", [(0, 1, 2, 3), (0,)])
def test_an_evaluation_with_its_own_loader_is_no_missing_input(
    evaluating_ranks: tuple[int, ...],
) -> None:
    def script(rank: int, step: int) -> Iterator[Action]:
        # GIVEN an evaluation before the steps 2, 5 and 9, whose loader starts for 80 ms
        if step in (2, 5, 9) and rank in evaluating_ranks:
            yield from work(SpanKind.DATA, 80 * MS)
            for _ in range(3):
                yield from work(SpanKind.FORWARD, 8 * MS)
        yield from work(SpanKind.DATA, 0.3 * MS)
        yield from training_step()

    found = findings_of(script, num_steps=12)

    assert found[0].cause == "healthy"
    assert {each.cause for each in found} == {"healthy", "evaluation"}
