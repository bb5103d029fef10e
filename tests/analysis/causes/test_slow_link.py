"""The rank, pair, host or uplink that slow links have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.causes.link_profile import SlowLink
from rankscope.analysis.causes.slow_link import (
    Culprit,
    find_culprits,
    merge_by_location,
    merge_by_uplink,
)
from rankscope.analysis.statistics.phases import Phase
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords
from tests.support.analysis.link_builders import group, pair, profile

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import Link

RING = (0, 1, 2, 3)


def slow(link: int, excess: float = 1.0) -> SlowLink:
    phase = Phase(row=link, first=0, last=5, excess_ratio=excess, deviation=0.01, threshold=0.1)
    return SlowLink(link=link, phase=phase, expected_ns=100.0, transfer_ns=200.0)


def culprits_of(
    found: list[SlowLink], links: list[Link], excess: dict[int, float] | None = None
) -> tuple[Culprit, ...]:
    """Return the culprits, with the excess of some links; that of the others is unknown."""
    values = np.full(len(links), np.nan)
    for link, value in (excess or {}).items():
        values[link] = value
    return find_culprits(found, links, values)


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
    links = [pair(0, 4), pair(4, 0), group(0, 1, 2, 3), group(4, 5, 6, 7)]

    (culprit,) = culprits_of([slow(0), slow(1)], links, {2: 0.9, 3: 0.0})

    assert culprit.ranks == (0,)
    assert culprit.more_links == (2,)


def test_a_group_slower_by_another_factor_does_not_decide() -> None:
    links = [pair(0, 4), pair(4, 0), group(0, 1, 2, 3), group(4, 5, 6, 7)]

    (culprit,) = culprits_of([slow(0), slow(1)], links, {2: 6.5, 3: 0.0})

    assert culprit.ranks == (0, 4)
    assert culprit.more_links == ()


def test_all_members_of_a_single_slow_group_are_named() -> None:
    (culprit,) = culprits_of([slow(0)], [group(*RING)])

    assert culprit.ranks == RING
    assert culprit.location == "one dp-comm group of 4 ranks (which link is not known)"


def test_a_member_with_slower_pairs_is_singled_out_of_a_slow_group() -> None:
    links = [group(*RING), pair(0, 4), pair(1, 5), pair(2, 6), pair(3, 7), pair(5, 9), pair(9, 5)]
    excess = {1: 0.001, 2: 0.08, 3: -0.002, 4: 0.0, 5: 0.001, 6: 0.0}

    (culprit,) = culprits_of([slow(0)], links, excess)

    assert culprit.ranks == (1,)
    assert "only rank 1 has slow pairs" in culprit.location


def test_a_rank_shared_by_two_slow_groups_is_named() -> None:
    links = [group(0, 1, 2, 3), group(3, 7, 11)]

    assert ranks_of(culprits_of([slow(0), slow(1)], links)) == [(3,)]


def test_two_pairs_without_a_common_rank_are_two_culprits() -> None:
    links = [pair(0, 4), pair(1, 5)]

    assert sorted(ranks_of(culprits_of([slow(0), slow(1)], links))) == [(0, 4), (1, 5)]


def test_two_pairs_behind_one_switch_are_merged() -> None:
    places = {0: ("a", "s1"), 1: ("b", "s1"), 4: ("c", "s2"), 5: ("d", "s3")}
    ranks = {
        rank: RankInfo(rank=rank, coords=Coords(), host=host, switch=switch)
        for rank, (host, switch) in places.items()
    }
    found = culprits_of([slow(0), slow(1)], [pair(0, 4), pair(1, 5)])

    (culprit,) = merge_by_location(found, ranks)

    assert culprit.ranks == (0, 1)
    assert culprit.location == "the links of switch s1"


PAIRS = (pair(0, 2), pair(2, 0), pair(1, 3), pair(3, 1))
LINKS = profile(
    dict.fromkeys((*PAIRS, group(0, 1, 2, 3, 4, 5), pair(2, 4), pair(3, 5)), [10.0] * 8),
    ranks_per_stage=2,
)
"""Links 0 to 3 are the pairs between stages 0 and 1, link 4 is the group of all ranks, links 5 and
6 are pairs between stages 1 and 2."""

ROSE = replace(LINKS, rose_together=np.array([True] * 4 + [False] * 3))


def culprit_of(*links: int) -> Culprit:
    ranks = LINKS.transfers.links[links[0]].members
    return Culprit(
        ranks=tuple(sorted(ranks)), links=tuple(slow(link) for link in links), location="the pair"
    )


def stages_on(*hosts: str, racks: str = "") -> dict[int, RankInfo]:
    """Return three stages of two ranks, with the host and the rack of each rank."""
    return {
        rank: RankInfo(
            rank=rank,
            coords=Coords(dp=rank % 2, pp=rank // 2),
            host=host,
            rack=racks[rank : rank + 1],
        )
        for rank, host in enumerate(hosts)
    }


def test_pairs_between_two_stages_that_became_slow_together_are_one_uplink() -> None:
    # GIVEN a first pair that explains the slow group of all ranks as well
    found = merge_by_uplink([culprit_of(0, 1, 4), culprit_of(2, 3)], ROSE, stages_on(*"aabbcc"))

    (uplink,) = found
    assert uplink.ranks == (0, 1, 2, 3)
    assert [each.link for each in uplink.links] == [0, 1, 2, 3]
    assert uplink.more_links == (4,)
    assert uplink.location == "all links between stages 0 and 1 (hosts a and b)"


def test_an_uplink_is_named_by_the_narrowest_location_of_its_ends() -> None:
    pairs = [culprit_of(0, 1), culprit_of(2, 3)]

    (uplink,) = merge_by_uplink(pairs, ROSE, stages_on(*"abcdef", racks="rrsstt"))
    assert uplink.location == "all links between stages 0 and 1 (racks r and s)"

    (uplink,) = merge_by_uplink(pairs, ROSE, stages_on(*"abcdef"))
    assert uplink.location == "all links between stages 0 and 1"


def test_pairs_that_are_slower_than_alike_ones_are_not_merged() -> None:
    pairs = (culprit_of(0, 1), culprit_of(2, 3))

    assert merge_by_uplink(pairs, LINKS, stages_on(*"aabbcc")) == pairs


def test_pairs_between_several_pairs_of_stages_are_not_one_uplink() -> None:
    pairs = (culprit_of(0, 1), culprit_of(2, 3), culprit_of(5), culprit_of(6))
    all_rose = replace(LINKS, rose_together=np.array([True] * 4 + [False] + [True] * 2))

    assert merge_by_uplink(pairs, all_rose, stages_on(*"aabbcc")) == pairs


def test_another_slow_link_stays_beside_the_uplink() -> None:
    found = merge_by_uplink(
        [culprit_of(0, 1), culprit_of(5), culprit_of(2, 3)], ROSE, stages_on(*"aabbcc")
    )

    assert [each.ranks for each in found] == [(0, 1, 2, 3), (2, 4)]
