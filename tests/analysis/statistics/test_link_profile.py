"""Links that are slower than alike ones, than in their own other steps, or all together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from tests.support.analysis.link_builders import group, pair, profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.replay.model import Link
    from rankscope.analysis.statistics.link_profile import LinkProfile

ALL = group(*range(16))
NOISE = (0.0, 0.1, -0.1, 0.05, -0.05)


def slow_phases(ms: Sequence[float]) -> list[tuple[int, int]]:
    """Return the slow phases of a single group with these transfer times and 1 % of noise."""
    noisy = [value * (1 + NOISE[step % 5] / 10) for step, value in enumerate(ms)]
    return [(each.first, each.last) for each in profile({ALL: noisy}).slow_links]


@pytest.mark.parametrize(
    ("ms", "phases"),
    [
        ([10.0] * 4 + [13.0] * 6, [(4, 9)]),
        ([10.0] * 2 + [13.0] * 18, [(2, 19)]),
        ([13.0] * 5 + [10.0] * 5, [(0, 4)]),
        ([13.0] * 10, []),
        # One faster step is no baseline.
        ([10.0] + [13.0] * 9, []),
    ],
)
def test_a_single_group_is_compared_with_its_own_faster_steps(
    ms: list[float], phases: list[tuple[int, int]]
) -> None:
    assert slow_phases(ms) == phases


@pytest.mark.parametrize(("factor", "num_slow"), [(12.0, 1), (4.0, 1), (2.5, 0), (1.0, 0)])
def test_a_group_slow_from_the_first_step_on_is_compared_with_the_only_alike_one(
    factor: float, num_slow: int
) -> None:
    # GIVEN two groups of one size, one of which is always slower; a network may be oversubscribed
    # 3:1 by plan
    ms = [10.0 * (1 + each / 10) for each in NOISE * 2]
    groups = {group(0, 2, 4, 6): ms, group(1, 3, 5, 7): [factor * each for each in ms]}

    found = profile(groups).slow_links

    assert [(each.row, each.num_steps) for each in found] == [(1, 10)] * num_slow


def test_a_single_group_whose_steps_vary_much_is_not_slow() -> None:
    # GIVEN means of 12.6 and 10.0 ms, both with a deviation of 1.6 ms: t = 2.6 / (1.6 sqrt(1/5 +
    # 1/5)) = 2.6, while 7.7 is required for 8 degrees of freedom and 10 steps that may begin it
    varying = {ALL: [8.5, 11.5, 10.2, 8.3, 11.5, 11.0, 14.5, 12.5, 10.8, 14.2]}

    assert profile(varying).slow_links == ()


NUM_STEPS = 10
JITTER = (0.0, 0.01, -0.01, 0.005, -0.005, 0.01, 0.0, -0.01, 0.005, 0.0)
SIZE = 4
"""Ranks of a stage: stage 0 has ranks 0 to 3, stage 1 has ranks 4 to 7, ..."""


def pipelines(
    factor: dict[tuple[int, int], dict[int, float]],
    *,
    num_stages: int = 4,
    everywhere: dict[int, float] | None = None,
) -> LinkProfile:
    """Return links of 10 ms with 1 % of jitter, both ways between neighbouring stages.

    Args:
        factor: By (stage, next stage), by step: factor of these links, both ways.
        num_stages: Stages of 4 ranks each.
        everywhere: By step: factor of all links.
    """
    links: dict[Link, list[float]] = {}
    for rank in range(SIZE * (num_stages - 1)):
        stage = rank // SIZE
        slow = factor.get((stage, stage + 1), {})
        for way, (src, dst) in enumerate(((rank, rank + SIZE), (rank + SIZE, rank))):
            links[pair(src, dst)] = [
                10.0
                * (1 + JITTER[(step + rank + 3 * way) % NUM_STEPS])
                * slow.get(step, 1.0)
                * (everywhere or {}).get(step, 1.0)
                for step in range(NUM_STEPS)
            ]
    return profile(links, ranks_per_stage=SIZE)


def slow_links(found: LinkProfile) -> set[tuple[tuple[int, ...], int, int]]:
    """Return (members, first step, last step) of each slow link."""
    return {(found.links[each.row].members, each.first, each.last) for each in found.slow_links}


def rise_of(found: LinkProfile) -> tuple[tuple[int, int] | None, int, int] | None:
    """Return the stages, the first and the last step of links that became slow together."""
    rise = found.rise
    return None if rise is None else (rise.stages, rise.phase.first, rise.phase.last)


@pytest.mark.parametrize(("first", "last"), [(3, 9), (2, 9), (0, 5), (4, 7)])
def test_all_pairs_between_two_stages_that_became_slow_together_are_found(
    first: int, last: int
) -> None:
    found = pipelines({(1, 2): dict.fromkeys(range(first, last + 1), 1.5)})

    assert found.slow_links == ()
    assert rise_of(found) == ((1, 2), first, last)
    assert found.rise is not None
    assert found.rise.phase.excess_ratio == pytest.approx(0.5, abs=0.03)
    slow = [set(link.members) <= set(range(4, 12)) for link in found.links]
    assert found.rise.is_slower.tolist() == slow
    # AND a page compares them with the 10 ms of their other steps, and all others with alike ones
    assert found.usual_ns[slow] == pytest.approx(20e6, rel=0.02)


def test_one_slow_link_between_two_stages_is_compared_with_the_others() -> None:
    links = {pair(rank, rank + SIZE): [10.0] * NUM_STEPS for rank in range(3 * SIZE)}
    links[pair(5, 9)] = [10.0] * 4 + [15.0] * 6

    found = profile(links, ranks_per_stage=SIZE)

    assert slow_links(found) == {((5, 9), 4, 9)}
    assert found.rise is None


def test_pairs_between_two_stages_that_are_slow_from_the_first_step_on_are_not_found() -> None:
    assert rise_of(pipelines({(1, 2): dict.fromkeys(range(NUM_STEPS), 1.5)})) is None


def test_a_change_of_all_links_is_that_of_the_network() -> None:
    everywhere = dict.fromkeys(range(4, 10), 1.5)

    assert rise_of(pipelines({}, everywhere=everywhere)) == (None, 4, 9)


def test_links_that_vary_as_much_as_they_rose_are_not_slow() -> None:
    # GIVEN means of 10.0 and 12.6 ms in steps 0 to 4 and 5 to 9, and a common deviation of 1.6 ms:
    # t = 2.6 / (1.6 sqrt(1/5 + 1/5)) = 2.6, while more than 8 is required
    tenths = (8.5, 11.5, 10.2, 8.3, 11.5, 11.0, 14.5, 12.5, 10.8, 14.2)
    varying = {step: value / 10 for step, value in enumerate(tenths)}

    assert rise_of(pipelines({(1, 2): varying})) is None


def test_links_whose_load_changes_gradually_are_no_uplink() -> None:
    # GIVEN a wave of 40 % over 20 steps: 10, 10.1, 10.4, 10.8, 11.4, 12, ... ms, up to 14 ms. It
    # changes by at most 0.6 ms between steps, while half of the excess of its middle is 1.7 ms
    num_steps = 20
    wave = [1.2 - 0.2 * math.cos(2 * math.pi * step / num_steps) for step in range(num_steps)]
    links = {
        pair(src, dst): [
            10.0 * slow * (1 + JITTER[(step + rank) % NUM_STEPS])
            for step, slow in enumerate(wave if rank // SIZE == 1 else [1.0] * num_steps)
        ]
        for rank in range(3 * SIZE)
        for src, dst in ((rank, rank + SIZE), (rank + SIZE, rank))
    }

    assert rise_of(profile(links, ranks_per_stage=SIZE)) is None
