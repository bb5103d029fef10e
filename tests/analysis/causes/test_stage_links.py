"""Links between two stages that all became slow together, told by hand-made transfers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.causes.link_profile import find_slow_links
from tests.support.analysis.link_builders import pair, profile

if TYPE_CHECKING:
    from rankscope.analysis.causes.link_profile import LinkProfile
    from rankscope.analysis.replay.model import Link

NUM_STEPS = 10
JITTER = (0.0, 0.01, -0.01, 0.005, -0.005, 0.01, 0.0, -0.01, 0.005, 0.0)
SIZE = 4
"""Ranks of a stage: stage 0 has 0 to 3, stage 1 has 4 to 7, ..."""


def pipelines(
    factor: dict[tuple[int, int], dict[int, float]],
    *,
    num_stages: int = 4,
    everywhere: dict[int, float] | None = None,
) -> LinkProfile:
    """Return links of 10 ms, both ways between neighbouring stages, that jitter by 1 %.

    Args:
        factor: By (stage, next stage), both ways: by step, how many times as long.
        num_stages: Stages of 4 ranks each.
        everywhere: By step, how many times as long all links take.
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


def told(found: LinkProfile) -> set[tuple[tuple[int, ...], int, int]]:
    """Return (members, first step, last step) of each slow link."""
    return {
        (found.transfers.links[each.link].members, each.phase.first, each.phase.last)
        for each in find_slow_links(found, 0.0)
    }


def between(low: int, high: int, first: int, last: int) -> set[tuple[tuple[int, ...], int, int]]:
    """Return all links between two stages, both ways, with these steps."""
    ends = [(SIZE * low + place, SIZE * high + place) for place in range(SIZE)]
    return {(way, first, last) for end in ends for way in (end, end[::-1])}


@pytest.mark.parametrize(("first", "last"), [(3, 9), (2, 9), (0, 5), (4, 7)])
def test_all_links_between_two_stages_that_became_slow_together_are_found(
    first: int, last: int
) -> None:
    found = pipelines({(1, 2): dict.fromkeys(range(first, last + 1), 1.5)})

    assert told(found) == between(1, 2, first, last)
    # 15 ms against 10 ms.
    for each in find_slow_links(found, 0.0):
        assert each.phase.excess_ratio == pytest.approx(0.5, abs=0.03)
        assert each.expected_ns == pytest.approx(10e6, rel=0.02)
    slow = [set(link.members) <= set(range(4, 12)) for link in found.transfers.links]
    assert found.risen.tolist() == slow


def test_one_slow_link_among_them_is_held_against_its_mates() -> None:
    links = {pair(rank, rank + SIZE): [10.0] * NUM_STEPS for rank in range(3 * SIZE)}
    links[pair(5, 9)] = [10.0] * 4 + [15.0] * 6

    found = profile(links, ranks_per_stage=SIZE)

    assert told(found) == {((5, 9), 4, 9)}
    assert not found.risen.any()


def test_links_slow_from_the_first_step_on_prove_nothing() -> None:
    assert told(pipelines({(1, 2): dict.fromkeys(range(NUM_STEPS), 1.5)})) == set()


def test_what_all_links_do_is_not_these_links_own() -> None:
    # Three times as long in a first step that opens connections, and 1.5 times from step 4 on.
    everywhere = {0: 3.0} | dict.fromkeys(range(4, 10), 1.5)

    assert told(pipelines({}, everywhere=everywhere)) == set()
    # The same beside an uplink that is slow from step 5 to 8.
    both = pipelines({(0, 1): dict.fromkeys(range(5, 9), 2.0)}, everywhere=everywhere)
    assert told(both) == between(0, 1, 5, 8)


def test_links_that_stayed_while_all_others_became_faster_did_nothing() -> None:
    faster = dict.fromkeys(range(5, 10), 0.5)

    assert told(pipelines({(0, 1): faster, (2, 3): faster})) == set()


def test_links_whose_load_rises_and_falls_bit_by_bit_did_not_become_slow() -> None:
    # A wave of 40 %: 10, 11.4, 12.8, 13.7, 14, ... ms. At most 1.5 ms from one step to the next,
    # where half of what steps 2 to 6 exceed the others by is about 2 ms.
    wave = {step: 1.0 + 0.4 * math.sin(math.pi * step / 8) for step in range(NUM_STEPS)}

    assert told(pipelines({(1, 2): wave})) == set()


def test_the_links_of_two_stages_alone_have_nothing_to_be_held_against() -> None:
    slow = {(0, 1): dict.fromkeys(range(3, 10), 1.5)}

    assert told(pipelines(slow, num_stages=2)) == set()
    assert told(pipelines(slow, num_stages=3)) == between(0, 1, 3, 9)


def test_half_of_all_links_that_are_slow_for_a_while_are_no_noise() -> None:
    slow = {(0, 1): dict.fromkeys(range(3, 7), 1.5)}

    assert told(pipelines(slow, num_stages=3)) == between(0, 1, 3, 6)


def test_links_that_vary_as_much_as_they_rose_prove_nothing() -> None:
    # Means of steps 5 to 9 and 0 to 4 are 12.6 and 10.0 ms; all of them vary by about 1.6 ms
    # together: t = 2.6 / (1.6 sqrt(1/5 + 1/5)) = 2.6, where more than 8 is asked.
    tenths = (8.5, 11.5, 10.2, 8.3, 11.5, 11.0, 14.5, 12.5, 10.8, 14.2)
    varying = {step: value / 10 for step, value in enumerate(tenths)}

    assert told(pipelines({(1, 2): varying})) == set()
