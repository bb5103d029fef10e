from __future__ import annotations

import networkx as nx
import pytest

from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.networkx_graph import dependency_graph
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, gpt_cluster, source_of


@pytest.fixture(scope="module")
def graph() -> nx.DiGraph[int]:
    source = source_of(gpt_cluster(Layout(pp=2), num_steps=2, forward_ns=lambda *_: 10 * MS))
    reading = read_traced(source.info, source.span_table, source.step_table)
    return dependency_graph(reading.model, 1)


def test_graph_of_a_step_is_acyclic(graph: nx.DiGraph[int]) -> None:
    assert nx.is_directed_acyclic_graph(graph)
    assert {node["rank"] for _, node in graph.nodes(data=True)} == {0, 1}


def test_no_operation_begins_before_its_predecessors_have_ended(graph: nx.DiGraph[int]) -> None:
    late = [
        (before, after)
        for before, after in graph.edges
        if graph.nodes[before]["end_ns"] > graph.nodes[after]["start_ns"]
    ]

    assert late == []


def test_send_and_its_receive_are_one_instance(graph: nx.DiGraph[int]) -> None:
    instances: dict[int, set[str]] = {}
    for _, node in graph.nodes(data=True):
        if node["kind"].startswith("pp-"):
            instances.setdefault(node["instance"], set()).add(node["kind"])

    # Four micro-batches, forward and backward.
    assert list(instances.values()) == [{"pp-send", "pp-recv"}] * 8


def test_the_slow_rank_is_critical_and_its_partner_has_slack() -> None:
    # Rank 1's forwards take 30 ms, rank 0's 20; a send waits until rank 1 is ready to receive.
    source = source_of(
        gpt_cluster(Layout(pp=2), num_steps=1, forward_ns=lambda rank, *_: (10 + 5 * rank) * MS)
    )
    reading = read_traced(source.info, source.span_table, source.step_table)
    graph = dependency_graph(reading.model, 0)

    forwards: dict[int, list[float]] = {0: [], 1: []}
    for _, node in graph.nodes(data=True):
        if node["kind"] == "forward" and node["work_ns"] > 0:
            forwards[node["rank"]].append(node["slack_ns"])
        assert node["critical"] == (node["slack_ns"] == 0)

    # The first forward of rank 0 fills the pipeline. Each later one ends 10 ms before it is needed.
    assert forwards[1] == [0] * 4
    assert forwards[0] == [0, 10 * MS, 10 * MS, 10 * MS]


def test_graph_of_some_ranks_and_steps_has_only_these() -> None:
    source = source_of(gpt_cluster(Layout(dp=2, pp=2), num_steps=3, forward_ns=lambda *_: 10 * MS))
    reading = read_traced(source.info, source.span_table, source.step_table)
    whole = dependency_graph(reading.model, [0, 2])
    some = dependency_graph(reading.model, [2, 0], ranks=[1, 3])

    assert {node["step"] for _, node in some.nodes(data=True)} == {0, 2}
    assert {node["rank"] for _, node in some.nodes(data=True)} == {1, 3}
    assert nx.utils.graphs_equal(some, whole.subgraph(some.nodes))
