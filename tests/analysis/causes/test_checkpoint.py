"""Steps in which all ranks pause: checkpoints, evaluations, or missing input."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.causes.common_pause import list_pauses
from rankscope.analysis.causes.host_gaps import find_common_pauses
from rankscope.analysis.replay.model import Place
from tests.support.analysis.gap_builders import gaps_with, host_candidates

NUM_RANKS, NUM_STEPS = 4, 12

Pause = tuple[int, Place, int]
"""Step, place, ms."""


def findings(*pauses: Pause) -> list[tuple[str, tuple[int, int], bool]]:
    """Return (cause, steps, is_alarm) of what is found if all ranks have these pauses."""
    gaps = [(step, rank, place, ms) for step, place, ms in pauses for rank in range(NUM_RANKS)]
    found = host_candidates(gaps_with(gaps, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS))
    return [(each.cause.name, each.steps, each.cause.is_alarm) for each in found]


LONG_AND_SHORT = [(4, Place.INPUT, 300), (9, Place.INPUT, 300)]
LONG_AND_SHORT += [(step, Place.INPUT, 100) for step in (3, 7, 11)]
SAVE = (2, Place.CHECKPOINT, 300)


@pytest.mark.parametrize(
    ("pauses", "found"),
    [
        # Equal distances without a save have no name; others, and consecutive steps, are input.
        ([(7, Place.INPUT, 300)], [("common-pause", (7, 7), False)]),
        ([(step, Place.INPUT, 300) for step in (3, 8)], [("common-pause", (3, 8), False)]),
        ([(step, Place.INPUT, 300) for step in (1, 5, 9)], [("common-pause", (1, 9), False)]),
        ([(step, Place.INPUT, 300) for step in (3, 4)], [("data-stall", (3, 4), True)]),
        ([(step, Place.INPUT, 300) for step in (1, 3, 9)], [("data-stall", (1, 9), True)]),
        ([(step, Place.INPUT, 300) for step in (5, 6, 7, 8)], [("data-stall", (5, 8), True)]),
        # So are regular ones in data spans.
        ([(step, Place.DATA, 300) for step in (3, 8)], [("data-stall", (3, 8), True)]),
        # 300 ms every 5 steps and 100 ms every 4 steps are two regular series.
        (LONG_AND_SHORT, [("common-pause", (3, 11), False)]),
        # A save does not hide missing input.
        (
            [SAVE, (6, Place.INPUT, 80), (7, Place.INPUT, 80)],
            [("checkpoint", (2, 2), False), ("data-stall", (6, 7), True)],
        ),
        # Irregular evaluations are neither.
        ([(step, Place.EVALUATION, 300) for step in (1, 3, 9)], []),
    ],
)
def test_a_pause_of_all_ranks_has_its_cause(
    pauses: list[Pause], found: list[tuple[str, tuple[int, int], bool]]
) -> None:
    assert findings(*pauses) == found


def test_pauses_while_one_rank_saves_are_checkpoints() -> None:
    # GIVEN 300 ms in steps 3 and 4 on all ranks, of which rank 0 recorded what it saved
    gaps = [
        (step, rank, Place.CHECKPOINT if rank == 0 else Place.INPUT, 300)
        for step in (3, 4)
        for rank in range(NUM_RANKS)
    ]
    (found,) = host_candidates(gaps_with(gaps, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS))

    assert (found.cause.name, found.steps) == ("checkpoint", (3, 4))


def test_pauses_in_steps_with_a_checkpoint_event_are_checkpoints() -> None:
    gaps = [(step, rank, Place.INPUT, 300) for step in (3, 8) for rank in range(NUM_RANKS)]
    table = gaps_with(gaps, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS)

    assert find_common_pauses(table, np.array([8])).is_saved.tolist() == [False, True]


def test_pauses_are_listed_with_what_they_are() -> None:
    # GIVEN a save and an evaluation of 300 ms, and no input for 80 ms in two steps of a row
    pauses = [(2, Place.CHECKPOINT, 300), (4, Place.EVALUATION, 300)]
    pauses += [(step, Place.INPUT, 80) for step in (6, 7)]
    gaps = [(step, rank, place, ms) for step, place, ms in pauses for rank in range(NUM_RANKS)]
    table = gaps_with(gaps, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS)

    found = list_pauses(find_common_pauses(table), table.profile.steps)

    assert [(each.step, each.name, each.seconds) for each in found] == [
        (2, "checkpoint", 0.3),
        (4, "evaluation", 0.3),
        (6, "late input", 0.08),
        (7, "late input", 0.08),
    ]
