from __future__ import annotations

from rankscope.analysis.causes.link_profile import SlowLink
from rankscope.analysis.causes.slow_link import Culprit, find_culprits, merge_by_location
from rankscope.analysis.replay.model import Link
from rankscope.analysis.statistics.phases import Phase
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords

RING = (0, 1, 2, 3)


def pair(src: int, dst: int) -> Link:
    return Link(members=(src, dst), kind="pp-send", is_pair=True)


def group(*members: int) -> Link:
    return Link(members=members, kind="dp-comm", is_pair=False)


def slow(link: int, excess: float = 1.0) -> SlowLink:
    phase = Phase(row=link, first=0, last=5, excess_ratio=excess, deviation=0.01, threshold=0.1)
    return SlowLink(link=link, phase=phase, expected_ns=100.0, transfer_ns=200.0)


def ranks_of(found: tuple[Culprit, ...]) -> list[tuple[int, ...]]:
    return [culprit.ranks for culprit in found]


def test_links_that_all_meet_in_one_rank_are_its_own_fault() -> None:
    links = [pair(0, 4), pair(4, 0), pair(4, 8), pair(8, 4), pair(1, 5), pair(5, 1)]

    found = find_culprits([slow(0), slow(1), slow(2), slow(3)], links, {}, {})

    assert ranks_of(found) == [(4,)]


def test_a_pair_slow_both_ways_is_named_as_a_pair() -> None:
    links = [pair(0, 4), pair(4, 0), pair(4, 8), pair(8, 4)]

    assert ranks_of(find_culprits([slow(0), slow(1)], links, {}, {})) == [(0, 4)]


def test_a_slow_group_tells_which_end_of_a_slow_pair_it_is() -> None:
    links = [pair(0, 4), pair(4, 0), group(0, 1, 2, 3), group(4, 5, 6, 7)]

    assert ranks_of(find_culprits([slow(0), slow(1), slow(3)], links, {}, {})) == [(4,)]


def test_a_group_slow_by_the_same_factor_tells_which_end_of_a_slow_pair_it_is() -> None:
    links = [pair(0, 4), pair(4, 0), group(0, 1, 2, 3), group(4, 5, 6, 7)]

    (culprit,) = find_culprits([slow(0), slow(1)], links, {}, {2: 0.9, 3: 0.0})

    assert culprit.ranks == (0,)
    assert culprit.also == (2,)


def test_a_group_slower_by_another_factor_leaves_a_slow_pair_a_pair() -> None:
    links = [pair(0, 4), pair(4, 0), group(0, 1, 2, 3), group(4, 5, 6, 7)]

    (culprit,) = find_culprits([slow(0), slow(1)], links, {}, {2: 6.5, 3: 0.0})

    assert culprit.ranks == (0, 4)
    assert culprit.also == ()


def test_of_a_slow_group_alone_all_members_are_named() -> None:
    assert ranks_of(find_culprits([slow(0)], [group(*RING)], {}, {})) == [RING]


def test_the_member_whose_pairs_are_slower_too_is_picked_from_a_slow_group() -> None:
    excess = {0: 0.001, 1: 0.08, 2: -0.002, 3: 0.0, 4: 0.002, 5: -0.001, 6: 0.001, 7: 0.0}

    (culprit,) = find_culprits([slow(0)], [group(*RING)], excess, {})

    assert culprit.ranks == (1,)
    assert "only rank 1" in culprit.place


def test_two_slow_groups_that_share_one_rank_name_it() -> None:
    links = [group(0, 1, 2, 3), group(3, 7, 11)]

    assert ranks_of(find_culprits([slow(0), slow(1)], links, {}, {})) == [(3,)]


def test_pairs_far_apart_stay_two_findings() -> None:
    links = [pair(0, 4), pair(1, 5)]

    assert sorted(ranks_of(find_culprits([slow(0), slow(1)], links, {}, {}))) == [(0, 4), (1, 5)]


def test_two_flows_behind_one_switch_name_its_uplink() -> None:
    places = {0: ("a", "s1"), 1: ("b", "s1"), 4: ("c", "s2"), 5: ("d", "s3")}
    ranks = {
        rank: RankInfo(rank=rank, coords=Coords(), host=host, switch=switch)
        for rank, (host, switch) in places.items()
    }
    found = find_culprits([slow(0), slow(1)], [pair(0, 4), pair(1, 5)], {}, {})

    (culprit,) = merge_by_location(found, ranks)

    assert culprit.ranks == (0, 1)
    assert culprit.place == "the links of switch s1"
