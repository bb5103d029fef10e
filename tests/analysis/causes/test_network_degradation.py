"""Slow networks, as opposed to slow links."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes import slow_compute, slow_link
from rankscope.analysis.causes.candidate import Candidate
from rankscope.analysis.causes.network_degradation import (
    NetworkSymptom,
    are_only_groups,
    find_network_symptom,
    find_slow_network,
    has_one_location,
    judge_only_groups,
)
from rankscope.analysis.causes.slow_link import Culprit
from rankscope.analysis.statistics.link_profile import Rise, find_rise
from rankscope.analysis.statistics.phases import Phase
from rankscope.analysis.trace.context import empty_samples
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.cluster import (
    MS,
    WORLD,
    Action,
    Begin,
    Cluster,
    Collective,
    Compute,
    End,
    source_of,
)
from tests.support.analysis.link_builders import group, pair, profile
from tests.support.analysis.sample_builders import S, samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankscope.analysis.replay.model import Link

SIZE, NUM_STAGES, NUM_STEPS = 4, 4, 10
STEP_NS = 100_000_000
JITTER = (0.0, 0.01, -0.01, 0.005, -0.005, 0.01, 0.0, -0.01, 0.005, 0.0)
PHASE = (3 * S, 6 * S)
TWO_HOSTS = {
    rank: RankInfo(rank=rank, coords=Coords(dp=rank), host=f"h{rank // SIZE}") for rank in range(8)
}
HOST_NAMES = {rank: info.host for rank, info in TWO_HOSTS.items()}
ON_TWO_HOSTS = profile({group(*range(8)): [10.0] * 8}, infos=TWO_HOSTS)


def candidates_of(
    links: dict[Link, list[float]],
    ranks: Mapping[int, RankInfo],
    *,
    blamed: tuple[Candidate, ...] = (),
    num: int = 2,
    step_ns: int = STEP_NS,
) -> tuple[Candidate, ...]:
    """Return the candidates of these links, with ``num`` transfers per step and no counters."""
    return find_slow_network(
        profile(links, num=num, infos=ranks),
        blamed=blamed,
        step_ns=float(step_ns),
        step_start_ns={step: step * step_ns for step in range(NUM_STEPS)},
        samples=empty_samples(),
    )


def slow_device(rank: int, excess_ratio: float) -> Candidate:
    """Return a rank that computes slowly in steps 3 to 7."""
    return Candidate(
        cause=slow_compute.CAUSE,
        ranks=(rank,),
        steps=(3, 7),
        part=None,
        excess_ratio=excess_ratio,
        threshold=0.05,
        evidence="",
    )


def slow_for_a_while(factor: float, *, first: int, last: int) -> list[float]:
    """Return transfers of 2 ms with 1 % of jitter, multiplied by a factor in some steps."""
    step = np.arange(NUM_STEPS)
    slow = np.where((step >= first) & (step <= last), factor, 1.0)
    return [float(ms) for ms in 2.0 * (1 + np.array(JITTER)) * slow]


def candidates_with_slow_uplinks(*slow_stages: int) -> tuple[Candidate, ...]:
    """Return the candidates of four stages on four hosts, with a small group of all ranks.

    Pairs take 2 ms and the group 20 us, with 1 % of jitter. In steps 3 to 9 the pairs between each
    of the given stages and the next one, and then also the group, take five times as long.
    """
    slow = np.where(np.arange(NUM_STEPS) >= 3, 5.0, 1.0)
    links: dict[Link, list[float]] = {}
    for rank in range(SIZE * (NUM_STAGES - 1)):
        for ends in ((rank, rank + SIZE), (rank + SIZE, rank)):
            jitter = np.roll(JITTER, sum(ends) + ends[0])
            factor = slow if rank // SIZE in slow_stages else np.ones(NUM_STEPS)
            links[pair(*ends)] = (2.0 * (1 + jitter) * factor).tolist()
    whole = slow if slow_stages else np.ones(NUM_STEPS)
    links[group(*range(SIZE * NUM_STAGES))] = (0.02 * (1 + np.array(JITTER)) * whole).tolist()
    ranks = {
        rank: RankInfo(
            rank=rank,
            coords=Coords(dp=rank % SIZE, pp=rank // SIZE),
            host=f"h{rank // SIZE}",
        )
        for rank in range(SIZE * NUM_STAGES)
    }
    return candidates_of(links, ranks)


def test_a_slow_uplink_is_one_candidate_beside_the_group_that_uses_it() -> None:
    (found,) = candidates_with_slow_uplinks(1)

    assert (found.cause.name, found.ranks) == ("slow-link", tuple(range(4, 12)))
    assert found.steps == (3, 9)
    assert found.excess_ratio == pytest.approx(4.0, rel=0.03)
    assert found.evidence.startswith(
        "8 of 8 links between stages 1 and 2, which share an uplink, take 398 % longer"
    )
    # Operation k is carried by link k.
    assert found.part is not None
    assert found.part.tolist() == [*range(8, 16)]


def test_links_between_most_stages_that_became_slow_are_the_network() -> None:
    (found,) = candidates_with_slow_uplinks(0, 2)

    assert (found.cause.name, found.steps) == ("network-degradation", (3, 9))


def test_links_that_all_begin_or_end_on_one_host_are_that_host() -> None:
    (found,) = candidates_with_slow_uplinks(0, 1)

    assert (found.cause.name, found.ranks) == ("slow-link", (4, 5, 6, 7))
    assert found.steps == (3, 9)
    assert found.evidence.startswith("transfers over the links of host h1 take")


def test_links_that_do_not_change_are_no_candidates() -> None:
    assert candidates_with_slow_uplinks() == ()


def test_the_only_group_is_found_though_it_becomes_slow_and_fast_again_in_a_short_run() -> None:
    # GIVEN a group that takes 1.6 times as long in steps 4 to 8 of 10: its noise is 1 %, but two
    # of its nine changes between steps are those of the phase itself
    links = {group(*range(8)): slow_for_a_while(1.6, first=4, last=8)}

    (found,) = candidates_of(links, TWO_HOSTS)

    assert (found.cause.name, found.steps) == ("network-degradation", (4, 8))
    assert found.excess_ratio == pytest.approx(0.6, abs=0.03)
    assert (
        candidates_of({group(*range(8)): slow_for_a_while(1.0, first=4, last=8)}, TWO_HOSTS) == ()
    )


def test_a_slow_device_explains_its_links_only_by_its_own_factor() -> None:
    links = {group(*range(8)): slow_for_a_while(2.0, first=3, last=7)}

    # A factor of 1.9 leaves 2.0 / 1.9, 5 %. One of 1.25 leaves 60 %.
    assert candidates_of(links, TWO_HOSTS, blamed=(slow_device(2, 0.9),)) == ()
    assert len(candidates_of(links, TWO_HOSTS, blamed=(slow_device(2, 0.25),))) == 1


def test_the_rest_that_a_device_leaves_must_cost_a_hundredth_of_a_step() -> None:
    # GIVEN transfers of 2 ms per step that take twice as long, beside a rank that is 25 % slower:
    # 1.5 to 3 ms are unexplained
    links = {group(*range(8)): slow_for_a_while(2.0, first=3, last=7)}
    blamed = (slow_device(2, 0.25),)

    assert len(candidates_of(links, TWO_HOSTS, blamed=blamed, step_ns=100_000_000)) == 1
    assert candidates_of(links, TWO_HOSTS, blamed=blamed, step_ns=1_000_000_000) == ()
    assert len(candidates_of(links, TWO_HOSTS, step_ns=1_000_000_000)) == 1


def test_an_intermittently_slow_device_does_not_explain_a_lastingly_slow_link() -> None:
    links = {group(*range(8)): slow_for_a_while(2.0, first=3, last=7)}
    intermittent = replace(slow_device(2, 0.9), shown_steps=(3, 5, 7))

    assert len(candidates_of(links, TWO_HOSTS, blamed=(intermittent,))) == 1
    # AND one that is slow in all steps of the link does, even if not in others before
    throughout = replace(slow_device(2, 0.9), steps=(1, 7), shown_steps=(1, *range(3, 8)))
    assert candidates_of(links, TWO_HOSTS, blamed=(throughout,)) == ()


FOUR_HOSTS = {rank: f"host {rank // 4}" for rank in range(16)}
GROUPS = [group(k, k + 4, k + 8, k + 12) for k in range(4)]


@pytest.mark.parametrize(
    ("ms", "first", "last"),
    [
        ([10.0, 10.1, 9.9, 10.0, 13.0, 13.1, 12.9, 13.0, 10.0, 10.1], 4, 7),
        # In nearly all steps: from its onset on.
        ([10.0, 10.1, *[13.0, 13.1, 12.9] * 6], 2, 19),
    ],
)
def test_links_that_are_all_slower_in_some_steps_are_a_slow_network(
    ms: list[float], first: int, last: int
) -> None:
    found = find_rise(profile(dict.fromkeys(GROUPS, ms), hosts=FOUR_HOSTS))

    assert found is not None
    assert (found.phase.first, found.phase.last) == (first, last)
    assert found.is_slower.all()


def test_links_that_differ_much_within_a_step_are_no_slow_network() -> None:
    # GIVEN a healthy run whose transfers vary by 20 %: five links, 14 steps, in tenths of their
    # median. By chance the medians of steps 4 to 13 differ by 3 %, and those of steps 0 to 3 are
    # 8 to 16 % higher. The links of one step differ by 14 %, so the standard error of a median of
    # five is 1.25 x 14 % / sqrt 5 = 8 %
    tenths = np.array(
        [
            [12.09, 9.44, 12.16, 10.03, 11.7, 9.05, 9.49, 12.09, 9.74, 13.7, 10.84, 9.97, 9.75, 8],
            [11.61, 12.37, 10.55, 9.83, 9.52, 9.56, 7.96, 9.39, 9.87, 10.67, 10.13, 10.46, 9.68,
             11.31],
            [8.21, 10.83, 9.71, 10.99, 11.1, 11.28, 9.71, 9.78, 5.89, 8.58, 13.38, 7.16, 13.66,
             10.22],
            [12.12, 9.16, 11.15, 12.58, 9.12, 9.06, 8.62, 12.91, 10.07, 9.93, 9.02, 10.14, 8.7,
             10.47],
            [9.91, 11.17, 11.54, 12.47, 9.86, 9.71, 10.58, 8.75, 11.12, 8.29, 8.43, 9.41, 10.29,
             10.09],
        ]
    )  # fmt: skip
    links = [*GROUPS, group(*range(16))]

    assert find_rise(profile(dict(zip(links, tenths, strict=True)), hosts=FOUR_HOSTS)) is None


def test_links_inside_a_host_do_not_count_beside_links_between_hosts() -> None:
    inside = [pair(4 * host, 4 * host + 1) for host in range(4)]
    slow = [10.0, 10.1, 9.9, 10.0, 13.0, 13.1, 12.9, 13.0, 10.0, 10.1]
    usual = [10.0, 10.1, 9.9, 10.0] * 2 + [10.0, 10.1]

    found = find_rise(
        profile({**dict.fromkeys(inside, usual), **dict.fromkeys(GROUPS, slow)}, hosts=FOUR_HOSTS)
    )

    assert found is not None
    assert found.is_slower.tolist() == [False] * 4 + [True] * 4


def test_single_slow_steps_are_found_if_counters_may_confirm_them() -> None:
    # GIVEN two slow steps of eight: four of the seven changes between steps are theirs
    flapping = [10.0, 10.1, 9.9, 10.0, 28.0, 10.1, 28.0, 9.9]
    links = profile(dict.fromkeys(GROUPS, flapping), hosts=FOUR_HOSTS)

    found = find_rise(links, may_be_brief=True)

    assert found is not None
    assert (found.phase.first, found.phase.last) == (4, 6)
    assert found.is_slower.all()
    # AND without counters they are not enough
    assert find_rise(links) is None


def test_steps_that_vary_by_a_fifth_are_no_flapping_network() -> None:
    # GIVEN a lower half of 0, 1, 1 and 2 below the median of 10: a deviation of 1.5 and more
    usual = [10.0, 9.0, 11.0, 8.0, 12.0, 9.0, 11.0, 12.0]

    links = profile(dict.fromkeys(GROUPS, usual), hosts=FOUR_HOSTS)

    assert find_rise(links, may_be_brief=True) is None


STEPS = [10.0] * 8
NO_COUNTERS = NetworkSymptom(word="", hosts=(), is_known=False)


def culprit(*ranks: int, links: tuple[int, ...]) -> Culprit:
    slow = tuple(
        Phase(row=link, first=4, last=7, excess_ratio=0.3, deviation=0.01, threshold=0.1)
        for link in links
    )
    return Culprit(ranks=ranks, links=slow, location="one dp-comm group of 8 ranks")


def rise(*slower: int) -> Rise:
    """Return some of three links as slow together."""
    phase = Phase(row=0, first=4, last=7, excess_ratio=0.3, deviation=0.01, threshold=0.1)
    is_slower = np.isin(np.arange(3), slower)
    return Rise(phase=phase, is_slower=is_slower, excess=np.zeros(8), num_compared=3)


def slow_candidate(*ranks: int, part: tuple[bool, ...]) -> Candidate:
    return Candidate(
        cause=slow_link.CAUSE,
        ranks=ranks,
        steps=(4, 7),
        part=np.flatnonzero(part),
        excess_ratio=0.3,
        threshold=0.1,
        evidence="transfers take longer",
    )


WHOLE = group(*range(8))


@pytest.mark.parametrize(
    ("others", "hosts", "is_the_only_one"),
    [
        ((), HOST_NAMES, True),
        # Links inside a host do not count.
        ((group(0, 1, 2, 3), pair(4, 5)), HOST_NAMES, True),
        ((pair(0, 4),), HOST_NAMES, False),
        # On one host or on unknown hosts there is no network.
        ((), dict.fromkeys(range(8), "a"), False),
        ((), dict.fromkeys(range(8), ""), False),
    ],
)
def test_a_group_of_all_ranks_may_be_the_only_link_between_hosts(
    others: tuple[Link, ...], hosts: dict[int, str], *, is_the_only_one: bool
) -> None:
    links = profile(dict.fromkeys((WHOLE, *others), STEPS), hosts=hosts)

    assert are_only_groups(links, [culprit(*range(8), links=(0,))]) is is_the_only_one


def test_several_rings_that_have_no_rank_in_common_are_all_links_of_a_job() -> None:
    # GIVEN two rings of the same two hosts
    even, odd = group(0, 2, 4, 6), group(1, 3, 5, 7)
    both = [culprit(*even.members, links=(0,)), culprit(*odd.members, links=(1,))]
    links = profile({even: STEPS, odd: STEPS}, infos=TWO_HOSTS)

    assert are_only_groups(links, both)
    # WHEN one of them is as fast as before
    assert not are_only_groups(links, both[:1])
    # THEN it is no network, and two that confirm each other leave no doubt
    slow = slow_candidate(*range(8), part=(True,))
    found = judge_only_groups(ON_TWO_HOSTS, slow, 2, NO_COUNTERS)
    assert (found.cause.name, found.certainty) == ("network-degradation", 1.0)
    assert found.evidence == (
        "transfers take longer; 1 more group alike; no network counters were recorded"
    )


def symptom(word: str = "", *hosts: str, watched: str = "") -> NetworkSymptom:
    """Return counters that rose on hosts; of congestion they are known of the hosts ``watched``."""
    return NetworkSymptom(word=word, hosts=hosts, is_known=True, watched=frozenset(watched.split()))


ALL_EIGHT = tuple(range(8))
LOOKS_ALIKE = (
    "; the job has no other group between hosts, so a slow link of it and a slow network look alike"
)


@pytest.mark.parametrize(
    ("counters", "cause", "ranks", "certainty", "text"),
    [
        (
            NO_COUNTERS, "network-degradation", ALL_EIGHT, 0.5,
            f"; no network counters were recorded{LOOKS_ALIKE}",
        ),
        (
            symptom(watched="h0"), "network-degradation", ALL_EIGHT, 0.5,
            f"; network counters did not rise{LOOKS_ALIKE}",
        ),
        (
            symptom(watched="h0 h1 h2"), "slow-link", ALL_EIGHT, 1.0,
            "; network counters did not rise on any of its hosts, so one link of it is slow",
        ),
        (
            symptom("retransmit", "h1"), "slow-link", (4, 5, 6, 7), 1.0,
            "; retransmit counters rose on 1 host, h1 (ranks 4 to 7)",
        ),
        (
            symptom("congestion", "h0", "h1"), "network-degradation", ALL_EIGHT, 1.0,
            "; congestion counters rose on 2 hosts",
        ),
    ],
)  # fmt: skip
def test_counters_decide_whether_the_only_group_is_a_slow_link_or_the_network(
    counters: NetworkSymptom, cause: str, ranks: tuple[int, ...], certainty: float, text: str
) -> None:
    slow = slow_candidate(*ALL_EIGHT, part=(True,))

    found = judge_only_groups(ON_TWO_HOSTS, slow, 1, counters)

    assert (found.cause.name, found.ranks, found.certainty) == (cause, ranks, certainty)
    assert found.evidence == f"transfers take longer{text}"


def test_slow_links_with_one_location_are_no_slow_network_if_others_are_fast() -> None:
    # GIVEN a slow ring of all ranks, a slow half of it, and a healthy other half
    links = profile(
        {group(*range(8)): STEPS, group(0, 1, 2, 3): STEPS, group(4, 5, 6, 7): STEPS},
        hosts=dict.fromkeys(range(8), "a"),
    )
    place = [culprit(0, 1, 2, 3, links=(0, 1))]

    assert has_one_location(links, rise(0, 1), place)
    # AND if all links are slow, or if there are several culprits, no location explains it
    assert not has_one_location(links, rise(0, 1, 2), place)
    assert not has_one_location(links, rise(0, 1), place * 2)


def test_a_counter_that_rises_in_the_phase_names_the_symptom_and_its_hosts() -> None:
    quiet = [0.0, 1, 2, 3, 4, 5, 6]
    readings = samples(
        "rdma-retransmitted-packets",
        {("a", -1): [0.0, 1, 2, 3, 900, 1800, 2700], ("b", -1): quiet, ("c", -1): quiet},
    )

    found = find_network_symptom(readings, PHASE)

    assert (found.word, found.hosts) == ("retransmit", ("a",))


def test_counters_may_rise_on_all_hosts_alike() -> None:
    # GIVEN 10 a second at first, and 100 a second from second 3 on
    marked = [0.0, 10, 20, 30, 130, 230, 330]
    readings = samples("rdma-ecn-marked-packets", {("a", -1): marked, ("b", -1): marked})

    found = find_network_symptom(readings, PHASE)

    assert (found.word, found.hosts) == ("congestion", ("a", "b"))


def test_only_hosts_with_congestion_counters_are_watched() -> None:
    quiet = {("a", -1): [0.0] * 7, ("b", -1): [0.0] * 7}

    marks = find_network_symptom(samples("rdma-ecn-marked-packets", quiet), PHASE)
    losses = find_network_symptom(samples("tcp-retransmitted-packets", quiet), PHASE)

    assert (marks.word, marks.watched) == ("", frozenset({"a", "b"}))
    assert (losses.is_known, losses.watched) == (True, frozenset())


def test_counters_that_do_not_rise_differ_from_no_counters() -> None:
    quiet = samples("rdma-ecn-marked-packets", {("a", -1): [0.0, 1, 2, 3, 4, 5, 6]})

    assert str(find_network_symptom(quiet, PHASE)) == "network counters did not rise"
    assert str(find_network_symptom(empty_samples(), PHASE)) == "no network counters were recorded"


def test_a_process_named_as_a_symptom_is_none() -> None:
    # A container named "pause" is in every pod.
    busier = {("a", -1): [0.0, 0, 0, 9, 9, 9, 0], ("a", 0): [9.0, 9, 9, 0, 0, 0, 9]}
    command = samples("process-cpu-cores:pause", busier)

    assert not find_network_symptom(command, PHASE).is_known


@pytest.mark.parametrize("first", [3, 9])
def test_a_network_that_is_slow_in_most_steps_is_priced_against_its_fast_ones(first: int) -> None:
    # GIVEN a reduction after 100 ms of compute that takes 10 ms, and from a step on 50 ms
    def script(rank: int, step: int) -> Iterator[Action]:
        for kind, ns in ((SpanKind.FORWARD, 30 * MS), (SpanKind.BACKWARD, 70 * MS)):
            yield Begin(kind, 0)
            yield Compute(ns)
            yield End()
        yield Collective(WORLD, SpanKind.DP_COMM, (50 if step >= first else 10) * MS)

    cluster = Cluster(Layout(dp=8), {WORLD: (SpanKind.DP_COMM, tuple(range(8)))})
    cluster.run(12, script)

    report = analyze_run(source_of(cluster), "run")

    # THEN both the run and the finding are measured against 110 ms
    expected = (first * 110 + (12 - first) * 150) / (12 * 110)
    assert report.slowdown == pytest.approx(expected)
    assert report.findings[0].steps == (first, 11)
    assert report.findings[0].slowdown == pytest.approx(expected)


def test_a_slow_pair_is_named_with_its_hosts_and_rates() -> None:
    # GIVEN pairs between two hosts that carry 1 MiB in 10 ms, one of which takes 40 ms
    links = {
        pair(rank, rank + SIZE): [(40.0 if rank == 1 else 10.0) * (1 + each) for each in JITTER]
        for rank in range(SIZE)
    }

    (found,) = candidates_of(links, TWO_HOSTS, num=4)

    assert found.evidence.startswith(
        "transfers over the pair 1 - 5 on h0 and h1 take 40.0 ms against 10.0 ms for alike ones"
        " (+300 %, 0.0262 GB/s of payload against 0.105 GB/s), counted from"
    )
