"""The rank, pair or location that slow links have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.causes.slow_link import Culprit, find_culprits
from rankscope.analysis.statistics.phases import Phase
from tests.support.analysis.link_builders import group, pair, profile

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import Link

RING = (0, 1, 2, 3)


def slow(link: int, excess: float = 1.0) -> Phase:
    return Phase(row=link, first=0, last=5, excess_ratio=excess, deviation=0.01, threshold=0.1)


def culprits_of(phases: list[Phase], links: list[Link]) -> tuple[Culprit, ...]:
    return find_culprits(profile(dict.fromkeys(links, [10.0] * 6)), phases)


def ranks_of(found: tuple[Culprit, ...]) -> list[tuple[int, ...]]:
    return [culprit.ranks for culprit in found]


def test_a_rank_all_of_whose_pairs_are_slow_is_at_fault() -> None:
    links = [pair(0, 4), pair(4, 0), pair(4, 8), pair(8, 4), pair(1, 5), pair(5, 1)]

    found = culprits_of([slow(0), slow(1), slow(2), slow(3)], links)

    assert ranks_of(found) == [(4,)]


def test_a_pair_that_is_slow_both_ways_is_named_as_a_pair() -> None:
    links = [pair(0, 4), pair(4, 0), pair(4, 8), pair(8, 4)]

    assert ranks_of(culprits_of([slow(0), slow(1)], links)) == [(0, 4)]


def test_a_slow_group_decides_which_end_of_a_slow_pair_is_at_fault() -> None:
    links = [pair(0, 4), pair(4, 0), group(0, 1, 2, 3), group(4, 5, 6, 7)]

    assert ranks_of(culprits_of([slow(0), slow(1), slow(3)], links)) == [(4,)]


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


def test_a_rank_shared_by_two_slow_groups_is_named() -> None:
    links = [group(0, 1, 2, 3), group(3, 7, 11)]

    assert ranks_of(culprits_of([slow(0), slow(1)], links)) == [(3,)]


def test_two_pairs_without_a_common_rank_are_two_culprits() -> None:
    links = [pair(0, 4), pair(1, 5)]

    assert sorted(ranks_of(culprits_of([slow(0), slow(1)], links))) == [(0, 4), (1, 5)]
