"""Slow links: the rank, pair, host or uplink that they have in common.

`network_degradation` decides between a slow link and a network that is slow in many places.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..report.text import format_duration, format_percent, format_steps
from ..statistics.noise import required_deviations, robust_deviation
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate
from .detector import Cause, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..replay.model import Link
    from ..trace.tables import RankInfo
    from .link_profile import LinkProfile, SlowLink


MAX_NAMED_HOSTS = 2
"""Hosts that a sentence names: those of a rank or a pair."""


LEVELS: tuple[tuple[str, str, Callable[[RankInfo], str]], ...] = (
    ("host", "hosts", lambda info: info.host),
    ("switch", "switches", lambda info: info.switch),
    ("rack", "racks", lambda info: info.rack),
)
"""Locations that ranks may share, the narrowest first: singular, plural, and how to read it."""

CAUSE = Cause(
    name="slow-link",
    subject=Subject.LINK,
    one="has a slow link",
    several="share a slow link",
    has_place=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Ranks that slow links have in common."""

    ranks: tuple[int, ...]
    """Global ranks at fault, ascending."""

    links: tuple[SlowLink, ...]
    location: str
    """In words: "the pair 3 - 11", "most links of rank 3"."""

    more_links: tuple[int, ...] = ()
    """Further links that are slow for the same reason, and would not be reported by themselves."""

    baseline: str = "for alike ones"
    """What the links are compared with, in words."""


def find_culprits(
    slow: Sequence[SlowLink], links: Sequence[Link], excess: NDArray[np.float64]
) -> tuple[Culprit, ...]:
    """Explain slow links by as few ranks and pairs as possible.

    Ranks most of whose links are slow come first, then pairs, then groups one of whose members is
    at fault.

    Args:
        slow: The slow links.
        links: All links.
        excess: Shape (links,): result of `excess_of_links`.
    """
    left = list(slow)
    found: list[Culprit] = []
    num_pairs = Counter(rank for link in links if link.is_pair for rank in link.members)
    of_rank: dict[int, list[float]] = defaultdict(list)
    for link, value in zip(links, excess.tolist(), strict=True):
        if link.is_pair and not np.isnan(value):
            for rank in link.members:
                of_rank[rank].append(value)
    pair_excess = {rank: float(np.median(values)) for rank, values in of_rank.items()}
    while left:
        culprit = (
            _worst_rank(left, links, num_pairs)
            or _worst_pair(left, links, excess)
            or _worst_group(left, links, pair_excess)
        )
        found.append(culprit)
        explained = {each.link for each in culprit.links}
        left = [each for each in left if each.link not in explained]
    return tuple(found)


def _worst_rank(
    slow: Sequence[SlowLink], links: Sequence[Link], num_pairs: Counter[int]
) -> Culprit | None:
    """Return the rank with most slow pairs; None if no rank's own connection is at fault."""
    num_slow: Counter[int] = Counter()
    for each in slow:
        if links[each.link].is_pair:
            num_slow.update(links[each.link].members)
    ranks = [
        rank
        for rank, count in num_slow.items()
        if count >= max(THRESHOLDS.min_peers, THRESHOLDS.majority_share * num_pairs[rank])
    ]
    if not ranks:
        return None
    rank = max(ranks, key=lambda each: (num_slow[each], -each))
    mine = tuple(each for each in slow if rank in links[each.link].members)
    return Culprit(ranks=(rank,), links=mine, location=f"most links of rank {rank}")


def _worst_pair(
    slow: Sequence[SlowLink], links: Sequence[Link], excess: NDArray[np.float64]
) -> Culprit | None:
    """Return the slowest pair; None without pairs.

    If one of its ends has groups that are slow too, or slower by the same factor, the connection is
    that end's.
    """
    pairs = [each for each in slow if links[each.link].is_pair]
    if not pairs:
        return None
    worst = max(pairs, key=lambda each: each.phase.excess_ratio)
    low, high = sorted(links[worst.link].members)
    factor = (1.0 + excess) / (1.0 + worst.phase.excess_ratio)
    is_slow = np.maximum(factor, 1.0 / factor) <= 1.0 / THRESHOLDS.whole_share
    is_slow[[each.link for each in slow]] = True
    groups: dict[int, set[int]] = {low: set(), high: set()}
    for index in np.flatnonzero(is_slow).tolist():
        for end in () if links[index].is_pair else {low, high} & set(links[index].members):
            groups[end].add(index)
    ends: tuple[int, ...] = (low, high)
    location, more = f"the pair {low} - {high}", set[int]()
    if bool(groups[low]) != bool(groups[high]):
        ends = (low,) if groups[low] else (high,)
        location, more = f"{location} and a group of rank {ends[0]}", groups[ends[0]]
    mine = tuple(
        each for each in slow if {low, high} <= {*links[each.link].members} or each.link in more
    )
    more -= {each.link for each in mine}
    return Culprit(ranks=ends, links=mine, location=location, more_links=tuple(sorted(more)))


def _worst_group(
    slow: Sequence[SlowLink], links: Sequence[Link], pair_excess: Mapping[int, float]
) -> Culprit:
    """Return the slowest group, narrowed down to the members that it shares with others.

    If the pairs of one member are slower as well, though not significantly, that member is named.
    """
    worst = max(slow, key=lambda each: each.phase.excess_ratio)
    common, mine = set(links[worst.link].members), [worst]
    for each in sorted(slow, key=lambda each: len(links[each.link].members)):
        shared = common & set(links[each.link].members)
        if each is not worst and shared:
            common, mine = shared, [*mine, each]
    size = len(links[worst.link].members)
    kind = links[worst.link].kind
    location = f"one {kind} group of {size:,} ranks (which link is not known)"
    if len(common) < size:
        location = "the ranks that its slow groups share"
    slower = _member_with_slow_pairs(common, pair_excess)
    if slower is not None:
        location = f"one {kind} group of {size:,} ranks, where only rank {slower} has slow pairs,"
        common = {slower}
    return Culprit(ranks=tuple(sorted(common)), links=tuple(mine), location=location)


def _member_with_slow_pairs(members: set[int], pair_excess: Mapping[int, float]) -> int | None:
    """Return the member whose pairs are significantly slower than those of all other ranks."""
    worst = max(members & pair_excess.keys(), key=lambda rank: pair_excess[rank], default=None)
    others = np.array([excess for rank, excess in pair_excess.items() if rank != worst])
    if worst is None or len(others) < THRESHOLDS.min_peers:
        return None
    required = required_deviations(len(others)) * robust_deviation(others)
    return worst if pair_excess[worst] >= required else None


def merge_by_location(
    culprits: Sequence[Culprit], ranks: Mapping[int, RankInfo]
) -> tuple[Culprit, ...]:
    """Merge the culprits on one host, or behind one switch or rack, if no other has as many.

    Args:
        culprits: Culprits found without locations.
        ranks: Location of each rank.
    """
    for name, _, read in LEVELS:
        places = {info.rank: read(info) for info in ranks.values() if read(info)}
        count = Counter(
            place
            for culprit in culprits
            for place in {places[rank] for rank in culprit.ranks if rank in places}
        )
        (place, num), (_, next_num) = (*count.most_common(2), ("", 0), ("", 0))[:2]
        if len(set(places.values())) == 1 or num <= max(next_num, 1):
            continue
        mine = [each for each in culprits if place in {places.get(rank) for rank in each.ranks}]
        inside = {rank for each in mine for rank in each.ranks if places.get(rank) == place}
        merged = Culprit(
            ranks=tuple(sorted(inside)),
            links=tuple({slow.link: slow for each in mine for slow in each.links}.values()),
            location=f"the links of {name} {place}",
        )
        culprits = (merged, *(each for each in culprits if each not in mine))
    return tuple(culprits)


def merge_by_uplink(
    culprits: Sequence[Culprit], profile: LinkProfile, ranks: Mapping[int, RankInfo]
) -> tuple[Culprit, ...]:
    """Merge the pairs between two stages that all became slow together: they share an uplink.

    If such pairs are between several pairs of stages, it is not one uplink and nothing is merged.

    Args:
        culprits: Culprits found link by link.
        profile: Transfers by link and step.
        ranks: Location of each rank.
    """
    links = profile.transfers.links
    together: list[Culprit] = []
    pairs: list[int] = []
    for culprit in culprits:
        own = [each.link for each in culprit.links if links[each.link].is_pair]
        if own and profile.rose_together[own].all():
            together.append(culprit)
            pairs += own
    between = {tuple(sorted(ranks[end].coords.pp for end in links[link].members)) for link in pairs}
    if len(together) <= 1 or len(between) > 1:
        return tuple(culprits)
    slow = {each.link: each for culprit in together for each in culprit.links}
    members = sorted({rank for link in pairs for rank in links[link].members})
    uplink = Culprit(
        ranks=tuple(members),
        links=tuple(slow[link] for link in pairs),
        location=_uplink_location(between.pop(), [ranks[rank] for rank in members]),
        # Groups that include such a pair are as slow as it is.
        more_links=tuple(
            sorted(
                {link for each in together for link in each.more_links} | (set(slow) - set(pairs))
            )
        ),
        baseline="in other steps, scaled by the change of links between other stages",
    )
    return (uplink, *(each for each in culprits if each not in together))


def _uplink_location(stages: tuple[int, ...], members: Sequence[RankInfo]) -> str:
    """Name the two stages, and the location of each end if it is one."""
    text = f"all links between stages {stages[0]} and {stages[1]}"
    for _, plural, read in LEVELS:
        ends = [{read(each) for each in members if each.coords.pp == stage} for stage in stages]
        if all(len(end) == 1 for end in ends) and ends[0] != ends[1]:
            (low,), (high,) = ends
            if low and high:
                return f"{text} ({plural} {low} and {high})"
    return text


def excess_of_links(profile: LinkProfile, slow: Sequence[SlowLink]) -> NDArray[np.float64]:
    """Return the excess of each link in the steps in which links are slow. Shape (links,).

    Pairs are compared with alike ones, and groups with the fastest one of their kind and size:
    what is slow in a ring shows, though it is too little for a finding.
    """
    links = profile.transfers.links
    first = min((each.phase.first for each in slow), default=0)
    last = max((each.phase.last for each in slow), default=0)
    total, expected = (
        row_medians(each[:, first : last + 1]) for each in (profile.total_ns, profile.expected_ns)
    )
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, link in enumerate(links):
        if not link.is_pair:
            groups[link.kind, len(link.members)].append(index)
    for rows in groups.values():
        expected[rows] = np.fmin.reduce(total[rows])
    found: NDArray[np.float64] = total / expected - 1.0
    return found


def is_explained_by_devices(
    profile: LinkProfile, slow: SlowLink, blamed: Sequence[Candidate], min_lost_ns: float
) -> bool:
    """Return whether slow devices explain a slow link: they send as slowly as they compute.

    Args:
        profile: Transfers by link and step.
        slow: The link.
        blamed: Ranks that compute slowly.
        min_lost_ns: Time per step that the rest must lose to be a second fault.
    """
    first, last = profile.steps[slow.phase.first], profile.steps[slow.phase.last]
    members = set(profile.transfers.links[slow.link].members)
    slow_steps = set(profile.steps[slow.phase.first : slow.phase.last + 1].tolist())
    meanwhile = [
        each
        for each in blamed
        if each.steps[0] <= last
        and each.steps[1] >= first
        and (each.shown_steps is None or slow_steps.issubset(each.shown_steps))
    ]
    at_ends = [each.excess_ratio for each in meanwhile if not members.isdisjoint(each.ranks)]
    if not at_ends:
        return False
    rest = (1.0 + slow.phase.excess_ratio) / (1.0 + max(at_ends)) - 1.0
    columns = slice(slow.phase.first, slow.phase.last + 1)
    expected_ns = profile.expected_ns[slow.link, columns] * (1.0 + max(at_ends))
    lost_ns = float(np.nanmedian(profile.total_ns[slow.link, columns] - expected_ns))
    return rest < max(THRESHOLDS.min_excess_ratio, slow.phase.threshold) or lost_ns < min_lost_ns


def part_of_links(profile: LinkProfile, links: Sequence[int]) -> NDArray[np.int64]:
    """Return the operations that some links carry, ascending."""
    return np.flatnonzero(np.isin(profile.transfers.link_of_operation, links))


def culprit_candidate(
    profile: LinkProfile, culprit: Culprit, hosts: Mapping[int, str]
) -> Candidate:
    """Return a culprit as a candidate.

    Args:
        profile: Transfers by link and step.
        culprit: The culprit.
        hosts: Host of each rank.
    """
    worst = max(culprit.links, key=lambda each: each.phase.margin)
    first = int(profile.steps[min(each.phase.first for each in culprit.links)])
    last = int(profile.steps[max(each.phase.last for each in culprit.links)])
    excess = float(np.median([each.phase.excess_ratio for each in culprit.links]))
    return Candidate(
        cause=CAUSE,
        ranks=culprit.ranks,
        steps=(first, last),
        part=part_of_links(profile, [*(each.link for each in culprit.links), *culprit.more_links]),
        excess_ratio=excess,
        threshold=worst.phase.threshold,
        evidence=(
            f"transfers over {culprit.location}{_on_hosts(culprit, hosts)} take"
            f" {format_duration(worst.transfer_ns)} against {format_duration(worst.expected_ns)}"
            f" {culprit.baseline} (+{format_percent(excess)}{_rates(profile, worst)}),"
            f" counted from when all members have entered, in {format_steps((first, last))};"
            " both ends compute as usual"
        ),
    )


def _on_hosts(culprit: Culprit, hosts: Mapping[int, str]) -> str:
    """Return the hosts of a culprit in words; empty if there is nothing to add."""
    mine = sorted({hosts.get(rank, "") for rank in culprit.ranks})
    is_named = any(host in culprit.location for host in mine)  # also if one is unknown: ""
    if is_named or len(set(hosts.values())) == 1 or len(mine) > MAX_NAMED_HOSTS:
        return ""
    return f" on {' and '.join(mine)}"


def _rates(profile: LinkProfile, slow: SlowLink) -> str:
    """Return how many bytes a slow link carries each second, and alike ones; empty if unknown."""
    transfers, steps = profile.transfers, profile.steps[slow.phase.first : slow.phase.last + 1]
    mine = (transfers.link == slow.link) & np.isin(transfers.step, steps)
    took_ns, num_bytes = transfers.transfer_ns[mine].sum(), transfers.num_bytes[mine]
    if not took_ns or (num_bytes < 0).any() or not num_bytes.any():
        return ""
    # Bytes per ns are GB/s.
    rate = num_bytes.sum() / took_ns
    usual = rate * slow.transfer_ns / slow.expected_ns
    return f", {rate:.3g} GB/s of payload against {usual:.3g} GB/s"
