from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.causes import slow_link
from rankscope.analysis.causes.candidate import Candidate
from rankscope.analysis.causes.link_profile import SlowLink
from rankscope.analysis.causes.network_degradation import (
    NetworkSymptom,
    has_one_location,
    is_only_group,
    judge_only_group,
)
from rankscope.analysis.causes.slow_link import Culprit
from rankscope.analysis.statistics.phases import Phase
from tests.support.analysis.link_builders import group, pair, profile

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import Link

TWO_HOSTS = {rank: f"host {rank // 4}" for rank in range(8)}
STEPS = [10.0] * 8
NO_COUNTERS = NetworkSymptom(word="", hosts=(), is_known=False)


def culprit(*ranks: int, links: tuple[int, ...]) -> Culprit:
    phase = Phase(row=0, first=4, last=7, excess_ratio=0.3, deviation=0.01, threshold=0.1)
    slow = tuple(
        SlowLink(link=link, phase=phase, expected_ns=10.0, transfer_ns=13.0) for link in links
    )
    return Culprit(ranks=ranks, links=slow, place="one dp-comm group of 8 ranks")


def candidate(*ranks: int, part: tuple[bool, ...]) -> Candidate:
    return Candidate(
        cause=slow_link.CAUSE,
        ranks=ranks,
        steps=(4, 7),
        part=np.array(part),
        excess_ratio=0.3,
        threshold=0.1,
        evidence="transfers take longer",
    )


def only(links: dict[Link, list[float]], hosts: dict[int, str] = TWO_HOSTS) -> bool:
    """Tell whether link 0, the group of all ranks, is all that the job has between hosts."""
    return is_only_group(profile(links), [culprit(*range(8), links=(0,))], hosts)


def test_a_group_of_all_ranks_on_two_hosts_is_all_that_lies_between_them() -> None:
    whole = group(*range(8))

    assert only({whole: STEPS})
    # Links inside a host are no network.
    assert only({whole: STEPS, group(0, 1, 2, 3): STEPS, pair(4, 5): STEPS})


def test_another_link_between_hosts_that_is_not_slow_leaves_it_a_slow_link() -> None:
    assert not only({group(*range(8)): STEPS, pair(0, 4): STEPS})


def test_a_group_on_one_host_or_on_hosts_that_nobody_knows_has_no_network() -> None:
    assert not only({group(*range(8)): STEPS}, dict.fromkeys(range(8), "a"))
    assert not only({group(*range(8)): STEPS}, dict.fromkeys(range(8), ""))


def test_without_counters_the_only_group_is_the_networks_and_says_what_nobody_can_tell() -> None:
    found = judge_only_group(candidate(*range(8), part=(True,)), TWO_HOSTS, NO_COUNTERS)

    assert (found.cause.name, found.certainty) == ("network-degradation", 0.5)
    assert found.evidence == (
        "transfers take longer; there are no counters to tell why; the job has no other group"
        " between hosts, so nothing tells one slow link of it from a slow network"
    )


def test_quiet_counters_on_all_its_hosts_make_the_only_group_a_slow_link() -> None:
    slow = candidate(*range(8), part=(True,))
    quiet = NetworkSymptom(
        word="", hosts=(), is_known=True, watched=frozenset({"host 0", "host 1", "host 2"})
    )
    on_one_host = NetworkSymptom(word="", hosts=(), is_known=True, watched=frozenset({"host 0"}))

    found = judge_only_group(slow, TWO_HOSTS, quiet)

    assert (found.cause.name, found.ranks, found.certainty) == ("slow-link", tuple(range(8)), 1.0)
    assert found.evidence == (
        "transfers take longer; the network's counters are quiet on all its hosts, so one link of"
        " it is slow"
    )
    assert judge_only_group(slow, TWO_HOSTS, on_one_host).cause.name == "network-degradation"


def test_counters_of_one_host_name_its_ranks_and_of_two_the_network() -> None:
    one = NetworkSymptom(word="retransmits", hosts=("host 1",), is_known=True)
    both = NetworkSymptom(word="congestion", hosts=("host 0", "host 1"), is_known=True)
    slow = candidate(*range(8), part=(True,))

    found = judge_only_group(slow, TWO_HOSTS, one)
    network = judge_only_group(slow, TWO_HOSTS, both)

    assert (found.cause.name, found.ranks) == ("slow-link", (4, 5, 6, 7))
    assert found.evidence.endswith(
        "; counters of 1 host tell of retransmits, host 1 (ranks 4 to 7)"
    )
    assert (network.cause.name, network.ranks) == ("network-degradation", tuple(range(8)))
    assert network.evidence.endswith("counters of 2 hosts tell of congestion")


def test_slow_links_that_share_a_place_are_no_slow_network_while_others_are_as_fast() -> None:
    # The ring of all, and the half of it that holds the slow pair; the other half is as usual.
    links = {group(*range(8)): STEPS, group(0, 1, 2, 3): STEPS, group(4, 5, 6, 7): STEPS}
    one_host = dict.fromkeys(range(8), "a")
    slow = candidate(*range(8), part=(True, True, False))
    place = [culprit(0, 1, 2, 3, links=(0, 1))]

    assert has_one_location(profile(links), slow, place, one_host)
    # Where all are slow, no place explains it; nor where several culprits are named.
    everything = candidate(*range(8), part=(True, True, True))
    assert not has_one_location(profile(links), everything, place, one_host)
    assert not has_one_location(profile(links), slow, place * 2, one_host)
