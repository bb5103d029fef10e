"""The rank, pair or location that slow links have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.causes.slow_link import Culprit, find_culprits
from rankscope.analysis.statistics.phases import Phase
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords
from tests.support.analysis.link_builders import MS, group, pair, profile

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import Link

RING = (0, 1, 2, 3)


def slow(link: int, excess: float = 1.0) -> Phase:
    return Phase(row=link, first=0, last=5, excess_ratio=excess, deviation=0.01, threshold=0.1)


def culprits_of(
    phases: list[Phase], links: list[Link], infos: dict[int, RankInfo] | None = None
) -> tuple[Culprit, ...]:
    """Return the culprits, at unknown locations if none are given."""
    return find_culprits(profile(dict.fromkeys(links, [10.0] * 6), infos=infos), phases)


BOTH_WAYS = [pair(0, 4), pair(4, 0)]


@pytest.mark.parametrize(
    ("links", "slow_links", "named"),
    [
        pytest.param(
            [*BOTH_WAYS, pair(4, 8), pair(8, 4), pair(1, 5), pair(5, 1)],
            (0, 1, 2, 3),
            [(4,)],
            id="a rank all of whose pairs are slow",
        ),
        pytest.param(
            [*BOTH_WAYS, pair(4, 8), pair(8, 4)],
            (0, 1),
            [(0, 4)],
            id="a pair that is slow both ways",
        ),
        pytest.param(
            [*BOTH_WAYS, group(*RING), group(4, 5, 6, 7)],
            (0, 1, 3),
            [(4,)],
            id="a slow group decides which end of a pair it is",
        ),
        pytest.param(
            [group(*RING), group(3, 7, 11)], (0, 1), [(3,)], id="a rank of two slow groups"
        ),
        pytest.param([pair(0, 4), pair(1, 5)], (0, 1), [(0, 4), (1, 5)], id="two pairs"),
    ],
)
def test_the_culprits_are_what_slow_links_have_in_common(
    links: list[Link], slow_links: tuple[int, ...], named: list[tuple[int, ...]]
) -> None:
    culprits = culprits_of([slow(link) for link in slow_links], links)

    assert sorted(culprit.ranks for culprit in culprits) == named


def test_a_group_slower_by_the_same_factor_decides_which_end_is_at_fault() -> None:
    # GIVEN a slow pair, and groups of its ends that take 1.9 and 1.0 times as long as the fastest
    links = {pair(0, 4): 10.0, pair(4, 0): 10.0, group(0, 1): 19.0, group(4, 5): 10.0}
    table = profile({link: [ms] * 6 for link, ms in links.items()})

    (culprit,) = find_culprits(table, [slow(0), slow(1)])

    assert (culprit.ranks, culprit.more_links) == ((0,), (2,))
    # AND one that takes 7.5 times as long is slow for another reason
    (culprit,) = find_culprits(
        profile({link: [7.5 if ms == 19.0 else ms / 10] * 6 for link, ms in links.items()}),
        [slow(0), slow(1)],
    )
    assert (culprit.ranks, culprit.more_links) == ((0, 4), ())


def test_all_members_of_a_single_slow_group_are_named() -> None:
    (culprit,) = culprits_of([slow(0)], [group(*RING)])

    assert culprit.ranks == RING
    assert culprit.location == "one dp-comm group of 4 ranks (which link is not known)"


def test_two_pairs_behind_one_switch_are_merged() -> None:
    places = {0: ("a", "s1"), 1: ("b", "s1"), 4: ("c", "s2"), 5: ("d", "s3")}
    ranks = {
        rank: RankInfo(rank=rank, coords=Coords(), host=host, switch=switch)
        for rank, (host, switch) in places.items()
    }

    (culprit,) = culprits_of([slow(0), slow(1)], [pair(0, 4), pair(1, 5)], ranks)

    assert culprit.ranks == (0, 1)
    assert culprit.location == "the links of switch s1"


@pytest.mark.parametrize(("step_ms", "found"), [(100, [3]), (3000, [])])
def test_a_link_that_is_slow_at_times_must_cost_something(step_ms: int, found: list[int]) -> None:
    """5 of 20 steps lose 2 x 9 ms: 4.5 ms a step, above one hundredth of 100 ms, below 3 s."""
    slow_at = {2, 3, 9, 14, 18}
    ms_of = {pair(rank, rank + 8): [1.0, 1.01] * 10 for rank in range(8)}
    ms_of[pair(3, 11)] = [10.0 if step in slow_at else 1.0 for step in range(20)]
    slow_links = replace(profile(ms_of), min_lost_ns=0.01 * step_ms * MS).slow_links
    assert [phase.row for phase in slow_links] == found
