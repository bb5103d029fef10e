"""The graph of who waits for whom, outward from a culprit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.breakdown.starved import MIN_WAIT_RATIO
from rankscope.analysis.breakdown.wait_graph import (
    WaitGraph,
    follow_waits,
    most_waited_for,
)
from rankscope.analysis.report.network import DirectWaits
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.cluster import MS, gpt_cluster, source_of

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

SLOW = 5


@pytest.fixture(scope="module")
def report() -> RunReport:
    """Return the report of 8 ranks of which rank 5 is slow: TP pairs (0, 1), (2, 3), ..."""
    cluster = gpt_cluster(
        Layout(pp=2, dp=2, tp=2),
        num_steps=8,
        forward_ns=lambda rank, *_: 18 * MS if rank == SLOW else 10 * MS,
    )
    return analyze_run(source_of(cluster), "tiny")


def graph_of(report: RunReport, *culprits: int, max_nodes: int = 512) -> WaitGraph:
    assert report.direct_waits is not None
    return follow_waits(report.direct_waits, culprits, report.coords, max_nodes=max_nodes)


def test_waits_lead_outward_from_the_culprit(report: RunReport) -> None:
    graph = graph_of(report, SLOW)

    # THEN its TP partner waits for it directly, and each rank for one that is nearer
    distance = {node.ranks[0]: node.distance for node in graph.nodes}
    assert distance[SLOW] == 0
    assert distance[4] == 1
    assert graph.num_ranks == len(graph.nodes) == 8
    for edge in graph.edges:
        assert graph.nodes[edge.node].distance > graph.nodes[edge.on_node].distance
    partner = next(
        edge
        for edge in graph.edges
        if graph.nodes[edge.node].ranks == (4,) and graph.nodes[edge.on_node].ranks == (SLOW,)
    )
    # AND for as long as the attribution charges to it, because nothing is between them
    charged = next(one for one in report.starved if one.rank == 4).waits_on[0]
    assert charged.rank == SLOW
    assert partner.ratio == pytest.approx(charged.ratio, rel=0.05)


def test_above_the_limit_ranks_of_a_stage_are_one_node(report: RunReport) -> None:
    single, grouped = graph_of(report, SLOW), graph_of(report, SLOW, max_nodes=4)

    assert grouped.num_ranks == single.num_ranks
    assert len(grouped.nodes) < len(single.nodes)
    assert grouped.nodes[0].ranks == (SLOW,)
    keys = [(node.distance, node.stage) for node in grouped.nodes[1:]]
    assert len(set(keys)) == len(keys)
    # AND the ranks that wait do so as long as on their own
    for edge in grouped.edges:
        assert edge.ratio >= MIN_WAIT_RATIO
        assert set(edge.ranks) <= set(grouped.nodes[edge.node].ranks)
    whole = sum(edge.ratio * len(edge.ranks) for edge in grouped.edges)
    assert whole == pytest.approx(sum(edge.ratio for edge in single.edges))


def test_ranks_of_a_node_that_do_not_wait_make_the_share_of_those_that_do_no_smaller() -> None:
    # GIVEN ranks 2 and 3 of one stage: 2 waits 8 % of a step for rank 0, and 3 as long for rank 1
    coords = {rank: Coords(dp=rank, pp=rank // 2) for rank in range(4)}
    waits = DirectWaits(
        rank=np.array([2, 3]),
        on_rank=np.array([0, 1]),
        waiting_ns=np.array([8 * MS, 8 * MS]),
        total_ns=100 * MS,
    )

    graph = follow_waits(waits, (0, 1), coords, max_nodes=2)

    assert [node.ranks for node in graph.nodes] == [(0,), (1,), (2, 3)]
    assert [(edge.ranks, edge.on_node, edge.ratio) for edge in graph.edges] == [
        ((2,), 0, 0.08),
        ((3,), 1, 0.08),
    ]


def test_the_rank_most_waited_for_is_that_of_the_longest_sum(report: RunReport) -> None:
    assert report.direct_waits is not None
    assert most_waited_for(report.direct_waits) == SLOW
    assert most_waited_for(replace(report.direct_waits, total_ns=10**15)) is None


def test_no_rank_waits_for_one_that_is_as_fast_as_its_peers() -> None:
    report = analyze_run(
        source_of(gpt_cluster(Layout(dp=4), num_steps=4, forward_ns=lambda *_: 10 * MS)), "tiny"
    )
    assert [node.ranks for node in graph_of(report, 2).nodes] == [(2,)]
