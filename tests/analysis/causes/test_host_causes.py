"""Which of the causes that lie on hosts explains which gap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.replay.model import Place
from tests.support.analysis.stall_builders import Gap, host_candidates, stalls_with

if TYPE_CHECKING:
    from rankscope.analysis.causes.host_gaps import HostGaps

NUM_RANKS, NUM_STEPS = 8, 12


def stalls(*gaps: Gap) -> HostGaps:
    """Return ranks of one stage with these gaps."""
    return stalls_with(gaps, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS)


def told(*gaps: Gap) -> list[tuple[str, tuple[int, ...], tuple[int, int]]]:
    """Return (cause, ranks, steps) of what was found."""
    found = host_candidates(stalls(*gaps), tuple(range(NUM_RANKS)))
    return [(each.cause.name, each.ranks, each.steps) for each in found]


def test_a_late_host_is_late_for_its_first_launch_too() -> None:
    # GIVEN 15 ms before the first and before two other launches of each step
    places = (Place.INPUT, Place.FORWARD, Place.BACKWARD)
    gaps = [(step, 2, place, 15) for step in range(3, 9) for place in places]

    assert told(*gaps) == [("host-stall", (2,), (3, 8))]


def test_a_late_host_whose_input_is_late_as_well_is_told_as_both() -> None:
    # GIVEN the same with 80 ms before the first launch
    gaps = [
        (step, 2, place, ms)
        for step in range(3, 9)
        for place, ms in ((Place.INPUT, 80), (Place.FORWARD, 15), (Place.BACKWARD, 15))
    ]

    assert told(*gaps) == [("host-stall", (2,), (3, 8)), ("data-stall", (2,), (3, 8))]


def test_a_late_host_shows_in_the_steps_of_checkpoints_too() -> None:
    # GIVEN a checkpoint of 300 ms after every second step, and a host that is late, by 8 ms twice
    # a step, from step 4 to 8
    gaps = [(step, rank, Place.OTHER, 300) for step in range(1, 12, 2) for rank in range(NUM_RANKS)]
    gaps += [(step, 5, Place.FORWARD, 8) for step in range(4, 9) for _ in range(2)]

    assert ("host-stall", (5,), (4, 8)) in told(*gaps)


def test_input_that_all_ranks_miss_is_told_once() -> None:
    # GIVEN 80 ms before the first compute of all ranks in steps 4 to 9
    gaps = [(step, rank, Place.INPUT, 80) for step in range(4, 10) for rank in range(NUM_RANKS)]

    assert [cause for cause, _, _ in told(*gaps)] == ["data-stall"]


def test_one_pause_of_one_rank_is_neither_health_nor_garbage_collection() -> None:
    # GIVEN a rank that stands for 200 ms before a forward, once
    assert told((7, 3, Place.FORWARD, 200)) == [("insufficient-evidence", (3,), (7, 7))]
