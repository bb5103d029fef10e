"""Slow links: the rank, pair or location that they have in common.

`network_degradation` decides between a slow link and a network that is slow in many places.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import MIN_ROWS_OF_KIND, row_medians
from ..report.text import format_duration, format_percent
from ..statistics.link_profile import MAX_PLANNED_RATIO
from ..statistics.phases import find_phases
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate
from .detector import Cause, ProofForm, ShownIn, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..statistics.link_profile import LinkProfile
    from ..statistics.phases import Phase
    from ..trace.tables import RankInfo


GIGA = 1e9
MAX_NAMED_HOSTS = 2
"""Hosts that a sentence names: those of a rank or a pair."""


LEVELS: tuple[tuple[str, Callable[[RankInfo], str]], ...] = (
    ("host", lambda info: info.host),
    ("switch", lambda info: info.switch),
    ("rack", lambda info: info.rack),
)
"""Locations that ranks may share, the narrowest first, and how to read them."""

CAUSE = Cause(
    name="slow-link",
    subject=Subject.LINK,
    one="has a slow link",
    several="share a slow link",
    shown_in=ShownIn.TRANSFERS,
    has_place=True,
    proof_form=ProofForm.LINKS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Ranks that slow links have in common."""

    ranks: tuple[int, ...]
    """Global ranks at fault, ascending."""

    links: tuple[Phase, ...]
    """Rows of the table, with the steps in which they are slow."""

    location: str
    """In words: "the pair 3 - 11", "most links of rank 3"."""

    more_links: tuple[int, ...] = ()
    """Further links that are slow for the same reason, and would not be reported by themselves."""


def find_culprits(profile: LinkProfile, slow: Sequence[Phase]) -> tuple[Culprit, ...]:
    """Explain slow links by as few ranks, pairs and locations as possible.

    Ranks most of whose pairs are slow come first, then pairs, then groups one of whose members is
    at fault. Those of one host, switch or rack are merged.
    """
    culprits: list[Culprit] = []
    pairs = (profile.links[phase.row] for phase in slow if profile.is_pair[phase.row])
    ends_of_pairs = {rank for pair in pairs for rank in pair.members}
    left = list(slow)
    while left:
        culprit = (
            _worst_rank(profile, left)
            or _worst_pair(profile, left)
            or _worst_group(profile, left, ends_of_pairs)
        )
        culprits.append(culprit)
        left = [phase for phase in left if phase not in culprit.links]
    return merge_by_location(culprits, profile.ranks)


def find_slow_host(profile: LinkProfile) -> tuple[LinkProfile, Culprit] | None:
    """Return the only host all of whose links to other hosts are slower than those of the others.

    Its links are compared with alike ones between other hosts, step by step, because with few hosts
    the slow ones may be half of all alike ones.

    Returns:
        The table with the host's links compared so, and the host; None if there is none, if no
        link is between other hosts, or if several hosts are slow.
    """
    slowness = profile.over_fastest
    links_of: dict[str, list[int]] = defaultdict(list)
    for link in np.flatnonzero(profile.is_between_hosts & ~np.isnan(slowness).all(axis=1)).tolist():
        for host in {profile.ranks[rank].host for rank in profile.links[link].members}:
            links_of[host].append(link)
    # The mean, because it may have been slow in few of the steps.
    level = {host: float(np.nanmean(slowness[links])) for host, links in links_of.items()}
    # Of equally slow ones, the host that explains most links.
    least = (1.0 - THRESHOLDS.persistent_ratio) * max(level.values(), default=0.0)
    slowest = [host for host in level if level[host] >= least]
    worst = max(slowest, key=lambda host: (len(links_of[host]), host), default="")
    mine = np.array(links_of[worst], dtype=np.int64)
    members = {rank for link in mine for rank in profile.links[link].members}
    ranks = tuple(sorted(rank for rank in members if profile.ranks[rank].host == worst))
    compared = profile.against_others(mine)
    excess = compared.total_ns / compared.expected_ns - 1.0
    mine = mine[~np.isnan(excess[mine]).all(axis=1)]
    if not worst or len(ranks) < THRESHOLDS.min_several or len(mine) < THRESHOLDS.min_peers:
        return None
    others = np.setdiff1d(np.concatenate(list(links_of.values())), mine)
    series = row_medians(excess[mine].T)
    for phase in find_phases(series[None], has_few_peers=True):
        least = phase.excess_ratio / 2
        levels = row_medians(excess[mine, phase.inside])
        is_only = (row_medians(slowness[others, phase.inside]) - 1.0 >= least).mean() <= (
            1.0 - THRESHOLDS.whole_share
        )
        is_by_plan = phase.num_steps == len(series) and phase.excess_ratio < MAX_PLANNED_RATIO - 1
        is_by_plan &= len(links_of) <= MIN_ROWS_OF_KIND
        if is_only and not is_by_plan and (levels >= least).mean() >= THRESHOLDS.whole_share:
            slow = (
                replace(phase, row=link, excess_ratio=level)
                for link, level in zip(mine.tolist(), levels.tolist(), strict=True)
                if level >= least
            )
            location = f"the links of host {worst}"
            return compared, Culprit(ranks=ranks, links=tuple(slow), location=location)
    return None


def _worst_rank(profile: LinkProfile, slow: Sequence[Phase]) -> Culprit | None:
    """Return the rank with most slow pairs; None if no rank's own connection is at fault."""
    links = profile.links
    num_pairs, num_slow = (
        Counter(rank for link in some if links[link].is_pair for rank in links[link].members)
        for some in (range(len(links)), [phase.row for phase in slow])
    )
    ranks = [
        rank
        for rank, count in num_slow.items()
        if count >= max(THRESHOLDS.min_peers, THRESHOLDS.majority_share * num_pairs[rank])
    ]
    if not ranks:
        return None
    rank = max(ranks, key=lambda rank: (num_slow[rank], -rank))
    mine = tuple(phase for phase in slow if rank in links[phase.row].members)
    return Culprit(ranks=(rank,), links=mine, location=f"most links of rank {rank}")


def _worst_pair(profile: LinkProfile, slow: Sequence[Phase]) -> Culprit | None:
    """Return the slowest pair; None without pairs.

    If only one of its ends has groups that are slow too, or slower by the same factor, the
    connection is that end's.
    """
    pairs = [phase for phase in slow if profile.is_pair[phase.row]]
    if not pairs:
        return None
    worst = max(pairs, key=lambda phase: phase.excess_ratio)
    ends = tuple(sorted(profile.links[worst.row].members))
    location = f"the pair {ends[0]} - {ends[1]}"
    members = {phase.row: set(profile.links[phase.row].members) for phase in slow}
    slower = _groups_slower_by(profile, worst)
    slower |= {link for link in members if not profile.is_pair[link]}
    groups = [{link for link in slower if end in profile.links[link].members} for end in ends]
    more = set[int]()
    if bool(groups[0]) != bool(groups[1]):
        end, more = (ends[0], groups[0]) if groups[0] else (ends[1], groups[1])
        ends, location = (end,), f"{location} and a group of rank {end}"
    mine = [
        phase
        for phase in slow
        if {*profile.links[worst.row].members} <= members[phase.row] or phase.row in more
    ]
    more -= members.keys()
    return Culprit(ranks=ends, links=tuple(mine), location=location, more_links=tuple(sorted(more)))


def _groups_slower_by(profile: LinkProfile, phase: Phase) -> set[int]:
    """Return the groups that are slower than the fastest of their kind by the factor of a phase.

    What is slow in a ring shows, though it may be too little for a finding.
    """
    took_ns = row_medians(profile.total_ns[:, phase.shown])
    names = [f"{link.kind} {len(link.members)}" for link in profile.links]
    _, kind = np.unique(names, return_inverse=True)
    least_ns = np.full(int(kind.max()) + 1, np.inf)
    np.fmin.at(least_ns, kind, took_ns)
    factor = took_ns / least_ns[kind] / (1.0 + phase.excess_ratio)
    is_alike = np.maximum(factor, 1.0 / factor) <= 1.0 / THRESHOLDS.whole_share
    return {*np.flatnonzero(is_alike & ~profile.is_pair).tolist()}


def _worst_group(profile: LinkProfile, slow: Sequence[Phase], ends_of_pairs: set[int]) -> Culprit:
    """Return the slowest group, narrowed down to the members that it shares with others.

    If only one of them is an end of slow pairs, it is that one.
    """
    worst = max(slow, key=lambda phase: phase.excess_ratio)
    link = profile.links[worst.row]
    common, mine = set(link.members), [worst]
    for phase in sorted(slow, key=lambda phase: len(profile.links[phase.row].members)):
        shared = common & set(profile.links[phase.row].members)
        if phase is not worst and shared:
            common, mine = shared, [*mine, phase]
    size = len(link.members)
    location = f"one {link.kind} group of {size:,} ranks (which link is not known)"
    if len(common) < size:
        location = "the ranks that its slow groups share"
    if len(common & ends_of_pairs) == 1:
        common &= ends_of_pairs
        location = f"one {link.kind} group of {size:,} ranks, where only one has slow pairs,"
    return Culprit(ranks=tuple(sorted(common)), links=tuple(mine), location=location)


def merge_by_location(
    culprits: Sequence[Culprit], ranks: Mapping[int, RankInfo]
) -> tuple[Culprit, ...]:
    """Merge the culprits on one host, or behind one switch or rack, if no other has as many."""
    for name, read in LEVELS:
        location_of = {info.rank: read(info) for info in ranks.values() if read(info)}
        count = Counter(
            location
            for culprit in culprits
            for location in {location_of[rank] for rank in culprit.ranks if rank in location_of}
        )
        (location, num), (_, next_num) = (*count.most_common(2), ("", 0), ("", 0))[:2]
        if len(set(location_of.values())) == 1 or num <= max(next_num, 1):
            continue
        mine = [
            culprit
            for culprit in culprits
            if location in {location_of.get(rank) for rank in culprit.ranks}
        ]
        inside = {
            rank for culprit in mine for rank in culprit.ranks if location_of.get(rank) == location
        }
        merged = Culprit(
            ranks=tuple(sorted(inside)),
            links=tuple({slow.row: slow for culprit in mine for slow in culprit.links}.values()),
            location=f"the links of {name} {location}",
        )
        culprits = (merged, *(culprit for culprit in culprits if culprit not in mine))
    return tuple(culprits)


def is_explained_by_devices(
    profile: LinkProfile, slow: Phase, blamed: Sequence[Candidate], min_lost_ns: float
) -> bool:
    """Return whether slow devices explain a slow link: they send as slowly as they compute.

    Args:
        blamed: Ranks that compute slowly.
        min_lost_ns: Time per step that the rest must lose to be a second fault.
    """
    inside = slow.shown
    members, steps = set(profile.links[slow.row].members), profile.steps[inside].tolist()
    at_ends = [
        candidate.excess_ratio
        for candidate in blamed
        if not members.isdisjoint(candidate.ranks)
        and candidate.steps[0] <= steps[-1]
        and candidate.steps[1] >= steps[0]
        and (candidate.shown_steps is None or set(steps).issubset(candidate.shown_steps))
    ]
    if not at_ends:
        return False
    factor = 1.0 + max(at_ends)
    rest = (1.0 + slow.excess_ratio) / factor - 1.0
    lost_ns = profile.total_ns[slow.row, inside] - profile.expected_ns[slow.row, inside] * factor
    least = max(THRESHOLDS.min_excess_ratio, slow.threshold)
    return rest < least or float(np.nanmedian(lost_ns)) < min_lost_ns


def culprit_candidate(profile: LinkProfile, culprit: Culprit) -> Candidate:
    """Return a culprit as a candidate."""
    worst = max(culprit.links, key=lambda phase: phase.margin)
    excess = float(np.median([phase.excess_ratio for phase in culprit.links]))
    times = profile.times_within(worst.row, worst.shown, usual_ns=profile.expected_ns)
    over = times.transfer_ns / times.expected_ns
    rates = ""
    if times.bytes_per_s is not None:
        rate = times.bytes_per_s / GIGA
        rates = f", {rate:.3g} GB/s of payload against {rate * over:.3g} GB/s"
    shown = sorted({column for phase in culprit.links for column in phase.shown})
    together = replace(worst, first=shown[0], last=shown[-1], columns=tuple(shown))
    is_whole = len(shown) == together.num_steps
    hosts = sorted({profile.ranks[rank].host for rank in culprit.ranks})
    is_named = any(host in culprit.location for host in hosts)  # also if one is unknown: ""
    num_hosts = len({info.host for info in profile.ranks.values()})
    where = f" on {' and '.join(hosts)}"
    if is_named or num_hosts == 1 or len(hosts) > MAX_NAMED_HOSTS:
        where = ""
    return Candidate(
        cause=CAUSE,
        ranks=culprit.ranks,
        steps=together.steps(profile.steps),
        shown_steps=None if is_whole else together.shown_steps(profile.steps),
        part=profile.operations_of([*(phase.row for phase in culprit.links), *culprit.more_links]),
        excess_ratio=excess,
        threshold=worst.threshold,
        evidence=(
            f"transfers over {culprit.location}{where} take"
            f" {format_duration(times.transfer_ns)} against {format_duration(times.expected_ns)}"
            f" for alike ones (+{format_percent(over - 1)}{rates}),"
            f" counted from when all members have entered, {together.when(profile.steps)};"
            " both ends compute as usual"
        ),
    )
