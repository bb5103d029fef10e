"""Network causes: a slow link, or a network that is slow in many places."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians, row_medians
from ..arrays.grouping import number_rows
from ..report.text import format_count, format_duration, format_percent
from ..statistics.phases import DUE_RATIO
from .candidate import Candidate
from .counters import network_trouble
from .link_culprits import culprits_of, merged_by_place
from .link_or_network import ALL_RANKS_SHARE, have_one_place, is_only_group, told_of_only_group
from .link_profile import slow_links
from .network_wide import SEVERAL_LINKS, common_slowness
from .uplinks import merged_by_uplink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..trace.context import SampleTable
    from ..trace.tables import RankInfo
    from .counters import Trouble
    from .link_culprits import Culprit
    from .link_profile import LinkProfile, SlowLink

MANY_CULPRITS = 4
"""Places without a rank in common that make it the network's trouble, not a link's."""

MANY_SHARE = 0.1
"""Share of the links that must be slow for that."""

PAIR = 2
LEAST_LOST_RATIO = 0.0001
"""Share of a step that a slow link must lose to be told: below, the clock's own noise rules."""

BESIDE_LOST_RATIO = 0.01
"""Share of a step that a link must lose beyond what a slow device at its end explains. What slows
a device may hold up its transfers by more than its compute; so little is no ground to tell a second
fault on."""


def slow_network(
    profile: LinkProfile,
    ranks: Mapping[int, RankInfo],
    *,
    blamed: Sequence[Candidate],
    step_ns: float,
    step_start_ns: Mapping[int, int],
    samples: SampleTable,
) -> tuple[Candidate, ...]:
    """Find slow links, and tell one bad link from a network that is slow in many places.

    Args:
        profile: Transfers by link and step.
        ranks: Where each rank runs.
        blamed: Ranks that compute slowly for a while: what a slow device sends and receives is as
            slow as well, so of their links only what is slower still proves anything.
        step_ns: Usual time of a step.
        step_start_ns: When each step began, Unix time.
        samples: Counters of the hosts' network, if any.
    """
    slow = [
        each
        for each in slow_links(profile, LEAST_LOST_RATIO * step_ns)
        if not _explained(profile, each, blamed, BESIDE_LOST_RATIO * step_ns)
    ]
    links = profile.transfers.links
    hosts = {rank: info.host for rank, info in ranks.items()}
    culprits = culprits_of(slow, links, _pair_excess(profile, slow), _group_excess(profile, slow))
    culprits = merged_by_place(merged_by_uplink(culprits, profile, ranks), ranks)

    def trouble_in(steps: tuple[int, int]) -> Trouble:
        begin, end = step_start_ns[steps[0]], step_start_ns[steps[1]] + int(step_ns)
        return network_trouble(samples, (begin, end))

    everywhere = _everywhere(profile, hosts, trouble_in)
    if everywhere is not None and have_one_place(profile, everywhere, culprits, hosts):
        everywhere = None
    if everywhere is None and is_only_group(profile, culprits, hosts):
        ring = _of_culprit(profile, culprits[0])
        return (told_of_only_group(ring, hosts, trouble_in(ring.steps)),)
    many = len(culprits) >= MANY_CULPRITS and len(slow) >= MANY_SHARE * len(links)
    if everywhere is None and (many or _all_groups(culprits, ranks)):
        everywhere, culprits = _many(profile, slow), ()
    found = tuple(_of_culprit(profile, culprit) for culprit in culprits)
    if everywhere is None:
        return found
    evidence = f"{everywhere.evidence}; {trouble_in(everywhere.steps)}"
    # What stands out from links that are slow together is slower still.
    still = [not any(profile.risen[each.link] for each in culprit.links) for culprit in culprits]
    found = tuple(
        each
        for each, is_slower in zip(found, still, strict=True)
        if is_slower and len(each.ranks) <= PAIR
    )
    return (replace(everywhere, evidence=evidence), *found)


def _pair_excess(profile: LinkProfile, slow: Sequence[SlowLink]) -> dict[int, float]:
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


def _group_excess(profile: LinkProfile, slow: Sequence[SlowLink]) -> dict[int, float]:
    """Return how much slower than the fastest alike group each is over the slow steps."""
    if not slow:
        return {}
    transfers, steps = profile.transfers, profile.steps[_slow_columns(slow)]
    is_group = np.array([not link.is_pair for link in transfers.links])
    rows = np.flatnonzero(is_group[transfers.link] & np.isin(transfers.step, steps))
    if not len(rows):
        return {}
    cell, num = number_rows(transfers.alike[rows], transfers.link[rows])
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


def _all_groups(culprits: Sequence[Culprit], ranks: Mapping[int, RankInfo]) -> bool:
    """Tell whether several groups without a rank in common, which make up the job, are slow."""
    if len(culprits) < PAIR or any(len(each.ranks) <= PAIR for each in culprits):
        return False
    members = [set(each.ranks) for each in culprits]
    covered = set[int]().union(*members)
    return sum(map(len, members)) == len(covered) and len(covered) >= ALL_RANKS_SHARE * len(ranks)


def _explained(
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
    return rest < max(DUE_RATIO, slow.phase.threshold) or lost_ns < least_ns


def _part(profile: LinkProfile, links: Sequence[int]) -> NDArray[np.bool_]:
    return np.isin(profile.transfers.link_of_operation, links)


def _of_culprit(profile: LinkProfile, culprit: Culprit) -> Candidate:
    worst = max(culprit.links, key=lambda each: each.phase.margin)
    first = int(profile.steps[min(each.phase.first for each in culprit.links)])
    last = int(profile.steps[max(each.phase.last for each in culprit.links)])
    excess = float(np.median([each.phase.excess_ratio for each in culprit.links]))
    return Candidate(
        cause="slow-link",
        ranks=culprit.ranks,
        steps=(first, last),
        part=_part(profile, [*(each.link for each in culprit.links), *culprit.also]),
        excess_ratio=excess,
        threshold=worst.phase.threshold,
        evidence=(
            f"transfers over {culprit.place} take {format_duration(worst.transfer_ns)} against"
            f" {format_duration(worst.expected_ns)} {culprit.against} (+{format_percent(excess)})"
            f" once all members have entered, in steps {first} to {last}, while both ends compute"
            " as usual"
        ),
    )


def _everywhere(
    profile: LinkProfile, hosts: Mapping[int, str], trouble_in: Callable[[tuple[int, int]], Trouble]
) -> Candidate | None:
    """Return that most links are slower in some steps, where links and steps are several.

    Fewer count where several hosts' counters tell of trouble in these steps.
    """
    common = common_slowness(profile, hosts)
    is_brief = common is None
    if common is None:
        common = common_slowness(profile, hosts, least_steps=1)
    if common is None:
        return None
    phase, chosen = common
    links = np.flatnonzero(chosen)
    first, last = int(profile.steps[phase.first]), int(profile.steps[phase.last])
    alone = is_brief or len(links) < SEVERAL_LINKS
    if alone and len(trouble_in((first, last)).hosts) < PAIR:
        return None
    return Candidate(
        cause="network-degradation",
        ranks=_members(profile, links.tolist()),
        steps=(first, last),
        part=_part(profile, links.tolist()),
        excess_ratio=phase.excess_ratio,
        threshold=phase.threshold,
        evidence=(
            f"{len(links)} of {format_count(len(chosen), 'link')} take"
            f" {format_percent(phase.excess_ratio)} longer for the same transfers in steps {first}"
            f" to {last} than in the others"
        ),
    )


def _many(profile: LinkProfile, slow: Sequence[SlowLink]) -> Candidate:
    links = [each.link for each in slow]
    first = int(profile.steps[int(np.median([each.phase.first for each in slow]))])
    last = int(profile.steps[int(np.median([each.phase.last for each in slow]))])
    excess = float(np.median([each.phase.excess_ratio for each in slow]))
    return Candidate(
        cause="network-degradation",
        ranks=_members(profile, links),
        steps=(first, last),
        part=_part(profile, links),
        excess_ratio=excess,
        threshold=float(np.median([each.phase.threshold for each in slow])),
        evidence=(
            f"{len(links)} of {format_count(len(profile.transfers.links), 'link')} take"
            f" {format_percent(excess)} longer than alike ones in steps {first} to {last}, and no"
            " rank, host or switch is common to them"
        ),
    )


def _members(profile: LinkProfile, links: Sequence[int]) -> tuple[int, ...]:
    chosen = (profile.transfers.links[link] for link in links)
    return tuple(sorted({rank for link in chosen for rank in link.members}))
