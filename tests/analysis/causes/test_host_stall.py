"""Hosts that launch late."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes.host_stall import find_host_stalls
from rankscope.analysis.replay.model import Place
from tests.support.analysis.gap_builders import gaps_with

if TYPE_CHECKING:
    from rankscope.analysis.causes.host_gaps import HostGaps

NUM_STEPS = 12
ALL_STEPS = np.ones(NUM_STEPS, dtype=np.bool_)

Gap = tuple[int, int, int]
"""Step, rank, ms."""


def gaps_at(place: Place, *gaps: Gap) -> HostGaps:
    """Return gaps of ranks 0 to 3 (stage 0) and 4 to 7 (stage 1)."""
    placed = [(step, rank, place, ms) for step, rank, ms in gaps]
    return gaps_with(placed, stage=np.repeat((0, 1), 4).tolist(), num_steps=NUM_STEPS)


def test_a_stall_is_steady_if_checkpoints_explain_some_of_its_steps() -> None:
    # GIVEN a host that loses 90 ms in each step, every second of which is left out
    gaps = gaps_at(Place.FORWARD, *((step, 2, 90) for step in range(NUM_STEPS)))

    (found,) = find_host_stalls(gaps, np.arange(NUM_STEPS) % 2 == 0)

    assert (found.cause.name, found.ranks) == ("host-stall", (2,))
    assert found.evidence == (
        "rank 2 loses 90.0 ms per step between launches (90 % of the compute) in steps 0 to 10;"
        " its peers lose none"
    )


@pytest.mark.parametrize("steps", [(5,), (5, 6), (2, 5, 9)])
def test_long_gaps_in_few_steps_are_no_stall(steps: tuple[int, ...]) -> None:
    gaps = gaps_at(Place.FORWARD, *((step, 2, 32) for step in steps))

    assert find_host_stalls(gaps, ALL_STEPS) == ()


def test_a_stall_begins_before_the_lead_of_its_host_is_spent() -> None:
    # GIVEN 40 ms in step 2, where the lead hides the rest, and 60 ms in steps 3 to 5
    gaps = gaps_at(Place.BACKWARD, (2, 2, 40), *((step, 2, 60) for step in (3, 4, 5)))

    (found,) = find_host_stalls(gaps, ALL_STEPS)

    assert (found.ranks, found.steps) == ((2,), (2, 5))


def test_a_late_rank_with_one_peer_is_reported_once() -> None:
    # GIVEN four stages of two ranks, and rank 0 that loses 400 ms in each step from 4 on
    gaps = gaps_with(
        [(step, 0, Place.FORWARD, 400) for step in range(4, NUM_STEPS)],
        stage=np.repeat((0, 1, 2, 3), 2).tolist(),
        num_steps=NUM_STEPS,
    )

    found = find_host_stalls(gaps, ALL_STEPS)

    assert [(each.ranks, each.steps) for each in found] == [((0,), (4, NUM_STEPS - 1))]


@pytest.mark.parametrize("stage", [(0, 0), (0, 0, 1, 1), (0, 0, 0)])
def test_of_two_ranks_the_faster_one_is_what_a_healthy_one_loses(stage: tuple[int, ...]) -> None:
    # GIVEN rank 1 that loses 50 ms in each step, and all others 5 ms
    ranks = range(len(stage))
    placed = [
        (step, rank, Place.BACKWARD, 50 if rank == 1 else 5) for step in range(12) for rank in ranks
    ]
    gaps = gaps_with(placed, stage=list(stage), num_steps=NUM_STEPS)
    items = replace(gaps.gaps, operation=np.arange(len(placed)))
    gaps = replace(gaps, gaps=items, duration_ns=items.gap_ns.astype(np.float64))

    (found,) = find_host_stalls(gaps, ALL_STEPS)

    # THEN: it loses 45 ms more of 100 ms of compute, and a fix leaves it the 5 ms
    assert found.ranks == (1,)
    assert found.excess_ratio == pytest.approx(0.45)
    assert "loses 50.0 ms per step" in found.evidence
    assert "its peers lose 5.00 ms" in found.evidence
    assert found.fixed_ns is not None
    assert found.part is not None
    assert found.fixed_ns[found.part].tolist() == [5_000_000.0] * NUM_STEPS


def test_two_slow_ranks_of_four_do_not_hide_each_other() -> None:
    placed = [
        (step, rank, Place.FORWARD, 50 if rank < 2 else 5)
        for step in range(12)
        for rank in range(4)
    ]
    gaps = gaps_with(placed, stage=[0] * 4, num_steps=NUM_STEPS)

    found = find_host_stalls(gaps, ALL_STEPS)

    assert [each.ranks for each in found] == [(0,), (1,)]
    assert [each.excess_ratio for each in found] == pytest.approx([0.45, 0.45])


def test_a_stall_that_recurs_is_named_with_its_period() -> None:
    gaps = gaps_at(Place.BACKWARD, *((step, 2, 60) for step in range(1, NUM_STEPS, 3)))

    (found,) = find_host_stalls(gaps, ALL_STEPS)

    assert (found.ranks, found.steps, found.shown_steps) == ((2,), (1, 10), (1, 4, 7, 10))
    assert "in every 3rd step (steps 1 to 10)" in found.evidence


def test_one_peer_suffices_in_a_span_of_the_job() -> None:
    # GIVEN two ranks, of which one takes 80 ms in a span for which the other needs 40 ms
    placed = [(step, rank, Place.SPAN, 40 + 40 * rank) for step in range(12) for rank in range(2)]
    gaps = gaps_with(placed, stage=[0, 0], num_steps=NUM_STEPS)

    (found,) = find_host_stalls(gaps, ALL_STEPS)

    assert (found.ranks, found.steps) == ((1,), (0, 11))
    assert found.excess_ratio == pytest.approx(0.4)


def test_a_span_that_all_ranks_take_equally_long_is_no_stall() -> None:
    placed = [(step, rank, Place.SPAN, 40) for step in range(12) for rank in range(2)]

    gaps = gaps_with(placed, stage=[0, 0], num_steps=NUM_STEPS)

    assert find_host_stalls(gaps, ALL_STEPS) == ()
