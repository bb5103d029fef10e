"""Networks that are slow in many places, as opposed to a single slow link.

The same search finds both: what a link cannot explain alone is the network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..arrays.sorting import argsort_rows
from ..report.text import format_count, format_percent, format_ranks, format_steps
from ..statistics.baseline import faster_steps_baseline
from ..statistics.noise import (
    NORMAL_MEDIAN,
    lower_half_deviation,
    median_change_deviation,
    required_deviations,
)
from ..statistics.phases import MEDIAN_STANDARD_ERROR, Phase, find_phases
from ..statistics.significance import is_significant
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate, join_candidates
from .clock_throttle import PART_MARK
from .detector import Cause, Subject
from .link_profile import find_slow_links, links_between_hosts
from .slow_compute import SLOW_DEVICE
from .slow_link import (
    culprit_candidate,
    excess_of_links,
    find_culprits,
    is_explained_by_devices,
    merge_by_location,
    merge_by_uplink,
    part_of_links,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ..trace.context import SampleTable
    from ..trace.tables import RankInfo
    from .detector import Case
    from .link_profile import LinkProfile
    from .slow_link import Culprit

PAIR = 2


CONGESTION = "congestion"
SYMPTOMS = (
    ("link-flap", ("link-down", "link_down", "link-flap", "carrier")),
    ("retransmit", ("retrans", "out-of-seq", "out_of_seq", "ack-timeout", "ack_timeout")),
    (CONGESTION, ("pause", "ecn", "cnp", "congest", "transmit-wait", "xmit_wait")),
)
"""Symptoms, the most specific first, and words in the names of their counters.
Source: the RoCE counters of Linux's sysfs and their use in arXiv 2402.15627. InfiniBand ports hold
packets back instead of marking them, so ``port_xmit_wait`` is their only sign of congestion."""


CAUSE = Cause(name="network-degradation", subject=Subject.JOB, sentence="The network is slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSymptom:
    """Network counters that rose in a phase."""

    word: str
    """"congestion", "retransmit", "link-flap"; empty if none rose."""

    hosts: tuple[str, ...]
    """Hosts whose counters rose."""

    is_known: bool
    """Whether there are network counters at all."""

    watched: frozenset[str] = frozenset()
    """Hosts with congestion counters. Other trouble of a network comes with congestion."""

    def __str__(self) -> str:
        """Write the symptom: "congestion counters rose on 16 hosts"."""
        if not self.is_known:
            return "no network counters were recorded"
        if not self.word:
            return "network counters did not rise"
        return f"{self.word} counters rose on {format_count(len(self.hosts), 'host')}"


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add slow links, or the network."""
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
    """Find slow links, and decide whether it is single links or the network.

    Args:
        profile: Transfers by link and step.
        ranks: Location of each rank.
        blamed: Ranks that compute slowly: a slow device also sends and receives slowly, so of its
            links only those that are slower still are evidence.
        step_ns: Median time of a step.
        step_start_ns: Begin of each step, Unix time.
        samples: Counters of the hosts' network, if any.
    """
    slow = [
        each
        for each in find_slow_links(profile)
        if not is_explained_by_devices(profile, each, blamed, THRESHOLDS.min_loss_ratio * step_ns)
    ]
    culprits = find_culprits(slow, profile.transfers.links, excess_of_links(profile, slow))
    culprits = merge_by_location(merge_by_uplink(culprits, profile, ranks), ranks)
    hosts = {rank: info.host for rank, info in ranks.items()}

    def symptom_in(steps: tuple[int, int]) -> NetworkSymptom:
        begin, end = step_start_ns[steps[0]], step_start_ns[steps[1]] + int(step_ns)
        return find_network_symptom(samples, (begin, end))

    network = _common_candidate(profile, hosts, symptom_in)
    if network is not None and has_one_location(profile, network, culprits, hosts):
        network = None
    if network is None:
        alone = [culprit_candidate(profile, culprit, hosts) for culprit in culprits]
        if not are_only_groups(profile, culprits, hosts):
            return tuple(alone)
        groups = join_candidates(alone, max(alone, key=lambda each: each.excess_ratio))
        return (judge_only_groups(groups, len(alone), hosts, symptom_in(groups.steps)),)
    # Pairs that are slower than alike ones are slower than the network as well. Links that became
    # slow together are the network.
    pairs = (
        culprit_candidate(profile, culprit, hosts)
        for culprit in culprits
        if len(culprit.ranks) <= PAIR
        and not any(profile.rose_together[each.link] for each in culprit.links)
    )
    return (network, *pairs)


def _common_candidate(
    profile: LinkProfile,
    hosts: Mapping[int, str],
    symptom_in: Callable[[tuple[int, int]], NetworkSymptom],
) -> Candidate | None:
    """Return steps in which most links are slower as a candidate; None if there are none.

    Few links, or few steps, count only if counters of several hosts rose in these steps.
    """
    common = find_common_slowness(profile, hosts)
    has_few_steps = common is None
    if common is None:
        common = find_common_slowness(profile, hosts, min_steps=1)
    if common is None:
        return None
    phase, is_slower = common
    links = np.flatnonzero(is_slower)
    first, last = int(profile.steps[phase.first]), int(profile.steps[phase.last])
    symptom = symptom_in((first, last))
    needs_counters = has_few_steps or len(links) < THRESHOLDS.min_peers
    if needs_counters and len(symptom.hosts) < THRESHOLDS.min_several:
        return None
    members = {rank for link in links.tolist() for rank in profile.transfers.links[link].members}
    return Candidate(
        cause=CAUSE,
        ranks=tuple(sorted(members)),
        steps=(first, last),
        part=part_of_links(profile, links.tolist()),
        excess_ratio=phase.excess_ratio,
        threshold=phase.threshold,
        evidence=(
            f"{len(links)} of {format_count(len(is_slower), 'link')} take"
            f" {format_percent(phase.excess_ratio)} longer for the same transfers in"
            f" {format_steps((first, last))} than in other steps; {symptom}"
        ),
    )


def find_common_slowness(
    profile: LinkProfile, hosts: Mapping[int, str], *, min_steps: int = THRESHOLDS.min_lasting_steps
) -> tuple[Phase, NDArray[np.bool_]] | None:
    """Find steps in which most links between hosts are slower than in other steps.

    Args:
        profile: Transfers by link and step.
        hosts: Host of each rank. If no link is between hosts, all links count.
        min_steps: Least number of single slow steps. If it is below `min_lasting_steps`, because
            counters must confirm the result, the noise is that of the lower half of the steps.

    Returns:
        The phase, and which links are slower, shape (links,); None if there is none.
    """
    if not profile.total_ns.size:
        return None
    is_between = links_between_hosts(profile.transfers, hosts)
    ratio = profile.total_ns / row_medians(profile.total_ns)[:, None]
    if is_between.any():
        ratio[~is_between] = np.nan
    # The level of all links together: the faster steps of a single link may be chance.
    level = row_medians(ratio.T)[None]
    excess = level / faster_steps_baseline(level) - 1.0
    # By luck a few levels can differ less from step to step than each of them is uncertain, from
    # how much its links differ.
    spread = np.nanmedian(np.abs(ratio / level - 1.0)) / NORMAL_MEDIAN
    error = MEDIAN_STANDARD_ERROR * spread / np.sqrt((~np.isnan(ratio)).any(axis=1).sum())
    # The median of few changes is itself uncertain: two of its standard errors are added.
    num = excess.shape[1]
    changes = median_change_deviation(excess[0]) * (1.0 + 2.0 / np.sqrt(2.0 * max(num - 1, 1)))
    deviation = float(max(changes, error))
    phases = find_phases(
        excess,
        has_few_peers=True,
        min_steps=THRESHOLDS.min_lasting_steps,
        deviation=deviation,
    )
    is_steady = phases and is_significant(level[0], phases[0], num_series=1)
    if not is_steady and min_steps < THRESHOLDS.min_lasting_steps:
        lower = lower_half_deviation(excess[0]) * (1.0 + 2.0 / np.sqrt(max(num - 2, 1)))
        deviation = float(max(min(changes, lower), error))
    phase = phases[0] if is_steady else _find_single_steps(excess[0], deviation, min_steps)
    if phase is None:
        return None
    # A flapping network is slow in some steps of its phase only.
    within = excess[0] >= phase.excess_ratio / 2
    within[: phase.first] = within[phase.last + 1 :] = False
    outside = ratio[:, ~within]
    before = row_medians(outside) if outside.shape[1] else faster_steps_baseline(ratio)[:, 0]
    slower = np.nan_to_num(row_medians(ratio[:, within]) / before - 1.0) >= phase.excess_ratio / 2
    known = (~np.isnan(ratio)).any(axis=1)
    return (phase, slower) if slower.sum() >= THRESHOLDS.majority_share * known.sum() else None


def _find_single_steps(
    excess: NDArray[np.float64], deviation: float, min_steps: int
) -> Phase | None:
    """Return the phase from the first to the last significant step; None if they are too few."""
    threshold = max(THRESHOLDS.min_excess_ratio, required_deviations(len(excess)) * deviation)
    slow = np.flatnonzero(excess >= threshold)
    if len(slow) < min_steps:
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
    network: Candidate,
    culprits: Sequence[Culprit],
    hosts: Mapping[int, str],
) -> bool:
    """Return whether one culprit explains all links that are slow together.

    All these links share ranks that the only culprit names, and some other link, which does not
    include all of these ranks, is as fast as before: a slow network would slow it too.

    Args:
        profile: Transfers by link and step.
        network: Result of the search for common slowness.
        culprits: What the slow links have in common.
        hosts: Host of each rank.
    """
    if len(culprits) != 1 or network.part is None:
        return False
    links, is_between = profile.transfers.links, links_between_hosts(profile.transfers, hosts)
    slow = {each.link for each in culprits[0].links}
    slow |= set(profile.transfers.link_of_operation[network.part].tolist())
    shared = set.intersection(*(set(links[link].members) for link in slow))
    counted = np.flatnonzero(is_between | (not is_between.any())).tolist()
    fast = [links[link] for link in counted if link not in slow]
    is_named = bool(shared & set(culprits[0].ranks))
    return is_named and any(not shared <= set(link.members) for link in fast)


def are_only_groups(
    profile: LinkProfile, culprits: Sequence[Culprit], hosts: Mapping[int, str]
) -> bool:
    """Return whether the culprits are the only groups that the job has between hosts.

    In a ring every member is as slow as the slowest link, so one slow link and a network that is
    slow everywhere look alike. Several rings that have no rank in common are slow for one reason.

    Args:
        profile: Transfers by link and step.
        culprits: What the slow links have in common.
        hosts: Host of each rank. If hosts are unknown, or all ranks share one, there is no network.
    """
    links, named = profile.transfers.links, [set(each.ranks) for each in culprits]
    covered = set[int]().union(*named)
    between = np.flatnonzero(links_between_hosts(profile.transfers, hosts)).tolist()
    return (
        bool(between)
        and sum(map(len, named)) == len(covered) >= THRESHOLDS.whole_share * len(hosts)
        and not any(links[slow.link].is_pair for each in culprits for slow in each.links)
        and all(any(mine <= set(links[link].members) for mine in named) for link in between)
    )


def judge_only_groups(
    found: Candidate, num_groups: int, hosts: Mapping[int, str], symptom: NetworkSymptom
) -> Candidate:
    """Return the only groups between hosts as the network, or as one link if counters say so.

    Counters that rose on one host name that host. A network that is congested, loses packets or
    flaps shows in the counters of some host. So if they rose on none, it is a link that carries
    less than before: a port, or a slot with fewer lanes. Without counters the two look alike,
    unless several groups are slow at once.

    Args:
        found: The groups as a slow link.
        num_groups: Their number.
        hosts: Host of each rank.
        symptom: Counters in these steps.
    """
    more = f"; {format_count(num_groups - 1, 'more group')} alike" if num_groups > 1 else ""
    evidence = f"{found.evidence}{more}; {symptom}"
    if len(symptom.hosts) == 1:
        there = tuple(rank for rank in found.ranks if hosts.get(rank) == symptom.hosts[0])
        if there:
            evidence += f", {symptom.hosts[0]} ({format_ranks(there)})"
            return replace(found, ranks=there, evidence=evidence)
    if num_groups == 1:
        mine = {hosts.get(rank, "") for rank in found.ranks}
        if not symptom.word and mine <= symptom.watched:
            evidence += " on any of its hosts, so one link of it is slow"
            return replace(found, evidence=evidence)
        if len(symptom.hosts) < THRESHOLDS.min_several:
            found = replace(found, certainty=THRESHOLDS.undecided_certainty)
            evidence += (
                "; the job has no other group between hosts, so a slow link of it and a slow"
                " network look alike"
            )
    return replace(found, cause=CAUSE, evidence=evidence)


def find_network_symptom(samples: SampleTable, phase_ns: tuple[int, int]) -> NetworkSymptom:
    """Return the first of `SYMPTOMS` whose counters rose in a phase, and on which hosts.

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
            # The median of all hosts before the phase: in a slow network all counters rise alike.
            usual = float(np.median(before or [inside for _, inside, _ in grown] or [0.0]))
            hosts = {
                host
                for host, inside, outside in grown
                if inside > THRESHOLDS.min_growth_factor * max(outside or 0.0, usual) and inside > 0
            }
            if hosts:
                named = tuple(sorted(samples.hosts[host] for host in hosts))
                return NetworkSymptom(word=word, hosts=named, is_known=True)
    return NetworkSymptom(word="", hosts=(), is_known=known, watched=frozenset(watched))


def _growth(
    samples: SampleTable, code: int, phase_ns: tuple[int, int]
) -> list[tuple[int, float, float | None]]:
    """Return (host, growth in a phase, growth outside) of each host's counters of one name.

    Args:
        samples: Readings.
        code: The name, as a code of ``samples.names``.
        phase_ns: (begin, end) of the phase, Unix time.

    Returns:
        Hosts as codes; growth per ns, None outside if nothing was read there.
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
