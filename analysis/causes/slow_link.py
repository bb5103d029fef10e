"""Which rank, pair, host or uplink the slow links have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians, row_medians
from ..arrays.grouping import factorize
from ..report.text import format_duration, format_percent
from ..statistics.noise import required_deviations, robust_deviation
from ..statistics.phases import MIN_EXCESS_RATIO
from .candidate import Candidate
from .detector import Cause, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..replay.model import Link
    from ..trace.tables import RankInfo
    from .link_profile import LinkProfile, SlowLink

MIN_SLOW_LINKS_SHARE = 0.6
"""Share of a rank's links that must be slow for the rank's own connection to be at fault."""

MIN_PAIR_EXCESS = 0.03
"""Excess of a member's pairs that narrows its slow group down to it: less than would be told of
itself, but the group's slowness is sure already."""

MIN_FACTOR_RATIO = 0.8
"""Ratio of two factors from which they count as the same."""

MIN_LINKS = 3
"""Slow links that must meet in a rank for that: a pair slow both ways has two."""

LEVELS: tuple[tuple[str, Callable[[RankInfo], str]], ...] = (
    ("hosts", lambda info: info.host),
    ("switches", lambda info: info.switch),
    ("racks", lambda info: info.rack),
)
"""Places that may lie at the two ends of an uplink, the narrowest first."""

MIN_LOST_RATIO = 0.0001
"""Share of a step that a slow link must lose to be told: below, the clock's own noise rules."""

MIN_UNEXPLAINED_RATIO = 0.01
"""Share of a step that a link must lose beyond what a slow device at its end explains. What slows
a device may hold up its transfers by more than its compute; so little is no ground to tell a second
fault on."""


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


CAUSE = Cause(
    name="slow-link",
    subject=Subject.LINK,
    one="has a slow link",
    several="share a slow link",
    has_place=True,
)


def find_culprits(
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
        if count >= MIN_LINKS and count >= MIN_SLOW_LINKS_SHARE * touching[rank]
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
        if MIN_FACTOR_RATIO <= (1.0 + excess) / factor <= 1.0 / MIN_FACTOR_RATIO:
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
    slower = _member_with_slow_pairs(common, pair_excess)
    if slower is not None:
        size = len(links[worst.link].members)
        place = f"one {kind} group of {size} ranks, of which only rank {slower} is slower to others"
        common = {slower}
    return Culprit(ranks=tuple(sorted(common)), links=tuple(mine), place=place)


def _member_with_slow_pairs(members: set[int], pair_excess: Mapping[int, float]) -> int | None:
    """Return the member whose pairs stand clear of all other ranks' pairs, if one does."""
    inside = {rank: pair_excess[rank] for rank in members if rank in pair_excess}
    if not inside:
        return None
    worst = max(inside, key=lambda rank: inside[rank])
    others = np.array([excess for rank, excess in pair_excess.items() if rank != worst])
    if len(others) < MIN_LINKS:
        return None
    clear = max(required_deviations(len(others)) * robust_deviation(others), MIN_PAIR_EXCESS)
    return worst if inside[worst] >= clear else None


def merge_by_location(
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


def merge_by_uplink(
    culprits: Sequence[Culprit], profile: LinkProfile, ranks: Mapping[int, RankInfo]
) -> tuple[Culprit, ...]:
    """Merge the pairs between two stages of which all became slow together into one culprit.

    Where such pairs lie between several pairs of stages it is no one uplink, and nothing is merged.

    Args:
        culprits: What was found link by link.
        profile: Transfers by link and step.
        ranks: Where each rank runs.
    """
    links = profile.transfers.links
    together: list[Culprit] = []
    between: dict[tuple[int, int], list[int]] = defaultdict(list)
    for culprit in culprits:
        pairs = [each.link for each in culprit.links if links[each.link].is_pair]
        if pairs and all(profile.risen[link] for link in pairs):
            together.append(culprit)
            for link in pairs:
                low, high = sorted(ranks[rank].coords.pp for rank in links[link].members)
                between[low, high].append(link)
    if len(together) <= 1 or len(between) > 1:
        return tuple(culprits)
    ((stages, pairs),) = between.items()
    rest = tuple(each for each in culprits if not any(each is one for one in together))
    return (_uplink(together, stages, pairs, profile, ranks), *rest)


def _uplink(
    together: Sequence[Culprit],
    stages: tuple[int, int],
    pairs: Sequence[int],
    profile: LinkProfile,
    ranks: Mapping[int, RankInfo],
) -> Culprit:
    links = profile.transfers.links
    slow = {each.link: each for culprit in together for each in culprit.links}
    # Groups that hold such a pair are as slow as it is.
    also = {link for culprit in together for link in culprit.also} | (set(slow) - set(pairs))
    members = sorted({rank for link in pairs for rank in links[link].members})
    return Culprit(
        ranks=tuple(members),
        links=tuple(slow[link] for link in pairs),
        place=_place(stages, [ranks[rank] for rank in members]),
        also=tuple(sorted(also)),
        against="in other steps, with what links between other stages changed by taken out",
    )


def _place(stages: tuple[int, int], members: Sequence[RankInfo]) -> str:
    """Name the two stages, and what lies at their ends where that is one place each."""
    if stages[0] == stages[1]:
        return f"all links within stage {stages[0]}"
    text = f"all links between stages {stages[0]} and {stages[1]}"
    for word, where in LEVELS:
        ends = [{where(each) for each in members if each.coords.pp == stage} for stage in stages]
        if all(len(end) == 1 for end in ends) and ends[0] != ends[1]:
            (low,), (high,) = ends
            if low and high:
                return f"{text} ({word} {low} and {high})"
    return text


def excess_of_pairs(profile: LinkProfile, slow: Sequence[SlowLink]) -> dict[int, float]:
    """Return the median excess of each rank's pairs over the steps in which links are slow."""
    if not slow:
        return {}
    columns = _slow_columns(slow)
    excess = row_medians(profile.total_ns[:, columns] / profile.expected_ns[:, columns]) - 1.0
    by_rank: dict[int, list[float]] = defaultdict(list)
    for link, value in zip(profile.transfers.links, excess.tolist(), strict=True):
        if link.is_pair and not np.isnan(value):
            for rank in link.members:
                by_rank[rank].append(value)
    return {rank: float(np.median(values)) for rank, values in by_rank.items()}


def _slow_columns(slow: Sequence[SlowLink]) -> slice:
    return slice(min(each.phase.first for each in slow), max(each.phase.last for each in slow) + 1)


def excess_of_groups(profile: LinkProfile, slow: Sequence[SlowLink]) -> dict[int, float]:
    """Return how much slower than the fastest alike group each is over the slow steps."""
    if not slow:
        return {}
    transfers, steps = profile.transfers, profile.steps[_slow_columns(slow)]
    is_group = np.array([not link.is_pair for link in transfers.links])
    rows = np.flatnonzero(is_group[transfers.link] & np.isin(transfers.step, steps))
    if not len(rows):
        return {}
    cell, num = factorize(transfers.alike[rows], transfers.link[rows])
    medians, _ = group_medians(transfers.transfer_ns[rows], cell, num)
    of_cell = np.zeros(num, dtype=np.int64)
    of_cell[cell] = rows
    alike, link = transfers.alike[of_cell], transfers.link[of_cell]
    fastest = np.full(int(alike.max()) + 1, np.inf)
    np.minimum.at(fastest, alike, medians)
    by_link: dict[int, list[float]] = defaultdict(list)
    for index, value, least in zip(link.tolist(), medians, fastest[alike], strict=True):
        if least > 0:
            by_link[index].append(float(value / least) - 1.0)
    return {index: float(np.median(values)) for index, values in by_link.items()}


def is_explained_by_devices(
    profile: LinkProfile, slow: SlowLink, blamed: Sequence[Candidate], least_ns: float
) -> bool:
    """Tell whether slow devices explain a link: they send as slowly as they compute.

    Nor is anything else told where the rest loses less than ``least_ns`` a step.
    """
    first, last = profile.steps[slow.phase.first], profile.steps[slow.phase.last]
    members = set(profile.transfers.links[slow.link].members)
    there_in = set(profile.steps[slow.phase.first : slow.phase.last + 1].tolist())
    meanwhile = [
        each
        for each in blamed
        if each.steps[0] <= last
        and each.steps[1] >= first
        and (each.shown_steps is None or there_in.issubset(each.shown_steps))
    ]
    there = [each.excess_ratio for each in meanwhile if not members.isdisjoint(each.ranks)]
    if not there:
        return False
    rest = (1.0 + slow.phase.excess_ratio) / (1.0 + max(there)) - 1.0
    columns = slice(slow.phase.first, slow.phase.last + 1)
    expected_ns = profile.expected_ns[slow.link, columns] * (1.0 + max(there))
    lost_ns = float(np.nanmedian(profile.total_ns[slow.link, columns] - expected_ns))
    return rest < max(MIN_EXCESS_RATIO, slow.phase.threshold) or lost_ns < least_ns


def part_of_links(profile: LinkProfile, links: Sequence[int]) -> NDArray[np.bool_]:
    """Return the operations of some links, shape (ops,)."""
    return np.isin(profile.transfers.link_of_operation, links)


def culprit_candidate(profile: LinkProfile, culprit: Culprit) -> Candidate:
    """Return a culprit as a candidate."""
    worst = max(culprit.links, key=lambda each: each.phase.margin)
    first = int(profile.steps[min(each.phase.first for each in culprit.links)])
    last = int(profile.steps[max(each.phase.last for each in culprit.links)])
    excess = float(np.median([each.phase.excess_ratio for each in culprit.links]))
    return Candidate(
        cause=CAUSE,
        ranks=culprit.ranks,
        steps=(first, last),
        part=part_of_links(profile, [*(each.link for each in culprit.links), *culprit.also]),
        excess_ratio=excess,
        threshold=worst.phase.threshold,
        evidence=(
            f"transfers over {culprit.place} take {format_duration(worst.transfer_ns)} against"
            f" {format_duration(worst.expected_ns)} {culprit.against} (+{format_percent(excess)})"
            f" once all members have entered, in steps {first} to {last}, while both ends compute"
            " as usual"
        ),
    )
