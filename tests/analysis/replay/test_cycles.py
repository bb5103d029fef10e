"""Contradictory traces: the analysis terminates and names the steps that it left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.replay.program import try_to_sort
from rankscope.analysis.trace.errors import AnalysisError
from rankscope.tracer.span import KIND_CODES, NONE, SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, WORLD, Cluster, Source

FORWARD = SpanKind.FORWARD
X, Y = 5, 6
Row = tuple[int, int, SpanKind, int, int, int, int]
"""(step, rank, kind, start, length, group, seq)."""


def source_of(rows: list[Row], *, num_ranks: int, num_steps: int, end_ns: int) -> Source:
    members = tuple(range(num_ranks))
    groups = dict.fromkeys((X, Y, WORLD), (SpanKind.DP_COMM, members))
    cluster = Cluster(Layout(dp=num_ranks), groups)
    for step, rank, kind, start, length, group, seq in rows:
        begin = step * end_ns + start
        cluster.rows.append(
            (step, rank, KIND_CODES[kind], begin, length, group, seq, NONE, NONE, 0, NONE)
        )
    for step in range(num_steps):
        for rank in members:
            cluster.steps.append((step, rank, step * end_ns, (step + 1) * end_ns))
    # The clock error is unknown, so contradictions of up to 10 ms are tolerated.
    info = replace(cluster.run_info(), clock_error_ns=None)
    return Source(info, cluster.span_table(), cluster.step_table())


def in_order(step: int, rank: int, first: int, second: int) -> list[Row]:
    """Return 1 ms of compute, a collective of one group until 2 ms, one of the other until 4 ms."""
    return [
        (step, rank, FORWARD, 0, MS, 0, NONE),
        (step, rank, SpanKind.DP_COMM, MS, MS, first, step),
        (step, rank, SpanKind.DP_COMM, 3 * MS, MS, second, step),
    ]


def test_step_with_a_cycle_is_left_out_and_named() -> None:
    rows = [row for step in range(3) for row in in_order(step, 0, X, Y)]
    rows += in_order(0, 1, X, Y) + in_order(1, 1, Y, X) + in_order(2, 1, X, Y)

    report = analyze_run(source_of(rows, num_ranks=2, num_steps=3, end_ns=5 * MS), "cycle")

    assert report.steps == (0, 2)
    assert any(
        "step 1 left out: ranks 0 and 1 wait in a cycle (dp-comm" in warning
        for warning in report.quality.warnings
    )


def test_run_with_nothing_but_cycles_is_insufficient_evidence() -> None:
    rows = in_order(0, 0, X, Y) + in_order(0, 1, Y, X)

    report = analyze_run(source_of(rows, num_ranks=2, num_steps=1, end_ns=5 * MS), "cycle")

    assert [finding.cause for finding in report.findings] == ["insufficient-evidence"]
    assert "in a cycle" in report.findings[0].evidence


@pytest.mark.slow
def test_chain_of_a_hundred_thousand_nodes_is_ordered_without_recursion() -> None:
    num = 100_000
    source = np.arange(num - 1)

    graph, num_sorted = try_to_sort(num, source, source + 1)
    assert graph.order.tolist() == list(range(num)) == list(range(num_sorted))
    # An edge from the last node to the first makes all of them a cycle.
    cycle = np.append(source, num - 1), np.append(source + 1, 0)
    assert try_to_sort(num, *cycle)[1] == 0


@pytest.mark.slow
def test_thousands_of_consecutive_spans_are_replayed() -> None:
    num = 5_000
    rows = [(0, rank, FORWARD, 10 * k, 8, 0, NONE) for rank in (0, 1) for k in range(num)]

    report = analyze_run(source_of(rows, num_ranks=2, num_steps=1, end_ns=10 * num), "deep")

    assert report.num_spans == 2 * num
    assert report.replay_error_ratio is not None
    assert report.replay_error_ratio < 1e-9


KINDS = (FORWARD, SpanKind.BACKWARD, SpanKind.DP_COMM, SpanKind.WAIT, SpanKind.GC, SpanKind.OTHER)
SPANS = st.tuples(
    st.integers(0, 2), st.integers(0, 2), st.sampled_from(KINDS), st.integers(0, 90),
    st.integers(0, 40), st.sampled_from((0, X, Y, WORLD)), st.integers(-1, 2),
)  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=60)  # cores are shared
@given(rows=st.lists(SPANS, min_size=1, max_size=40))
def test_analysis_of_any_spans_returns_a_report_or_raises_its_own_error(rows: list[Row]) -> None:
    rows += [(step, rank, FORWARD, 91, 5, 0, NONE) for step in range(3) for rank in range(3)]
    try:
        report = analyze_run(source_of(rows, num_ranks=3, num_steps=3, end_ns=100), "any")
    except AnalysisError:
        return

    assert report.findings
    if report.waterfall is not None:
        whole = report.waterfall.by_rank_ns.sum()
        assert whole == np.int64(report.waterfall.by_step_ns.sum())
        assert (report.waterfall.by_rank_ns >= 0).all()
