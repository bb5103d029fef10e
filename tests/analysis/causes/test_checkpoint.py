"""Steps in which all ranks stand still: which are checkpoints and which are missing input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes.host_gaps import common_pauses
from rankscope.analysis.replay.model import Place
from tests.support.analysis.stall_builders import host_candidates, stalls_with

if TYPE_CHECKING:
    from rankscope.analysis.causes.host_gaps import HostGaps

NUM_RANKS, NUM_STEPS = 4, 12

Dip = tuple[int, Place, int]
"""Step, place, how long in ms."""


def stalls(*dips: Dip) -> HostGaps:
    """Return ranks that all have these gaps."""
    gaps = [(step, rank, place, ms) for step, place, ms in dips for rank in range(NUM_RANKS)]
    return stalls_with(gaps, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS)


def told(*dips: Dip) -> list[tuple[str, tuple[int, int], bool]]:
    found = host_candidates(stalls(*dips))
    return [(each.cause.name, each.steps, each.cause.is_alarm) for each in found]


@pytest.mark.parametrize("steps", [(7,), (3, 8), (1, 5, 9)])
def test_dips_of_one_length_at_equal_distances_are_checkpoints(steps: tuple[int, ...]) -> None:
    dips = [(step, Place.INPUT, 300) for step in steps]

    assert told(*dips) == [("checkpoint", (steps[0], steps[-1]), False)]


@pytest.mark.parametrize("steps", [(3, 4), (1, 3, 9), (5, 6, 7, 8)])
def test_dips_one_after_the_other_or_at_unequal_distances_are_missing_input(
    steps: tuple[int, ...],
) -> None:
    dips = [(step, Place.INPUT, 300) for step in steps]

    assert told(*dips) == [("data-stall", (steps[0], steps[-1]), True)]


def test_a_dip_in_data_spans_is_missing_input_however_regular() -> None:
    assert told((3, Place.DATA, 300), (8, Place.DATA, 300)) == [("data-stall", (3, 8), True)]


def test_checkpoints_and_shorter_evaluations_are_two_series() -> None:
    # GIVEN 300 ms after every 5 steps and 100 ms after every 4: at 4, 9 and at 3, 7, 11
    dips = [(4, Place.INPUT, 300), (9, Place.INPUT, 300)]
    dips += [(step, Place.INPUT, 100) for step in (3, 7, 11)]

    assert told(*dips) == [("checkpoint", (3, 11), False)]


def test_checkpoints_in_spans_do_not_hide_missing_input() -> None:
    # GIVEN a checkpoint in its span in step 2, and no input in steps 6 and 7
    dips = [(2, Place.CHECKPOINT, 300), (6, Place.INPUT, 80), (7, Place.INPUT, 80)]

    assert told(*dips) == [("checkpoint", (2, 2), False), ("data-stall", (6, 7), True)]


def test_a_dip_after_the_compute_leaves_the_rest_of_its_step_to_tell() -> None:
    # GIVEN 300 ms after the compute of step 3, and 4 ms before a forward in all steps
    gaps = stalls((3, Place.OTHER, 300), *((step, Place.FORWARD, 4) for step in range(NUM_STEPS)))

    pauses = common_pauses(gaps)

    assert np.flatnonzero(~pauses.other_steps).tolist() == [3]
    assert np.argwhere(pauses.places).tolist() == [[Place.OTHER, 3]]
