"""Networks that are slow in many places, as opposed to a single slow link.

The same search finds both: what a link cannot explain alone is the network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.sorting import argsort_rows
from ..report.text import format_count, format_percent, format_ranks, format_steps
from ..statistics.link_profile import find_rise
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate, join_candidates
from .clock_throttle import PART_MARK
from .detector import Cause, ProofForm, ShownIn, Subject
from .slow_compute import SLOW_DEVICE
from .slow_link import CAUSE as SLOW_LINK
from .slow_link import (
    culprit_candidate,
    find_culprits,
    find_slow_host,
    is_explained_by_devices,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..statistics.link_profile import LinkProfile, Rise
    from ..trace.context import SampleTable
    from .detector import Case
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


CAUSE = Cause(
    name="network-degradation",
    subject=Subject.JOB,
    sentence="The network is slow",
    shown_in=ShownIn.TRANSFERS,
    proof_form=ProofForm.LINKS,
)


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


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add slow links, or the network."""
    network = find_slow_network(
        case.links,
        blamed=[candidate for candidate in candidates if candidate.cause in SLOW_DEVICE],
        step_ns=float(np.median(case.reading.actual_ns)),
        step_start_ns={step: begin for step, (begin, _) in case.step_ns.items()},
        samples=case.context.samples,
    )
    return (*candidates, *network)


def find_slow_network(
    profile: LinkProfile,
    *,
    blamed: Sequence[Candidate],
    step_ns: float,
    step_start_ns: Mapping[int, int],
    samples: SampleTable,
) -> tuple[Candidate, ...]:
    """Find slow links, and decide whether it is single links or the network.

    Args:
        blamed: Ranks that compute slowly: a slow device also sends and receives slowly, so of its
            links only those that are slower still are evidence.
        step_start_ns: Begin of each step, Unix time.
        samples: Counters of the hosts' network, if any.
    """

    def symptom_in(steps: tuple[int, int]) -> NetworkSymptom:
        begin, end = step_start_ns[steps[0]], step_start_ns[steps[1]] + int(step_ns)
        return find_network_symptom(samples, (begin, end))

    min_lost_ns = THRESHOLDS.min_loss_ratio * step_ns
    host = find_slow_host(profile)
    if host is not None:
        table, culprit = host
        if not all(
            is_explained_by_devices(table, slow, blamed, min_lost_ns) for slow in culprit.links
        ):
            others = [
                slow
                for slow in profile.slow_links
                if not table.is_between_hosts[slow.row]
                or set(table.links[slow.row].members).isdisjoint(culprit.ranks)
            ]
            rest = (culprit_candidate(profile, other) for other in find_culprits(profile, others))
            return (culprit_candidate(table, culprit), *rest)
    culprits = find_culprits(
        profile,
        [
            slow
            for slow in profile.slow_links
            if not is_explained_by_devices(profile, slow, blamed, min_lost_ns)
        ],
    )
    alone = [culprit_candidate(profile, culprit) for culprit in culprits]
    rise = profile.rise
    together = None if rise is None else _candidate_of(profile, rise, symptom_in)
    if together is None:
        rise = find_rise(profile, may_be_brief=True)
        together = None if rise is None else _candidate_of(profile, rise, symptom_in, is_brief=True)
    if rise is not None and together is not None and not has_one_location(profile, rise, culprits):
        # Pairs that are slower than alike ones are slower than the network as well.
        return (together, *(candidate for candidate in alone if len(candidate.ranks) <= PAIR))
    if not are_only_groups(profile, culprits):
        return tuple(alone)
    groups = join_candidates(alone, max(alone, key=lambda candidate: candidate.excess_ratio))
    return (judge_only_groups(profile, groups, len(alone), symptom_in(groups.steps)),)


def _candidate_of(
    profile: LinkProfile,
    rise: Rise,
    symptom_in: Callable[[tuple[int, int]], NetworkSymptom],
    *,
    is_brief: bool = False,
) -> Candidate | None:
    """Return links that became slow together as the network, or as one uplink.

    Few links, or few steps, count only if counters of several hosts rose in these steps.
    """
    links, steps = np.flatnonzero(rise.is_slower).tolist(), rise.phase.steps(profile.steps)
    symptom = symptom_in(steps)
    needs_counters = is_brief or len(links) < THRESHOLDS.min_peers
    if needs_counters and len(symptom.hosts) < THRESHOLDS.min_several:
        return None
    where = " between hosts" if profile.is_between_hosts.any() else ""
    if rise.stages is not None:
        where = f" between stages {rise.stages[0]} and {rise.stages[1]}, which share an uplink,"
    return Candidate(
        cause=CAUSE if rise.stages is None else SLOW_LINK,
        ranks=tuple(sorted({rank for link in links for rank in profile.links[link].members})),
        steps=steps,
        part=profile.operations_of(links),
        excess_ratio=rise.phase.excess_ratio,
        threshold=rise.phase.threshold,
        evidence=(
            f"{len(links)} of {format_count(rise.num_compared, 'link')}{where} take"
            f" {format_percent(rise.phase.excess_ratio)} longer for the same transfers in"
            f" {format_steps(steps)} than in other steps; {symptom}"
        ),
    )


def has_one_location(profile: LinkProfile, rise: Rise, culprits: Sequence[Culprit]) -> bool:
    """Return whether one culprit explains all links that are slow together.

    All these links share ranks that the only culprit names, and some other link, which does not
    include all of these ranks, is as fast as before: a slow network would slow it too.
    """
    if len(culprits) != 1:
        return False
    slow = {phase.row for phase in culprits[0].links} | {*np.flatnonzero(rise.is_slower).tolist()}
    shared = set.intersection(*(set(profile.links[link].members) for link in slow))
    counted = profile.is_between_hosts | (not profile.is_between_hosts.any())
    fast = [profile.links[link] for link in np.flatnonzero(counted) if link not in slow]
    is_named = bool(shared & set(culprits[0].ranks))
    return is_named and any(not shared <= set(link.members) for link in fast)


def are_only_groups(profile: LinkProfile, culprits: Sequence[Culprit]) -> bool:
    """Return whether the culprits are the only groups that the job has between hosts.

    In a ring every member is as slow as the slowest link, so one slow link and a network that is
    slow everywhere look alike. Several rings that have no rank in common are slow for one reason.
    If hosts are unknown, or all ranks share one, there is no network.
    """
    named = [set(culprit.ranks) for culprit in culprits]
    covered = set[int]().union(*named)
    between = np.flatnonzero(profile.is_between_hosts)
    return (
        len(between) > 0
        and sum(map(len, named)) == len(covered) >= THRESHOLDS.whole_share * len(profile.ranks)
        and not any(profile.is_pair[slow.row] for culprit in culprits for slow in culprit.links)
        and all(any(mine <= set(profile.links[link].members) for mine in named) for link in between)
    )


def judge_only_groups(
    profile: LinkProfile, groups: Candidate, num_groups: int, symptom: NetworkSymptom
) -> Candidate:
    """Return the only groups between hosts as the network, or as one link if counters say so.

    Counters that rose on one host name that host. A network that is congested, loses packets or
    flaps shows in the counters of some host. So if they rose on none, it is a link that carries
    less than before: a port, or a slot with fewer lanes. Without counters the two look alike,
    unless several groups are slow at once.
    """
    host_of = {rank: profile.ranks[rank].host for rank in groups.ranks}
    there = tuple(rank for rank, host in host_of.items() if (host,) == symptom.hosts)
    more = f"; {format_count(num_groups - 1, 'more group')} alike" if num_groups > 1 else ""
    evidence = f"{groups.evidence}{more}; {symptom}"
    if there:
        evidence += f", {symptom.hosts[0]} ({format_ranks(there)})"
        return replace(groups, ranks=there, evidence=evidence)
    if num_groups == 1 and not symptom.word and set(host_of.values()) <= symptom.watched:
        evidence += " on any of its hosts, so one link of it is slow"
        return replace(groups, evidence=evidence)
    if num_groups == 1 and len(symptom.hosts) < THRESHOLDS.min_several:
        groups = replace(groups, certainty=THRESHOLDS.undecided_certainty)
        evidence += (
            "; the job has no other group between hosts, so a slow link of it and a slow network"
            " look alike"
        )
    return replace(groups, cause=CAUSE, evidence=evidence)


def find_network_symptom(samples: SampleTable, phase_ns: tuple[int, int]) -> NetworkSymptom:
    """Return the first of `SYMPTOMS` whose counters rose in a phase, and on which hosts.

    Args:
        phase_ns: (begin, end) of the phase, Unix time.
    """
    is_known, watched = False, set[str]()
    for word, parts in SYMPTOMS:
        for code, name in enumerate(samples.names):
            if PART_MARK in name or not any(part in name for part in parts):
                continue
            grown = _growth(samples, code, phase_ns)
            is_known |= bool(grown)
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
    return NetworkSymptom(word="", hosts=(), is_known=is_known, watched=frozenset(watched))


def _growth(
    samples: SampleTable, code: int, phase_ns: tuple[int, int]
) -> list[tuple[int, float, float | None]]:
    """Return (host, growth in a phase, growth outside) of each host's counters of one name."""
    rows = np.flatnonzero(samples.name == code)
    rows = rows[argsort_rows(samples.host[rows], samples.device[rows], samples.at_ns[rows])]
    host, device, at = samples.host[rows], samples.device[rows], samples.at_ns[rows]
    # From each reading to the next one of the same counter. One that starts again does not shrink.
    same = (host[1:] == host[:-1]) & (device[1:] == device[:-1])
    within = (at[1:] > phase_ns[0]) & (at[:-1] < phase_ns[1])
    grown, lasted = (
        np.bincount(2 * host[1:][same] + within[same], change[same], 2 * len(samples.hosts))
        for change in (
            np.maximum(np.diff(samples.value[rows]), 0.0),
            np.diff(at).astype(np.float64),
        )
    )
    return [
        (
            row,
            float(grown[2 * row + 1] / lasted[2 * row + 1]),
            float(grown[2 * row] / lasted[2 * row]) if lasted[2 * row] > 0 else None,
        )
        for row in np.flatnonzero(lasted[1::2] > 0).tolist()
    ]
