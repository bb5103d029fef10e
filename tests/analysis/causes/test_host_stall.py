"""Hosts that launch late, throughout or in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes.data_stall import find_data_stalls
from rankscope.analysis.causes.host_stall import find_host_stalls
from rankscope.analysis.causes.launch_skew import find_launch_skews
from rankscope.analysis.replay.model import Place
from tests.support.analysis.stall_builders import host_candidates, stalls_with

if TYPE_CHECKING:
    from rankscope.analysis.causes.host_gaps import HostGaps

NUM_RANKS, NUM_STEPS = 8, 12

Gap = tuple[int, int, int]
"""Step, rank, ms."""


def stalls(place: Place, *gaps: Gap) -> HostGaps:
    """Return ranks 0 to 3 of stage 0 and 4 to 7 of stage 1."""
    placed = [(step, rank, place, ms) for step, rank, ms in gaps]
    return stalls_with(placed, stage=np.repeat((0, 1), 4).tolist(), num_steps=NUM_STEPS)


def test_steps_that_checkpoints_explain_do_not_make_a_stall_unsteady() -> None:
    # GIVEN a host that loses 90 ms in each step, every second of which is explained otherwise
    gaps = stalls(Place.FORWARD, *((step, 2, 90) for step in range(NUM_STEPS)))
    usual = np.arange(NUM_STEPS) % 2 == 0

    (found,) = find_host_stalls(gaps, usual)

    assert (found.cause.name, found.ranks) == ("host-stall", (2,))


def test_members_late_in_turn_in_one_stage_are_no_stalled_host() -> None:
    # GIVEN ranks 4 to 7 that launch their reduction 60 ms late in turn, and pairs across the
    # stages (tied embeddings) in which the one of stage 1 is then always the later
    gaps = stalls(Place.LAUNCH, *((step, 4 + step % 4, 60) for step in range(2, NUM_STEPS)))
    groups = ((0, 4), (1, 5), (2, 6), (3, 7), (0, 1, 2, 3), (4, 5, 6, 7))

    (found,) = find_launch_skews(gaps, groups, np.ones(NUM_STEPS, dtype=np.bool_), frozenset())

    assert (found.cause.name, found.ranks) == ("launch-skew", (4, 5, 6, 7))


def test_a_host_that_is_late_for_each_launch_of_one_step_stalls() -> None:
    # GIVEN a host whose lead is spent in step 5: 8 ms before each of its four launches there
    gaps = stalls(Place.FORWARD, *((5, 2, 8),) * 4)

    (found,) = find_host_stalls(gaps, np.ones(NUM_STEPS, dtype=np.bool_))

    assert (found.cause.name, found.ranks, found.steps) == ("host-stall", (2,), (5, 5))


def test_one_long_gap_in_a_step_is_no_stall_of_its_host() -> None:
    # GIVEN 32 ms before one launch, and 1 ms before three others
    gaps = stalls(Place.FORWARD, (5, 2, 32), (5, 2, 1), (5, 2, 1), (5, 2, 1))

    assert find_host_stalls(gaps, np.ones(NUM_STEPS, dtype=np.bool_)) == ()


def test_a_stall_that_begins_before_the_lead_is_spent_is_steady() -> None:
    # GIVEN 4 x 3 ms in step 2, of which the lead hides the rest, and 4 x 15 ms in steps 3 and 4
    gaps = stalls(Place.BACKWARD, *((2, 2, 3),) * 4, *((3, 2, 15),) * 4, *((4, 2, 15),) * 4)

    (found,) = find_host_stalls(gaps, np.ones(NUM_STEPS, dtype=np.bool_))

    assert (found.ranks, found.steps) == ((2,), (2, 4))


def test_input_that_all_ranks_miss_from_the_same_step_on_is_told_in_a_short_run() -> None:
    # GIVEN nine steps whose input takes 30 to 50 ms on every rank from step 2 on, of 100 ms of
    # compute
    late_ms = dict(enumerate((50, 45, 32, 38, 30, 45, 38), start=2))
    gaps = [(step, rank, ms) for step, ms in late_ms.items() for rank in range(NUM_RANKS)]
    found = stalls(Place.INPUT, *gaps)
    usual = np.arange(NUM_STEPS) < 9

    told = find_data_stalls(found, usual, np.zeros(len(gaps), dtype=np.bool_))

    # THEN that is one stall of all ranks
    assert [(each.ranks, each.steps) for each in told] == [(tuple(range(NUM_RANKS)), (2, 8))]


def test_a_step_that_misses_more_input_than_the_others_is_no_stall_of_its_own() -> None:
    # GIVEN data spans of 30 to 45 ms on every rank from step 4 on, and of 70 ms in the first of
    # these steps, which so stands out as a dip
    late_ms = dict(enumerate((70, 38, 30, 40, 36, 45, 38, 40), start=4))
    gaps = [(step, rank, ms) for step, ms in late_ms.items() for rank in range(NUM_RANKS)]

    told = host_candidates(stalls(Place.DATA, *gaps))

    # THEN one stall is told, from its first step on
    found = [(each.cause.name, each.ranks, each.steps) for each in told]
    assert found == [("data-stall", tuple(range(NUM_RANKS)), (4, 11))]


def test_the_last_to_come_back_from_a_checkpoint_misses_no_input() -> None:
    # GIVEN all ranks stand still before step 4, and rank 6 for another 20 ms before step 5
    gaps = stalls(Place.INPUT, (5, 6, 20), (9, 0, 0))
    usual = np.arange(NUM_STEPS) != 4
    none = np.zeros(len(gaps.gaps), dtype=np.bool_)

    assert find_data_stalls(gaps, usual, none) == ()
    # AND without the checkpoint, or for longer than that step, it is its input
    (found,) = find_data_stalls(gaps, usual | True, none)
    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (6,), (5, 5))
    longer = stalls(Place.INPUT, (5, 6, 20), (6, 6, 20))
    (found,) = find_data_stalls(longer, usual, none)
    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (6,), (5, 6))


@pytest.mark.parametrize("first", [4, 1, 0])
def test_a_rank_with_one_peer_misses_input_from_its_onset_on(first: int) -> None:
    # GIVEN two stages of two ranks, of which rank 2 loses 60 or 75 ms of input from some step on,
    # in most of its steps: its usual step is a stalled one
    lost = ((step, 2, Place.DATA, 75 if step in (8, 9, 10) else 60) for step in range(first, 12))
    gaps = stalls_with(lost, stage=(0, 0, 1, 1), num_steps=12)

    (found,) = find_data_stalls(
        gaps, np.ones(12, dtype=np.bool_), np.zeros(12 - first, dtype=np.bool_)
    )

    # THEN all of it is told, not only the 15 ms by which three steps are worse
    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (2,), (first, 11))
    assert found.excess_ratio >= 0.3


def test_a_host_with_one_peer_is_told_once() -> None:
    # GIVEN four stages of two ranks, and rank 0 that loses 400 ms in each step from 4 on: its
    # stage's median, between the two, is 200 ms above that of the other stages
    gaps = [(step, 0, Place.FORWARD, 400) for step in range(4, NUM_STEPS)]
    found = find_host_stalls(
        stalls_with(gaps, stage=np.repeat((0, 1, 2, 3), 2).tolist(), num_steps=NUM_STEPS),
        np.ones(NUM_STEPS, dtype=np.bool_),
    )

    assert [(each.ranks, each.steps) for each in found] == [((0,), (4, NUM_STEPS - 1))]


@pytest.mark.parametrize("stage", [(0, 0), (0, 0, 0), (0, 0, 0, 1)])
def test_a_rank_with_one_or_two_peers_misses_input_in_all_of_its_steps(
    stage: tuple[int, ...],
) -> None:
    # GIVEN one or two peers that lose 1 ms of input where rank 1 loses 31 ms in every step
    lost = [
        (step, rank, Place.INPUT, 31 if rank == 1 else 1)
        for step in range(12)
        for rank in range(len(stage))
    ]
    gaps = stalls_with(lost, stage=stage, num_steps=12)

    (found,) = find_data_stalls(
        gaps, np.ones(12, dtype=np.bool_), np.zeros(len(lost), dtype=np.bool_)
    )

    # THEN it is held against them: 30 of 100 ms, though its own steps are all alike
    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (1,), (0, 11))
    assert found.excess_ratio == pytest.approx(0.3)


def test_input_of_which_a_peer_loses_as_much_is_due_on_a_stage_that_loads() -> None:
    # GIVEN two ranks of three that load 30 ms in each step, which the job pays for as a whole
    lost = [(step, rank, Place.INPUT, 30) for step in range(12) for rank in (0, 1)]
    gaps = stalls_with(lost, stage=(0, 0, 0), num_steps=12)

    (found,) = find_data_stalls(
        gaps, np.ones(12, dtype=np.bool_), np.zeros(len(lost), dtype=np.bool_)
    )

    # THEN it is told of both, once
    assert (found.cause.name, found.ranks) == ("data-stall", (0, 1))


def test_input_missed_now_and_then_is_told_from_the_first_time_to_the_last() -> None:
    # GIVEN a loader that opens another file in every fifth step: 40 ms of 100 ms of compute
    lost = [(step, 2, Place.DATA, 40) for step in (1, 6, 11)]
    gaps = stalls_with(lost, stage=(0, 0, 0, 0), num_steps=16)
    all_steps, none = np.ones(16, dtype=np.bool_), np.zeros(len(lost), dtype=np.bool_)

    (found,) = find_data_stalls(gaps, all_steps, none)

    assert (found.cause.name, found.ranks, found.steps) == ("data-stall", (2,), (1, 11))
    assert found.shown_steps == (1, 6, 11)
    assert found.excess_ratio == pytest.approx(0.4)
    assert "40.0 ms a step" in found.evidence
    assert "in 3 of the 11 steps 1 to 11" in found.evidence


def test_what_is_left_of_checkpoints_is_no_input_missed_now_and_then() -> None:
    # GIVEN rank 2, the last to come back from checkpoints before steps 5 and 10
    lost = [(step, 2, Place.INPUT, 40) for step in (5, 10)]
    gaps = stalls_with(lost, stage=(0, 0, 0, 0), num_steps=16)
    usual = ~np.isin(np.arange(16), (4, 9))

    assert find_data_stalls(gaps, usual, np.zeros(2, dtype=np.bool_)) == ()

    # AND input that it misses in step 13 is all that is told beside them
    more = stalls_with([*lost, (13, 2, Place.INPUT, 30)], stage=(0,) * 8, num_steps=16)
    (found,) = find_data_stalls(more, usual, np.zeros(3, dtype=np.bool_))
    assert (found.steps, found.shown_steps) == ((13, 13), None)
    assert found.excess_ratio == pytest.approx(0.3)
