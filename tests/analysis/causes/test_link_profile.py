from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.causes.link_profile import find_slow_links
from tests.support.analysis.link_builders import group, profile

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL = group(*range(16))
NOISE = (0.0, 0.1, -0.1, 0.05, -0.05)


def phases(ms: Sequence[float]) -> list[tuple[int, int]]:
    """Return the slow phases of a lone group that takes so long, give or take 1 %."""
    noisy = [value * (1 + NOISE[step % 5] / 10) for step, value in enumerate(ms)]
    return [
        (each.phase.first, each.phase.last) for each in find_slow_links(profile({ALL: noisy}), 0.0)
    ]


def test_a_lone_group_that_became_slower_is_held_against_its_own_past() -> None:
    # WHEN it takes 13 instead of 10 ms from step 4 on, and from step 2 of 20 on.
    assert phases([10.0] * 4 + [13.0] * 6) == [(4, 9)]
    assert phases([10.0] * 2 + [13.0] * 18) == [(2, 19)]


def test_a_lone_group_that_was_slow_from_the_first_step_until_some_later_one_is_told() -> None:
    assert phases([13.0] * 5 + [10.0] * 5) == [(0, 4)]


def test_a_lone_group_that_never_changed_proves_nothing() -> None:
    assert phases([13.0] * 10) == []
    # One step alone that was faster is no past either.
    assert phases([10.0] + [13.0] * 9) == []


def test_a_lone_group_whose_steps_vary_as_much_as_its_phase_exceeds_them_proves_nothing() -> None:
    # Means 12.6 and 10.0 ms; each varies by about 1.6 ms: t = 2.6 / (1.6 sqrt(1/5 + 1/5)) = 2.6,
    # and 7.7 is asked of 8 degrees of freedom where any of 10 steps might have begun it.
    varying = {ALL: [8.5, 11.5, 10.2, 8.3, 11.5, 11.0, 14.5, 12.5, 10.8, 14.2]}

    assert find_slow_links(profile(varying), 0.0) == ()
