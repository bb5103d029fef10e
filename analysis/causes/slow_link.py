"""Slow links: the rank, pair, host or uplink that they have in common.

`network_degradation` decides between a slow link and a network that is slow in many places.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians, row_medians
from ..arrays.grouping import factorize
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
    slow: Sequence[SlowLink],
    links: Sequence[Link],
    pair_excess: Mapping[int, float],
    group_excess: Mapping[int, float],
) -> tuple[Culprit, ...]:
    """Explain slow links by as few ranks and pairs as possible.

    Ranks most of whose links are slow come first, then pairs, then groups one of whose members is
    at fault.

    Args:
        slow: The slow links.
        links: All links.
        pair_excess: By rank, the median excess of its pairs.
        group_excess: By link of a group, its excess over the fastest alike group.
    """
    left = list(slow)
    found: list[Culprit] = []
    num_pairs: Counter[int] = Counter()
    for link in links:
        if link.is_pair:
            num_pairs.update(link.members)
    while left:
        culprit = (
            _worst_rank(left, links, num_pairs)
            or _worst_pair(left, links, group_excess)
            or _worst_group(left, links, pair_excess)
        )
        found.append(culprit)
        explained = {each.link for each in culprit.links}
        left = [each for each in left if each.link not in explained]
    return tuple(found)


def _worst_rank(
    slow: Sequence[SlowLink], links: Sequence[Link], num_pairs: Counter[int]
) -> Culprit | None:
    """Return the rank with most slow links; None if no rank's own connection is at fault."""
    num_slow: Counter[int] = Counter()
    num_slow_groups: Counter[int] = Counter()
    for each in slow:
        counter = num_slow if links[each.link].is_pair else num_slow_groups
        counter.update(links[each.link].members)
    ranks = [
        rank
        for rank, count in num_slow.items()
        if count >= THRESHOLDS.min_links
        and count >= THRESHOLDS.min_slow_links_share * num_pairs[rank]
    ]
    if not ranks:
        ranks = _ends_in_slow_groups(slow, links, num_slow_groups)
    if not ranks:
        return None
    rank = max(ranks, key=lambda each: (num_slow[each], num_slow_groups[each], -each))
    mine = tuple(each for each in slow if rank in links[each.link].members)
    return Culprit(ranks=(rank,), links=mine, location=f"most links of rank {rank}")


def _ends_in_slow_groups(
    slow: Sequence[SlowLink], links: Sequence[Link], num_slow_groups: Counter[int]
) -> list[int]:
    """Return the ends of slow pairs that are in a slow group while the other end is not."""
    found = []
    for each in slow:
        link = links[each.link]
        if link.is_pair:
            ends = [rank for rank in link.members if num_slow_groups[rank]]
            if len(ends) == 1:
                found += ends
    return found


def _worst_pair(
    slow: Sequence[SlowLink], links: Sequence[Link], group_excess: Mapping[int, float]
) -> Culprit | None:
    """Return the slowest pair, or its end that is equally slow in a group; None without pairs."""
    pairs = [each for each in slow if links[each.link].is_pair]
    if not pairs:
        return None
    worst = max(pairs, key=lambda each: each.phase.excess_ratio)
    ends = set(links[worst.link].members)
    mine = tuple(each for each in slow if ends <= set(links[each.link].members))
    low, high = sorted(ends)
    equally_slow = _equally_slow_groups(worst, links, group_excess)
    if len(equally_slow) == 1:
        rank, groups = equally_slow.popitem()
        return Culprit(
            ranks=(rank,),
            links=mine,
            location=(
                f"the pair {low} - {high} and a group of rank {rank}, slower by the same factor,"
            ),
            more_links=tuple(groups),
        )
    return Culprit(ranks=(low, high), links=mine, location=f"the pair {low} - {high}")


def _equally_slow_groups(
    pair: SlowLink, links: Sequence[Link], group_excess: Mapping[int, float]
) -> dict[int, list[int]]:
    """Return, by end of a slow pair, its groups that are slower by the same factor.

    A connection that is equally slow to a peer and in a group is the rank's own.
    """
    factor = 1.0 + pair.phase.excess_ratio
    found: dict[int, list[int]] = {}
    for index, excess in group_excess.items():
        if (
            THRESHOLDS.min_factor_ratio
            <= (1.0 + excess) / factor
            <= 1.0 / THRESHOLDS.min_factor_ratio
        ):
            for rank in set(links[pair.link].members) & set(links[index].members):
                found.setdefault(rank, []).append(index)
    return found


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
    inside = {rank: pair_excess[rank] for rank in members if rank in pair_excess}
    if not inside:
        return None
    worst = max(inside, key=lambda rank: inside[rank])
    others = np.array([excess for rank, excess in pair_excess.items() if rank != worst])
    if len(others) < THRESHOLDS.min_links:
        return None
    required = required_deviations(len(others)) * robust_deviation(others)
    return worst if inside[worst] >= required else None


def merge_by_location(
    culprits: Sequence[Culprit], ranks: Mapping[int, RankInfo]
) -> tuple[Culprit, ...]:
    """Merge the culprits on one host, or behind one switch or rack.

    Args:
        culprits: Culprits found without locations.
        ranks: Location of each rank.
    """
    for name, _, read in LEVELS:
        places = {info.rank: read(info) for info in ranks.values() if read(info)}
        if len(culprits) > 1 and len(set(places.values())) > 1:
            culprits = _merge_place(culprits, places, name)
    return tuple(culprits)


def _merge_place(
    culprits: Sequence[Culprit], places: Mapping[int, str], name: str
) -> tuple[Culprit, ...]:
    """Merge the culprits that have ranks at one place, if no other place has as many of them."""
    num_culprits: Counter[str] = Counter()
    for culprit in culprits:
        num_culprits.update({places[rank] for rank in culprit.ranks if rank in places})
    if not num_culprits:
        return tuple(culprits)
    place, num = num_culprits.most_common(1)[0]
    if num == 1 or list(num_culprits.values()).count(num) > 1:
        return tuple(culprits)
    mine = [each for each in culprits if place in {places.get(rank) for rank in each.ranks}]
    rest = tuple(each for each in culprits if each not in mine)
    inside = sorted({rank for each in mine for rank in each.ranks if places.get(rank) == place})
    merged = Culprit(
        ranks=tuple(inside),
        links=tuple({slow.link: slow for each in mine for slow in each.links}.values()),
        location=f"the links of {name} {place}",
    )
    return (merged, *rest)


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
    between: dict[tuple[int, int], list[int]] = defaultdict(list)
    for culprit in culprits:
        pairs = [each.link for each in culprit.links if links[each.link].is_pair]
        if pairs and all(profile.rose_together[link] for link in pairs):
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
    # Groups that include such a pair are as slow as it is.
    more = {link for culprit in together for link in culprit.more_links} | (set(slow) - set(pairs))
    members = sorted({rank for link in pairs for rank in links[link].members})
    return Culprit(
        ranks=tuple(members),
        links=tuple(slow[link] for link in pairs),
        location=_uplink_location(stages, [ranks[rank] for rank in members]),
        more_links=tuple(sorted(more)),
        baseline="in other steps, scaled by the change of links between other stages",
    )


def _uplink_location(stages: tuple[int, int], members: Sequence[RankInfo]) -> str:
    """Name the two stages, and the location of each end if it is one."""
    if stages[0] == stages[1]:
        return f"all links within stage {stages[0]}"
    text = f"all links between stages {stages[0]} and {stages[1]}"
    for _, plural, read in LEVELS:
        ends = [{read(each) for each in members if each.coords.pp == stage} for stage in stages]
        if all(len(end) == 1 for end in ends) and ends[0] != ends[1]:
            (low,), (high,) = ends
            if low and high:
                return f"{text} ({plural} {low} and {high})"
    return text


def excess_of_pairs(profile: LinkProfile, slow: Sequence[SlowLink]) -> dict[int, float]:
    """Return, by rank, the median excess of its pairs in the steps in which links are slow."""
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


def excess_of_groups(profile: LinkProfile, slow: Sequence[SlowLink]) -> dict[int, float]:
    """Return, by link of a group, its excess over the fastest alike group in the slow steps."""
    if not slow:
        return {}
    transfers, steps = profile.transfers, profile.steps[_slow_columns(slow)]
    is_group = np.array([not link.is_pair for link in transfers.links])
    rows = np.flatnonzero(is_group[transfers.link] & np.isin(transfers.step, steps))
    if not len(rows):
        return {}
    cell, num = factorize(transfers.alike[rows], transfers.link[rows])
    medians, _ = group_medians(transfers.transfer_ns[rows], cell, num)
    row_of_cell = np.zeros(num, dtype=np.int64)
    row_of_cell[cell] = rows
    alike, link = transfers.alike[row_of_cell], transfers.link[row_of_cell]
    fastest = np.full(int(alike.max()) + 1, np.inf)
    np.minimum.at(fastest, alike, medians)
    by_link: dict[int, list[float]] = defaultdict(list)
    for index, value, least in zip(link.tolist(), medians, fastest[alike], strict=True):
        if least > 0:
            by_link[index].append(float(value / least) - 1.0)
    return {index: float(np.median(values)) for index, values in by_link.items()}


def _slow_columns(slow: Sequence[SlowLink]) -> slice:
    return slice(min(each.phase.first for each in slow), max(each.phase.last for each in slow) + 1)


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
