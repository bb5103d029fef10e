"""Whether what is slow together is one place, the network, or nobody can tell which."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..report.text import format_ranks
from .network_wide import crossing_links

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .candidate import Candidate
    from .counters import Trouble
    from .link_culprits import Culprit
    from .link_profile import LinkProfile

ALL_RANKS_SHARE = 0.8
"""Share of the ranks that slow groups must hold together for the network to be at fault."""

ONE_OF_TWO = 0.5
"""Certainty of a cause where another fits as well."""

SEVERAL_HOSTS = 2
"""Hosts whose counters tell of trouble that make it the network's."""


def have_one_place(
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
    links, crosses = profile.transfers.links, crossing_links(profile, hosts)
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
    crossing = np.flatnonzero(crossing_links(profile, hosts)).tolist()
    if not crossing or any(links[each.link].is_pair for each in culprits[0].links):
        return False
    return all(mine <= set(links[link].members) for link in crossing)


def told_of_only_group(found: Candidate, hosts: Mapping[int, str], trouble: Trouble) -> Candidate:
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
    if len(trouble.hosts) < SEVERAL_HOSTS:
        found = replace(found, certainty=ONE_OF_TWO)
        evidence += (
            "; the job has no other group between hosts, so nothing tells one slow link of it from"
            " a slow network"
        )
    return replace(found, cause="network-degradation", evidence=evidence)
