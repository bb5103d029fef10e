"""Which rank, pair, host or uplink the slow links have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..statistics.noise import num_deviations, robust_deviation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..replay.model import Link
    from ..trace.tables import RankInfo
    from .link_profile import SlowLink

MOST_OF_ITS_LINKS = 0.6
"""Share of a rank's links that must be slow for the rank's own connection to be at fault."""

LEAST_PAIR_EXCESS = 0.03
"""Excess of a member's pairs that narrows its slow group down to it: less than would be told of
itself, but the group's slowness is sure already."""

SAME_FACTOR = 0.8
"""Ratio of two factors from which they count as the same."""

LEAST_LINKS = 3
"""Slow links that must meet in a rank for that: a pair slow both ways has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """What some slow links have in common."""

    ranks: tuple[int, ...]
    """Global ranks at fault, ascending."""

    links: tuple[SlowLink, ...]
    place: str
    """In words: "the pair 3 - 11", "all links of rank 3"."""

    also: tuple[int, ...] = ()
    """Further links that are slow for the same reason, but would not be told by themselves."""

    against: str = "of alike ones"
    """What they are held against, in words."""


def culprits_of(
    slow: Sequence[SlowLink],
    links: Sequence[Link],
    pair_excess: Mapping[int, float],
    group_excess: Mapping[int, float],
) -> tuple[Culprit, ...]:
    """Explain slow links by as few ranks and pairs as possible.

    Ranks in which most links are slow come first, then pairs, then groups of
    which no more can be said than that one of their members is to blame.

    Args:
        slow: The slow links.
        links: All links.
        pair_excess: Of each rank with pairs, how much slower these are than alike ones, median.
        group_excess: Of each link of a group, by index, how much slower it is than the fastest
            alike one.
    """
    left = list(slow)
    found: list[Culprit] = []
    touching: Counter[int] = Counter()
    for link in links:
        if link.is_pair:
            touching.update(link.members)
    while left:
        culprit = (
            _worst_rank(left, links, touching)
            or _worst_pair(left, links, group_excess)
            or _common_members(left, links, pair_excess)
        )
        found.append(culprit)
        explained = {each.link for each in culprit.links}
        left = [each for each in left if each.link not in explained]
    return tuple(found)


def _worst_rank(
    slow: Sequence[SlowLink], links: Sequence[Link], touching: Counter[int]
) -> Culprit | None:
    num: Counter[int] = Counter()
    for each in slow:
        if links[each.link].is_pair:
            num.update(links[each.link].members)
    in_groups: Counter[int] = Counter()
    for each in slow:
        if not links[each.link].is_pair:
            in_groups.update(links[each.link].members)
    ranks = [
        rank
        for rank, count in num.items()
        if count >= LEAST_LINKS and count >= MOST_OF_ITS_LINKS * touching[rank]
    ]
    if not ranks:
        ranks = _ends_in_a_slow_group(slow, links, in_groups)
    if not ranks:
        return None
    rank = max(ranks, key=lambda each: (num[each], in_groups[each], -each))
    mine = tuple(each for each in slow if rank in links[each.link].members)
    return Culprit(ranks=(rank,), links=mine, place=f"most links of rank {rank}")


def _ends_in_a_slow_group(
    slow: Sequence[SlowLink], links: Sequence[Link], in_groups: Counter[int]
) -> list[int]:
    """Return the ends of slow pairs that also lie in a slow group, where the other end does not."""
    found = []
    for each in slow:
        link = links[each.link]
        if link.is_pair:
            ends = [rank for rank in link.members if in_groups[rank]]
            if len(ends) == 1:
                found += ends
    return found


def _worst_pair(
    slow: Sequence[SlowLink], links: Sequence[Link], group_excess: Mapping[int, float]
) -> Culprit | None:
    pairs = [each for each in slow if links[each.link].is_pair]
    if not pairs:
        return None
    worst = max(pairs, key=lambda each: each.phase.excess_ratio)
    ends = set(links[worst.link].members)
    mine = tuple(each for each in slow if ends <= set(links[each.link].members))
    low, high = sorted(ends)
    as_slow = _groups_as_slow(worst, links, group_excess)
    if len(as_slow) == 1:
        rank, groups = as_slow.popitem()
        return Culprit(
            ranks=(rank,),
            links=mine,
            place=f"the pair {low} - {high} and a group of rank {rank}, both as much slower,",
            also=tuple(groups),
        )
    return Culprit(ranks=(low, high), links=mine, place=f"the pair {low} - {high}")


def _groups_as_slow(
    pair: SlowLink, links: Sequence[Link], group_excess: Mapping[int, float]
) -> dict[int, list[int]]:
    """Return the ends of a slow pair with groups slow by the same factor, and these groups.

    A connection that is slow to one peer and in a group alike is the rank's own.
    """
    factor = 1.0 + pair.phase.excess_ratio
    found: dict[int, list[int]] = {}
    for index, excess in group_excess.items():
        if SAME_FACTOR <= (1.0 + excess) / factor <= 1.0 / SAME_FACTOR:
            for rank in set(links[pair.link].members) & set(links[index].members):
                found.setdefault(rank, []).append(index)
    return found


def _common_members(
    slow: Sequence[SlowLink], links: Sequence[Link], pair_excess: Mapping[int, float]
) -> Culprit:
    """Take the slowest group, and narrow it down by others that share some of its members.

    Of the members, one whose pairs are slower too, if less clearly, is the one.
    """
    worst = max(slow, key=lambda each: each.phase.excess_ratio)
    common, mine = set(links[worst.link].members), [worst]
    for each in sorted(slow, key=lambda each: len(links[each.link].members)):
        shared = common & set(links[each.link].members)
        if each is not worst and shared:
            common, mine = shared, [*mine, each]
    kind = links[worst.link].kind
    place = f"one {kind} group of {len(common):,} ranks"
    if len(common) < len(links[worst.link].members):
        place = "what its slow groups share"
    slower = _whose_pairs_stand_out(common, pair_excess)
    if slower is not None:
        size = len(links[worst.link].members)
        place = f"one {kind} group of {size} ranks, of which only rank {slower} is slower to others"
        common = {slower}
    return Culprit(ranks=tuple(sorted(common)), links=tuple(mine), place=place)


def _whose_pairs_stand_out(members: set[int], pair_excess: Mapping[int, float]) -> int | None:
    """Return the member whose pairs stand clear of all other ranks' pairs, if one does."""
    inside = {rank: pair_excess[rank] for rank in members if rank in pair_excess}
    if not inside:
        return None
    worst = max(inside, key=lambda rank: inside[rank])
    others = np.array([excess for rank, excess in pair_excess.items() if rank != worst])
    if len(others) < LEAST_LINKS:
        return None
    clear = max(num_deviations(len(others)) * robust_deviation(others), LEAST_PAIR_EXCESS)
    return worst if inside[worst] >= clear else None


def merged_by_place(
    culprits: Sequence[Culprit], ranks: Mapping[int, RankInfo]
) -> tuple[Culprit, ...]:
    """Merge culprits of one host, or behind one switch or rack, into one.

    Args:
        culprits: What was found by ranks alone.
        ranks: Where each rank runs.
    """
    levels: tuple[tuple[str, Callable[[RankInfo], str]], ...] = (
        ("host", lambda info: info.host),
        ("switch", lambda info: info.switch),
        ("rack", lambda info: info.rack),
    )
    for word, where in levels:
        places = {info.rank: where(info) for info in ranks.values() if where(info)}
        if len(culprits) > 1 and len(set(places.values())) > 1:
            culprits = _merged(culprits, places, word)
    return tuple(culprits)


def _merged(
    culprits: Sequence[Culprit], places: Mapping[int, str], word: str
) -> tuple[Culprit, ...]:
    """Merge the culprits that all touch one place and no other one in common."""
    touched: Counter[str] = Counter()
    for culprit in culprits:
        touched.update({places[rank] for rank in culprit.ranks if rank in places})
    if not touched:
        return tuple(culprits)
    place, num = touched.most_common(1)[0]
    if num == 1 or list(touched.values()).count(num) > 1:
        return tuple(culprits)
    mine = [each for each in culprits if place in {places.get(rank) for rank in each.ranks}]
    rest = tuple(each for each in culprits if each not in mine)
    inside = sorted({rank for each in mine for rank in each.ranks if places.get(rank) == place})
    merged = Culprit(
        ranks=tuple(inside),
        links=tuple({slow.link: slow for each in mine for slow in each.links}.values()),
        place=f"the links of {word} {place}",
    )
    return (merged, *rest)
