"""From slow links to what is told of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes import slow_compute
from rankscope.analysis.causes.candidate import Candidate
from rankscope.analysis.causes.network_degradation import find_slow_network
from rankscope.analysis.trace.context import SampleTable
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords
from tests.support.analysis.link_builders import group, pair, profile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.analysis.replay.model import Link

SIZE, NUM_STAGES, NUM_STEPS = 4, 4, 10
STEP_NS = 100_000_000
JITTER = (0.0, 0.01, -0.01, 0.005, -0.005, 0.01, 0.0, -0.01, 0.005, 0.0)
NO_SAMPLES = SampleTable(
    host=np.zeros(0, np.int32),
    device=np.zeros(0, np.int32),
    at_ns=np.zeros(0, np.int64),
    name=np.zeros(0, np.int32),
    value=np.zeros(0),
    hosts=(),
    names=(),
)


TWO_HOSTS = {
    rank: RankInfo(rank=rank, coords=Coords(dp=rank), host=f"h{rank // SIZE}") for rank in range(8)
}


def told_of(
    links: dict[Link, list[float]],
    ranks: Mapping[int, RankInfo],
    *,
    blamed: tuple[Candidate, ...] = (),
    num: int = 2,
    step_ns: int = STEP_NS,
) -> tuple[Candidate, ...]:
    """Return what is told of links with ``num`` transfers a step."""
    return find_slow_network(
        profile(links, ranks_per_stage=len(ranks), num=num),
        ranks,
        blamed=blamed,
        step_ns=float(step_ns),
        step_start_ns={step: step * step_ns for step in range(NUM_STEPS)},
        samples=NO_SAMPLES,
    )


def slow_device(rank: int, excess_ratio: float) -> Candidate:
    """Return a rank that computes longer in steps 3 to 7."""
    return Candidate(
        cause=slow_compute.CAUSE,
        ranks=(rank,),
        steps=(3, 7),
        part=None,
        excess_ratio=excess_ratio,
        threshold=0.05,
        evidence="",
    )


def risen(factor: float, *, first: int, last: int) -> list[float]:
    """Return 2 ms, give or take 1 %, and so many times as much from one step to another."""
    step = np.arange(NUM_STEPS)
    slow = np.where((step >= first) & (step <= last), factor, 1.0)
    return [float(ms) for ms in 2.0 * (1 + np.array(JITTER)) * slow]


def told(*find_slow_stages: int) -> tuple[Candidate, ...]:
    """Return what is told of 4 stages on 4 hosts, and a small group of all ranks.

    Links take 2 ms and the group 20 us, give or take 1 %; those from the slow stages to the next
    ones, and the group if there are any, take five times as long in steps 3 to 9.
    """
    slow = np.where(np.arange(NUM_STEPS) >= 3, 5.0, 1.0)
    links: dict[Link, list[float]] = {}
    for rank in range(SIZE * (NUM_STAGES - 1)):
        for ends in ((rank, rank + SIZE), (rank + SIZE, rank)):
            jitter = np.roll(JITTER, sum(ends) + ends[0])
            factor = slow if rank // SIZE in find_slow_stages else np.ones(NUM_STEPS)
            links[pair(*ends)] = (2.0 * (1 + jitter) * factor).tolist()
    whole = slow if find_slow_stages else np.ones(NUM_STEPS)
    links[group(*range(SIZE * NUM_STAGES))] = (0.02 * (1 + np.array(JITTER)) * whole).tolist()
    ranks = {
        rank: RankInfo(
            rank=rank,
            coords=Coords(dp=rank % SIZE, pp=rank // SIZE),
            host=f"h{rank // SIZE}",
        )
        for rank in range(SIZE * NUM_STAGES)
    }
    return find_slow_network(
        profile(links, ranks_per_stage=SIZE),
        ranks,
        blamed=(),
        step_ns=float(STEP_NS),
        step_start_ns={step: step * STEP_NS for step in range(NUM_STEPS)},
        samples=NO_SAMPLES,
    )


def test_a_slow_uplink_is_one_finding_and_explains_the_group_that_uses_it() -> None:
    (found,) = told(1)

    assert (found.cause.name, found.ranks) == ("slow-link", tuple(range(4, 12)))
    assert found.steps == (3, 9)
    # 10 ms against 2 ms.
    assert found.excess_ratio == pytest.approx(4.0, rel=0.03)
    assert found.evidence.startswith(
        "transfers over all links between stages 1 and 2 (hosts h1 and h2) take 10.0 ms against"
        " 2.02 ms in other steps, with what links between other stages changed by taken out (+"
    )
    # Operation k is carried by link k: the 8 slow ones and the group of all, the 25th.
    assert found.part is not None
    assert np.flatnonzero(found.part).tolist() == [*range(8, 16), 24]


def test_links_between_most_stages_that_became_slow_are_the_network_and_no_uplink() -> None:
    (found,) = told(0, 1)

    assert (found.cause.name, found.steps) == ("network-degradation", (3, 9))


def test_links_as_usual_tell_nothing() -> None:
    assert told() == ()


def test_the_only_group_is_told_though_it_became_slow_and_well_again_in_a_short_run() -> None:
    # GIVEN a group that takes 1.6 times as long in steps 4 to 8 of 10: its own noise is 1 %,
    # but two of its nine changes are that it became slow and well again
    links = {group(*range(8)): risen(1.6, first=4, last=8)}

    (found,) = told_of(links, TWO_HOSTS)

    assert (found.cause.name, found.steps) == ("network-degradation", (4, 8))
    assert found.excess_ratio == pytest.approx(0.6, abs=0.03)
    assert told_of({group(*range(8)): risen(1.0, first=4, last=8)}, TWO_HOSTS) == ()


def test_a_slow_device_explains_no_more_of_its_links_than_it_is_slower_by() -> None:
    links = {group(*range(8)): risen(2.0, first=3, last=7)}

    # 2.0 / 1.9 leaves 5 %, 2.0 / 1.25 leaves 60 %.
    assert told_of(links, TWO_HOSTS, blamed=(slow_device(2, 0.9),)) == ()
    assert len(told_of(links, TWO_HOSTS, blamed=(slow_device(2, 0.25),))) == 1


def test_what_a_slow_device_leaves_unexplained_is_told_where_it_costs_a_hundredth_of_a_step() -> (
    None
):
    # GIVEN transfers of 2 ms a step that take twice as long beside a rank 25 % slower:
    # 1.5 to 3 ms beyond what it explains
    links = {group(*range(8)): risen(2.0, first=3, last=7)}
    blamed = (slow_device(2, 0.25),)

    assert len(told_of(links, TWO_HOSTS, blamed=blamed, step_ns=100_000_000)) == 1
    assert told_of(links, TWO_HOSTS, blamed=blamed, step_ns=1_000_000_000) == ()
    assert len(told_of(links, TWO_HOSTS, step_ns=1_000_000_000)) == 1


def test_a_device_slow_now_and_then_explains_no_link_that_is_slow_throughout() -> None:
    links = {group(*range(8)): risen(2.0, first=3, last=7)}
    now_and_then = replace(slow_device(2, 0.9), shown_steps=(3, 5, 7))

    assert len(told_of(links, TWO_HOSTS, blamed=(now_and_then,))) == 1
    # AND one slow in all of these steps does, though not in those between two others
    throughout = replace(slow_device(2, 0.9), steps=(1, 7), shown_steps=(1, *range(3, 8)))
    assert told_of(links, TWO_HOSTS, blamed=(throughout,)) == ()
