"""Launch skew all over a job: each group now and then, by hand-made gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes.launch_skew import find_launch_skews
from rankscope.analysis.replay.model import Place
from tests.support.analysis.stall_builders import stalls_with

if TYPE_CHECKING:
    from rankscope.analysis.causes.candidate import Candidate
    from rankscope.analysis.causes.host_gaps import HostGaps

NUM_RANKS, NUM_STEPS = 15, 14
GROUPS = tuple((rank, rank + 1, rank + 2) for rank in range(0, NUM_RANKS, 3))
ALL_STEPS = np.ones(NUM_STEPS, dtype=np.bool_)

LATE_MS = (40, 0, 20, 0, 30, 0, 10, 40, 0, 30)
"""By how much a group's last member is late, step by step: 17 ms in the mean."""


def stalls(late_ms: dict[tuple[int, int], int]) -> HostGaps:
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
    return find_launch_skews(stalls(late_ms), GROUPS, ALL_STEPS, frozenset())


def test_groups_that_are_late_all_over_the_job_now_and_then_are_a_skew() -> None:
    (found,) = told(in_turn(4))

    # Ranks 2, 9 and 14 never were: where it was their turn, nobody was late.
    assert (found.cause.name, found.ranks) == ("launch-skew", (0, 1, *range(3, 9), 10, 11, 12, 13))
    assert found.steps[0] == 4
    assert found.steps[1] >= 11
    assert found.evidence.startswith(
        "now one and now another of 12 ranks launches a collective of one of 5 groups, in the mean "
    )


def test_a_skew_from_the_first_step_on_is_told_too() -> None:
    (found,) = told(in_turn(0))

    assert (found.cause.name, found.steps[0]) == ("launch-skew", 0)
    assert found.steps[1] >= 11


def test_a_lateness_of_a_few_percent_is_not_told() -> None:
    # 17 ms in the mean, less by a factor of 4: 4 % of the compute.
    assert told(in_turn(4, share=0.25)) == ()


def test_one_group_that_is_late_once_is_no_skew() -> None:
    assert told({(6, 2): 300}) == ()
    assert told({(6, 2): 300, (9, 5): 300}) == ()


def test_a_job_of_few_groups_has_none_that_tell_how_sure_their_mean_is() -> None:
    late = in_turn(4, groups=3)

    assert find_launch_skews(stalls(late), GROUPS[:3], ALL_STEPS, frozenset()) == ()


def ddp(late_ms: dict[tuple[int, int], int], place: Place) -> tuple[Candidate, ...]:
    """Return what is told of two groups of six ranks."""
    gaps = [(step, rank, place, ms) for (step, rank), ms in late_ms.items()]
    found = stalls_with(gaps, stage=[0] * 12, num_steps=NUM_STEPS)
    groups = tuple(range(6)), tuple(range(6, 12))
    return find_launch_skews(found, groups, ALL_STEPS, frozenset())


RISES_AND_FALLS = {4: (1, 15), 5: (1, 40), 6: (3, 15), 7: (3, 40), 8: (1, 15), 9: (3, 40)}
"""By step, (rank, ms): of 100 ms of compute 15 % or 40 %, now one rank and now another."""


@pytest.mark.parametrize("place", [Place.LAUNCH, Place.OTHER])
def test_members_that_stop_after_their_compute_in_turn_are_a_skew(place: Place) -> None:
    # GIVEN reductions that DDP launches inside the backward, so that hosts stop before the
    # optimizer: between 15 and 40 ms, which from step to step is more than the lateness itself
    found = ddp({(step, rank): ms for step, (rank, ms) in RISES_AND_FALLS.items()}, place)

    ((cause, ranks),) = [(each.cause.name, each.ranks) for each in found]
    assert (cause, ranks) == ("launch-skew", (1, 3))
    # The middle of 40, 15, 40, 15 and 40
    assert found[0].steps == (5, 9)
    assert found[0].excess_ratio == pytest.approx(0.4)
    what = "launches" if place is Place.LAUNCH else "stops after its compute and enters"
    assert f"of 2 ranks {what} a collective of 6 members 40.0 ms after" in found[0].evidence


@pytest.mark.parametrize("place", [Place.LAUNCH, Place.OTHER])
def test_members_in_time_but_for_two_steps_are_no_skew(place: Place) -> None:
    # GIVEN that the others are always in time, so that nothing is noise
    assert ddp({(3, 1): 40, (8, 3): 40}, place) == ()
    assert ddp({(3, 1): 40, (4, 3): 40}, place) == ()


def test_members_late_by_a_few_percent_in_turn_are_no_skew() -> None:
    assert ddp({(step, step % 6): 4 for step in range(NUM_STEPS)}, Place.OTHER) == ()
