"""From slow links to what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from analysis.context import SampleTable
from analysis.slow_network import slow_network
from analysis.source import RankInfo
from tests.analysis.link_builders import group, pair, profile
from tracer.topology import Coords

if TYPE_CHECKING:
    from analysis.candidate import Candidate
    from analysis.evidence import Link

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


def told(*slow_stages: int) -> tuple[Candidate, ...]:
    """Return what is told of 4 stages on 4 hosts, and a small group of all ranks.

    Links take 2 ms and the group 20 us, give or take 1 %; those from the slow stages to the next
    ones, and the group if there are any, take five times as long in steps 3 to 9.
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
    return slow_network(
        profile(links, ranks_per_stage=SIZE),
        ranks,
        blamed={},
        step_ns=float(STEP_NS),
        step_start_ns={step: step * STEP_NS for step in range(NUM_STEPS)},
        samples=NO_SAMPLES,
    )


def test_a_slow_uplink_is_one_finding_and_explains_the_group_that_uses_it() -> None:
    (found,) = told(1)

    assert (found.cause, found.ranks) == ("slow-link", tuple(range(4, 12)))
    assert found.steps == (3, 9)
    # 10 ms against 2 ms.
    assert found.excess_ratio == pytest.approx(4.0, rel=0.03)
    assert found.evidence.startswith(
        "transfers over all links between stages 1 and 2 (hosts h1 and h2) take 10.0 ms against"
        " 2.0 ms in other steps, with what links between other stages changed by taken out (+"
    )
    # Operation k is carried by link k: the 8 slow ones and the group of all, the 25th.
    assert found.part is not None
    assert np.flatnonzero(found.part).tolist() == [*range(8, 16), 24]


def test_links_between_most_stages_that_became_slow_are_the_network_and_no_uplink() -> None:
    (found,) = told(0, 1)

    assert (found.cause, found.steps) == ("network-degradation", (3, 9))


def test_links_as_usual_tell_nothing() -> None:
    assert told() == ()
