from __future__ import annotations

from dataclasses import replace

import numpy as np

from rankscope.analysis.causes.link_profile import SlowLink
from rankscope.analysis.causes.slow_link import Culprit, merge_by_uplink
from rankscope.analysis.statistics.phases import Phase
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords
from tests.support.analysis.link_builders import group, pair, profile

STEPS = [10.0] * 8
PAIRS = (pair(0, 2), pair(2, 0), pair(1, 3), pair(3, 1))
WORLD = group(0, 1, 2, 3, 4, 5)
OTHERS = (pair(2, 4), pair(3, 5))
LINKS = profile(dict.fromkeys((*PAIRS, WORLD, *OTHERS), STEPS), ranks_per_stage=2)
ROSE = replace(LINKS, risen=np.array([True] * 4 + [False] * 3))
"""Links 0 to 3 are the pairs between stages 0 and 1, link 4 the group of all."""


def culprit(*links: int) -> Culprit:
    phase = Phase(row=0, first=4, last=7, excess_ratio=0.5, deviation=0.01, threshold=0.1)
    slow = tuple(
        SlowLink(link=link, phase=phase, expected_ns=10.0, transfer_ns=15.0) for link in links
    )
    ranks = LINKS.transfers.links[links[0]].members
    return Culprit(ranks=tuple(sorted(ranks)), links=slow, place="the pair")


def ranks(*hosts: str, racks: str = "") -> dict[int, RankInfo]:
    """Return ranks of three stages of two, on the hosts of each rank in turn."""
    return {
        rank: RankInfo(
            rank=rank,
            coords=Coords(dp=rank % 2, pp=rank // 2),
            host=host,
            rack=racks[rank : rank + 1],
        )
        for rank, host in enumerate(hosts)
    }


def test_pairs_between_two_stages_that_all_became_slow_are_one_uplink() -> None:
    # The first pair explains the slow group of all as well.
    found = merge_by_uplink([culprit(0, 1, 4), culprit(2, 3)], ROSE, ranks(*"aabbcc"))

    (uplink,) = found
    assert uplink.ranks == (0, 1, 2, 3)
    assert [each.link for each in uplink.links] == [0, 1, 2, 3]
    assert uplink.also == (4,)
    assert uplink.place == "all links between stages 0 and 1 (hosts a and b)"


def test_the_narrowest_place_that_each_end_has_is_named() -> None:
    racks = ranks(*"abcdef", racks="rrsstt")
    (uplink,) = merge_by_uplink([culprit(0, 1), culprit(2, 3)], ROSE, racks)
    assert uplink.place == "all links between stages 0 and 1 (racks r and s)"

    (uplink,) = merge_by_uplink([culprit(0, 1), culprit(2, 3)], ROSE, ranks(*"abcdef"))
    assert uplink.place == "all links between stages 0 and 1"


def test_pairs_that_are_slow_beside_their_mates_stay_pairs() -> None:
    pairs = (culprit(0, 1), culprit(2, 3))

    assert merge_by_uplink(pairs, LINKS, ranks(*"aabbcc")) == pairs


def test_pairs_of_several_stages_have_no_one_uplink() -> None:
    pairs = (culprit(0, 1), culprit(2, 3), culprit(5), culprit(6))
    all_rose = replace(LINKS, risen=np.array([True] * 4 + [False] + [True] * 2))

    assert merge_by_uplink(pairs, all_rose, ranks(*"aabbcc")) == pairs


def test_what_else_is_slow_stays_beside_the_uplink() -> None:
    found = merge_by_uplink([culprit(0, 1), culprit(5), culprit(2, 3)], ROSE, ranks(*"aabbcc"))

    assert [each.ranks for each in found] == [(0, 1, 2, 3), (2, 4)]
