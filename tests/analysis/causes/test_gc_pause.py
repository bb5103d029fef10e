"""Pauses of garbage collection, beside the gaps that a healthy host leaves."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes.gc_pause import find_gc_pauses
from rankscope.analysis.replay.model import Place
from tests.support.analysis.gap_builders import gaps_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.causes.host_gaps import HostGaps

NUM_RANKS, NUM_STEPS = 4, 8

Gap = tuple[int, int, int]
"""Step, rank, ms."""


def gaps_at(*gaps: Gap, places: Sequence[Place] = (Place.FORWARD,)) -> HostGaps:
    """Return these gaps before forwards, or at the given places in turn."""
    placed = [(step, rank, place, ms) for (step, rank, ms), place in zip(gaps, cycle(places))]
    return gaps_with(placed, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS)


def pausing_ranks(*gaps: Gap, places: Sequence[Place] = (Place.FORWARD,)) -> list[tuple[int, ...]]:
    """Return the ranks of each `gc-pause` that is found."""
    allowed = np.ones(len(gaps), dtype=np.bool_)
    return [each.ranks for each in find_gc_pauses(gaps_at(*gaps, places=places), allowed)]


def test_pauses_in_turn_are_found_if_hosts_leave_no_other_gaps() -> None:
    # GIVEN four pauses of about 150 ms among 4 ranks and 8 steps
    assert pausing_ranks(*IN_TURN) == [(0, 1, 2, 3)]


EVERYWHERE = [(step, rank, 60) for step in range(8) for rank in range(4)]
IN_TURN = [(1, 0, 150), (3, 2, 160), (4, 1, 140), (6, 3, 150)]


@pytest.mark.parametrize(
    ("gaps", "place"),
    [(EVERYWHERE, Place.FORWARD), (IN_TURN, Place.LAUNCH), (IN_TURN, Place.SPAN)],
    ids=["a gap in every rank and step", "late reductions alone", "spans of the job's own"],
)
def test_other_gaps_are_no_pauses(gaps: list[Gap], place: Place) -> None:
    assert pausing_ranks(*gaps, places=(place,)) == []


def test_a_pause_is_at_least_ten_times_the_usual_gap() -> None:
    usual = [(step, rank, 20) for step in range(8) for rank in range(4)]

    assert pausing_ranks(*usual, (1, 0, 150), (3, 2, 150)) == []
    assert pausing_ranks(*usual, (1, 0, 250), (3, 2, 250)) == [(0, 2)]


def test_one_pause_inside_a_step_makes_pauses_of_gaps_before_input() -> None:
    # GIVEN a host that runs ahead and so hides all pauses inside steps but one
    gaps = ((1, 0, 150), (3, 2, 160), (6, 3, 120))

    assert pausing_ranks(*gaps, places=(Place.INPUT, Place.INPUT, Place.BACKWARD)) == [(0, 2, 3)]
    # AND without that one, the gaps are missing input
    assert pausing_ranks(*gaps, places=(Place.INPUT,)) == []


def test_a_rank_that_loses_time_in_three_consecutive_steps_does_not_pause() -> None:
    # GIVEN rank 1 without input in steps 2 to 4, and pauses of ranks 0 and 3 inside steps
    gaps = ((2, 1, 90), (3, 1, 90), (4, 1, 90), (1, 0, 150), (6, 3, 150))
    places = (Place.INPUT, Place.INPUT, Place.INPUT, Place.FORWARD, Place.FORWARD)

    assert pausing_ranks(*gaps, places=places) == [(0, 3)]


def test_a_short_pause_counts_beside_two_of_full_length() -> None:
    # GIVEN pauses of 60 and 55 ms, and one of which a host that runs ahead shows 30 ms
    assert pausing_ranks((1, 0, 60), (3, 2, 55), (6, 3, 30)) == [(0, 2, 3)]
    # AND one of full length beside a short one is not enough
    assert pausing_ranks((1, 0, 60), (6, 3, 30)) == []


def test_gaps_of_a_common_pause_are_not_garbage_collection() -> None:
    allowed = np.array([True, False])

    assert find_gc_pauses(gaps_at((1, 0, 150), (3, 2, 150)), allowed) == ()


def test_pauses_of_each_rank_at_one_distance_are_none_of_garbage_collection() -> None:
    # GIVEN two ranks that pause in every second step, in turn
    gaps = [(step, step % 2, 60) for step in range(8)]

    assert pausing_ranks(*gaps) == []
    # AND one of them does so irregularly
    assert pausing_ranks(*gaps[:-2], (7, 0, 60), (7, 1, 60)) == [(0, 1)]
