"""Network causes: a slow link, or a network that is slow in many places."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..arrays.sorting import argsort_rows
from ..report.text import format_count, format_percent, format_ranks
from ..statistics.baseline import faster_steps_baseline
from ..statistics.noise import lower_half_deviation, median_change_deviation, required_deviations
from ..statistics.phases import MIN_EXCESS_RATIO, Phase, find_phases
from ..statistics.significance import is_significant, level_standard_error
from .candidate import Candidate
from .clock_throttle import PART_MARK
from .detector import Cause, Subject
from .link_profile import MIN_SPARSE_STEPS, find_slow_links
from .slow_compute import SLOW_DEVICE
from .slow_link import (
    MIN_LOST_RATIO,
    MIN_UNEXPLAINED_RATIO,
    culprit_candidate,
    excess_of_groups,
    excess_of_pairs,
    find_culprits,
    is_explained_by_devices,
    merge_by_location,
    merge_by_uplink,
    part_of_links,
)
from .thresholds import ALL_RANKS_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..trace.context import SampleTable
    from ..trace.tables import RankInfo
    from .detector import Case
    from .link_profile import LinkProfile, SlowLink
    from .slow_link import Culprit

MIN_CULPRITS = 4
"""Places without a rank in common that make it the network's trouble, not a link's."""

MIN_SLOW_SHARE = 0.1
"""Share of the links that must be slow for that."""

PAIR = 2

MIN_COMMON_LINKS = 3
"""Links that must be slower together for the network to be at fault.
Source: design.md section 5, several groups."""

MIN_COMMON_SHARE = 0.5
"""Share of the links between hosts that must be slower for that."""

UNDECIDED_CERTAINTY = 0.5
"""Certainty of a cause where another fits as well."""

MIN_HOSTS = 2
"""Hosts whose counters tell of trouble that make it the network's."""

CONGESTION = "congestion"

SYMPTOMS = (
    ("flapping links", ("link-down", "link_down", "link-flap", "carrier")),
    ("retransmits", ("retrans", "out-of-seq", "out_of_seq", "ack-timeout", "ack_timeout")),
    (CONGESTION, ("pause", "ecn", "cnp", "congest", "transmit-wait", "xmit_wait")),
)
"""What counters whose name holds one of these words tell, the most specific first.
Source: the RoCE counters of Linux's sysfs and their use in arXiv 2402.15627; InfiniBand, whose
ports hold back instead of marking, tells congestion by ``port_xmit_wait`` alone."""

GROWTH_FACTOR = 2.0
"""A counter that grows this much faster inside the phase than outside speaks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSymptom:
    """What the network's counters tell of a phase."""

    word: str
    """"congestion", "retransmits", "flapping links"; "" where they are quiet."""

    hosts: tuple[str, ...]
    """Hosts whose counters grew."""

    is_known: bool
    """Whether there are such counters at all."""

    watched: frozenset[str] = frozenset()
    """Hosts with counters of congestion, of which the network's other troubles are kin."""

    def __str__(self) -> str:
        if not self.is_known:
            return "there are no counters to tell why"
        if not self.word:
            return "the network's counters are quiet"
        return f"counters of {format_count(len(self.hosts), 'host')} tell of {self.word}"


CAUSE = Cause(name="network-degradation", subject=Subject.JOB, sentence="The network is slow")


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add slow links, or the network that is slow in many places."""
    network = find_slow_network(
        case.links,
        case.ranks,
        blamed=[each for each in found if each.cause in SLOW_DEVICE],
        step_ns=float(np.median(case.reading.actual_ns)),
        step_start_ns={step: begin for step, (begin, _) in case.step_ns.items()},
        samples=case.context.samples,
    )
    return (*found, *network)


def find_slow_network(
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
        for each in find_slow_links(profile, MIN_LOST_RATIO * step_ns)
        if not is_explained_by_devices(profile, each, blamed, MIN_UNEXPLAINED_RATIO * step_ns)
    ]
    links = profile.transfers.links
    hosts = {rank: info.host for rank, info in ranks.items()}
    culprits = find_culprits(
        slow, links, excess_of_pairs(profile, slow), excess_of_groups(profile, slow)
    )
    culprits = merge_by_location(merge_by_uplink(culprits, profile, ranks), ranks)

    def symptom_in(steps: tuple[int, int]) -> NetworkSymptom:
        begin, end = step_start_ns[steps[0]], step_start_ns[steps[1]] + int(step_ns)
        return find_network_symptom(samples, (begin, end))

    everywhere = _common_candidate(profile, hosts, symptom_in)
    if everywhere is not None and has_one_location(profile, everywhere, culprits, hosts):
        everywhere = None
    if everywhere is None and is_only_group(profile, culprits, hosts):
        ring = culprit_candidate(profile, culprits[0])
        return (judge_only_group(ring, hosts, symptom_in(ring.steps)),)
    many = len(culprits) >= MIN_CULPRITS and len(slow) >= MIN_SLOW_SHARE * len(links)
    if everywhere is None and (many or _all_groups(culprits, ranks)):
        everywhere, culprits = _many_candidate(profile, slow), ()
    found = tuple(culprit_candidate(profile, culprit) for culprit in culprits)
    if everywhere is None:
        return found
    evidence = f"{everywhere.evidence}; {symptom_in(everywhere.steps)}"
    # What stands out from links that are slow together is slower still.
    still = [not any(profile.risen[each.link] for each in culprit.links) for culprit in culprits]
    found = tuple(
        each
        for each, is_slower in zip(found, still, strict=True)
        if is_slower and len(each.ranks) <= PAIR
    )
    return (replace(everywhere, evidence=evidence), *found)


def _all_groups(culprits: Sequence[Culprit], ranks: Mapping[int, RankInfo]) -> bool:
    """Tell whether several groups without a rank in common, which make up the job, are slow."""
    if len(culprits) < PAIR or any(len(each.ranks) <= PAIR for each in culprits):
        return False
    members = [set(each.ranks) for each in culprits]
    covered = set[int]().union(*members)
    return sum(map(len, members)) == len(covered) and len(covered) >= ALL_RANKS_SHARE * len(ranks)


def _common_candidate(
    profile: LinkProfile,
    hosts: Mapping[int, str],
    symptom_in: Callable[[tuple[int, int]], NetworkSymptom],
) -> Candidate | None:
    """Return that most links are slower in some steps, where links and steps are several.

    Fewer count where several hosts' counters tell of trouble in these steps.
    """
    common = find_common_slowness(profile, hosts)
    is_brief = common is None
    if common is None:
        common = find_common_slowness(profile, hosts, least_steps=1)
    if common is None:
        return None
    phase, chosen = common
    links = np.flatnonzero(chosen)
    first, last = int(profile.steps[phase.first]), int(profile.steps[phase.last])
    alone = is_brief or len(links) < MIN_COMMON_LINKS
    if alone and len(symptom_in((first, last)).hosts) < PAIR:
        return None
    return Candidate(
        cause=CAUSE,
        ranks=_members(profile, links.tolist()),
        steps=(first, last),
        part=part_of_links(profile, links.tolist()),
        excess_ratio=phase.excess_ratio,
        threshold=phase.threshold,
        evidence=(
            f"{len(links)} of {format_count(len(chosen), 'link')} take"
            f" {format_percent(phase.excess_ratio)} longer for the same transfers in steps {first}"
            f" to {last} than in the others"
        ),
    )


def _many_candidate(profile: LinkProfile, slow: Sequence[SlowLink]) -> Candidate:
    links = [each.link for each in slow]
    first = int(profile.steps[int(np.median([each.phase.first for each in slow]))])
    last = int(profile.steps[int(np.median([each.phase.last for each in slow]))])
    excess = float(np.median([each.phase.excess_ratio for each in slow]))
    return Candidate(
        cause=CAUSE,
        ranks=_members(profile, links),
        steps=(first, last),
        part=part_of_links(profile, links),
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


def links_between_hosts(profile: LinkProfile, hosts: Mapping[int, str]) -> NDArray[np.bool_]:
    """Tell which links lie between hosts, shape (links,).

    Args:
        profile: Transfers by link and step.
        hosts: Host of each rank. Where none is known, or all ranks share one, no link crosses.
    """
    return np.array(
        [
            len({hosts.get(rank, "") for rank in link.members}) > 1
            for link in profile.transfers.links
        ],
        dtype=np.bool_,
    )


def find_common_slowness(
    profile: LinkProfile, hosts: Mapping[int, str], *, least_steps: int = MIN_SPARSE_STEPS
) -> tuple[Phase, NDArray[np.bool_]] | None:
    """Find steps in which most links between hosts are slower than in others.

    Args:
        profile: Transfers by link and step.
        hosts: Host of each rank. Where none is known, or all ranks share one, all links count.
        least_steps: Fewer single slow steps than this are no phase. Where so few count that
            something else has to speak for them, the calm half of the steps tells the noise.

    Returns:
        The phase, and which links take part, shape (links,); None where there is none.
    """
    if not profile.total_ns.size:
        return None
    crosses = links_between_hosts(profile, hosts)
    ratio = profile.total_ns / row_medians(profile.total_ns)[:, None]
    if crosses.any():
        ratio[~crosses] = np.nan
    # All links together: the faster steps of one link alone may be mere luck.
    level = row_medians(ratio.T)[None]
    excess = level / faster_steps_baseline(level) - 1.0
    level_error = level_standard_error(ratio)
    changing = median_change_deviation(excess[0])
    # The median of so few changes is itself uncertain: two of its standard errors are added.
    changing *= 1.0 + 2.0 / np.sqrt(2.0 * max(excess.shape[1] - 1, 1))
    deviation = max(changing, level_error)
    phases = find_phases(
        excess,
        has_few_peers=np.ones(1, dtype=np.bool_),
        min_steps=MIN_SPARSE_STEPS,
        deviation=deviation,
    )
    steady = phases and is_significant(level[0], phases[0], num_series=1, min_deviation=level_error)
    if not steady and least_steps < MIN_SPARSE_STEPS:
        deviation = max(min(changing, _calm_deviation(excess[0])), level_error)
    phase = phases[0] if steady else _find_slow_steps(excess[0], deviation, least_steps)
    if phase is None:
        return None
    # A flapping network is slow in some steps of its phase only.
    within = excess[0] >= phase.excess_ratio / 2
    within[: phase.first] = within[phase.last + 1 :] = False
    outside = ratio[:, ~within]
    before = row_medians(outside) if outside.shape[1] else faster_steps_baseline(ratio)[:, 0]
    slower = np.nan_to_num(row_medians(ratio[:, within]) / before - 1.0) >= phase.excess_ratio / 2
    known = (~np.isnan(ratio)).any(axis=1)
    return (phase, slower) if slower.sum() >= MIN_COMMON_SHARE * known.sum() else None


def _calm_deviation(excess: NDArray[np.float64]) -> float:
    """Return the noise of the calm half of the steps, and two of its standard errors."""
    return lower_half_deviation(excess) * (1.0 + 2.0 / float(np.sqrt(max(len(excess) - 2, 1))))


def _find_slow_steps(
    excess: NDArray[np.float64], deviation: float, least_steps: int
) -> Phase | None:
    """Return the phase of single slow steps, at least so many, that stand out."""
    threshold = max(MIN_EXCESS_RATIO, required_deviations(len(excess)) * deviation)
    slow = np.flatnonzero(excess >= threshold)
    if len(slow) < least_steps:
        return None
    return Phase(
        row=0,
        first=int(slow[0]),
        last=int(slow[-1]),
        excess_ratio=float(np.median(excess[slow])),
        deviation=deviation,
        threshold=threshold,
    )


def has_one_location(
    profile: LinkProfile,
    everywhere: Candidate,
    culprits: Sequence[Culprit],
    hosts: Mapping[int, str],
) -> bool:
    """Tell whether one place explains all links that are slow together.

    They share ranks that the one culprit names, and links which do not touch all of these are as
    fast as ever: a slow network would slow them too.

    Args:
        profile: Transfers by link and step.
        everywhere: What most links are told to be slow by.
        culprits: What the slow links have in common.
        hosts: Host of each rank.
    """
    if len(culprits) != 1 or everywhere.part is None:
        return False
    links, crosses = profile.transfers.links, links_between_hosts(profile, hosts)
    slow = {each.link for each in culprits[0].links}
    slow |= set(profile.transfers.link_of_operation[everywhere.part].tolist())
    shared = set.intersection(*(set(links[link].members) for link in slow))
    counted = np.flatnonzero(crosses | (not crosses.any())).tolist()
    fast = [links[link] for link in counted if link not in slow]
    named = bool(shared & set(culprits[0].ranks))
    return named and any(not shared <= set(link.members) for link in fast)


def is_only_group(
    profile: LinkProfile, culprits: Sequence[Culprit], hosts: Mapping[int, str]
) -> bool:
    """Tell whether the one culprit is a group that is all the job has between hosts.

    In a ring every member is as slow as the slowest link of it, so one bad link and a network that
    is slow everywhere look alike.

    Args:
        profile: Transfers by link and step.
        culprits: What the slow links have in common.
        hosts: Host of each rank; where none is known, or all ranks share one, nothing is between.
    """
    if len(culprits) != 1 or len(culprits[0].ranks) < ALL_RANKS_SHARE * len(hosts):
        return False
    links, mine = profile.transfers.links, set(culprits[0].ranks)
    crossing = np.flatnonzero(links_between_hosts(profile, hosts)).tolist()
    if not crossing or any(links[each.link].is_pair for each in culprits[0].links):
        return False
    return all(mine <= set(links[link].members) for link in crossing)


def judge_only_group(
    found: Candidate, hosts: Mapping[int, str], trouble: NetworkSymptom
) -> Candidate:
    """Return the network at fault, or a link of it where counters tell.

    Trouble on one host is that host's. A network that is congested, loses packets or flaps shows in
    some host's counters: where those of all hosts are quiet, it is a link that carries less than it
    did, a port or a slot of fewer lanes. Without counters the two look alike.

    Args:
        found: The group as a slow link.
        hosts: Host of each rank.
        trouble: What the counters tell of these steps.
    """
    evidence = f"{found.evidence}; {trouble}"
    if len(trouble.hosts) == 1:
        there = tuple(rank for rank in found.ranks if hosts.get(rank) == trouble.hosts[0])
        if there:
            evidence += f", {trouble.hosts[0]} ({format_ranks(there)})"
            return replace(found, ranks=there, evidence=evidence)
    mine = {hosts.get(rank, "") for rank in found.ranks}
    if not trouble.word and mine <= trouble.watched:
        return replace(found, evidence=f"{evidence} on all its hosts, so one link of it is slow")
    if len(trouble.hosts) < MIN_HOSTS:
        found = replace(found, certainty=UNDECIDED_CERTAINTY)
        evidence += (
            "; the job has no other group between hosts, so nothing tells one slow link of it from"
            " a slow network"
        )
    return replace(found, cause=CAUSE, evidence=evidence)


def find_network_symptom(samples: SampleTable, phase_ns: tuple[int, int]) -> NetworkSymptom:
    """Say which counters grew in a phase, and on which hosts.

    Args:
        samples: Readings.
        phase_ns: (begin, end) of the phase, Unix time.
    """
    known, watched = False, set[str]()
    for word, parts in SYMPTOMS:
        for code, name in enumerate(samples.names):
            if PART_MARK in name or not any(part in name for part in parts):
                continue
            grown = _growth(samples, code, phase_ns)
            known |= bool(grown)
            if word == CONGESTION:
                watched |= {samples.hosts[host] for host, _, _ in grown}
            before = [outside for _, _, outside in grown if outside is not None]
            # A network that is slow everywhere makes all hosts' counters grow alike.
            usual = float(np.median(before or [inside for _, inside, _ in grown] or [0.0]))
            hosts = {
                host
                for host, inside, outside in grown
                if inside > GROWTH_FACTOR * max(outside or 0.0, usual) and inside > 0
            }
            if hosts:
                named = tuple(sorted(samples.hosts[host] for host in hosts))
                return NetworkSymptom(word=word, hosts=named, is_known=True)
    return NetworkSymptom(word="", hosts=(), is_known=known, watched=frozenset(watched))


def _growth(
    samples: SampleTable, code: int, phase_ns: tuple[int, int]
) -> list[tuple[int, float, float | None]]:
    """Return (host, growth inside a phase, outside it) of each counter of one name, a ns.

    None where nothing was read outside.
    """
    rows = np.flatnonzero(samples.name == code)
    rows = rows[argsort_rows(samples.host[rows], samples.device[rows], samples.at_ns[rows])]
    host, device, at = samples.host[rows], samples.device[rows], samples.at_ns[rows]
    same = (host[1:] == host[:-1]) & (device[1:] == device[:-1])
    grown = np.maximum(np.diff(samples.value[rows]), 0.0)
    lasted = np.diff(at)
    within = (at[1:] > phase_ns[0]) & (at[:-1] < phase_ns[1])
    size = len(samples.hosts)
    found: list[tuple[int, float, float | None]] = []
    sums = [
        np.bincount(host[1:][chosen], weights=values[chosen].astype(np.float64), minlength=size)
        for chosen in (same & within, same & ~within)
        for values in (grown, lasted)
    ]
    for each in np.flatnonzero(sums[1] > 0).tolist():
        outside = float(sums[2][each] / sums[3][each]) if sums[3][each] > 0 else None
        found.append((each, float(sums[0][each] / sums[1][each]), outside))
    return found
