"""Launch skew all over a job: each group now and then, by hand-made gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.evidence import Place
from analysis.skews import launch_skews
from tests.analysis.stall_builders import stalls_with

if TYPE_CHECKING:
    from analysis.candidate import Candidate
    from analysis.stalls import Stalls

NUM_RANKS, NUM_STEPS = 15, 14
GROUPS = tuple((rank, rank + 1, rank + 2) for rank in range(0, NUM_RANKS, 3))
ALL_STEPS = np.ones(NUM_STEPS, dtype=np.bool_)

LATE_MS = (40, 0, 20, 0, 30, 0, 10, 40, 0, 30)
"""By how much a group's last member is late, step by step: 17 ms in the mean."""


def stalls(late_ms: dict[tuple[int, int], int]) -> Stalls:
    """Return one stage of ranks.

    Args:
        late_ms: By (step, rank): how long it stands before it launches its reduction.
    """
    gaps = [(step, rank, Place.LAUNCH, ms) for (step, rank), ms in late_ms.items()]
    return stalls_with(gaps, stage=[0] * NUM_RANKS, num_steps=NUM_STEPS)


def in_turn(
    first: int, last: int = 13, *, share: float = 1.0, groups: int = len(GROUPS)
) -> dict[tuple[int, int], int]:
    """Return groups whose members are late in turn."""
    return {
        (step, group[(step + 2 * place) % 3]): round(
            share * LATE_MS[(step + 3 * place) % len(LATE_MS)]
        )
        for place, group in enumerate(GROUPS[:groups])
        for step in range(first, last + 1)
    }


def told(late_ms: dict[tuple[int, int], int]) -> tuple[Candidate, ...]:
    return launch_skews(stalls(late_ms), GROUPS, ALL_STEPS, frozenset())


def test_groups_that_are_late_all_over_the_job_now_and_then_are_a_skew() -> None:
    (found,) = told(in_turn(4))

    # Ranks 2, 9 and 14 never were: where it was their turn, nobody was late.
    assert (found.cause, found.ranks) == ("launch-skew", (0, 1, *range(3, 9), 10, 11, 12, 13))
    assert found.steps[0] == 4
    assert found.steps[1] >= 11
    assert found.evidence.startswith(
        "now one and now another of 12 ranks launches a collective of one of 5 groups, in the mean "
    )


def test_a_skew_from_the_first_step_on_is_told_too() -> None:
    (found,) = told(in_turn(0))

    assert (found.cause, found.steps[0]) == ("launch-skew", 0)
    assert found.steps[1] >= 11


def test_a_lateness_of_a_few_percent_is_not_told() -> None:
    # 17 ms in the mean, less by a factor of 4: 4 % of the compute.
    assert told(in_turn(4, share=0.25)) == ()


def test_one_group_that_is_late_once_is_no_skew() -> None:
    assert told({(6, 2): 300}) == ()
    assert told({(6, 2): 300, (9, 5): 300}) == ()


def test_a_job_of_few_groups_has_none_that_tell_how_sure_their_mean_is() -> None:
    late = in_turn(4, groups=3)

    assert launch_skews(stalls(late), GROUPS[:3], ALL_STEPS, frozenset()) == ()
