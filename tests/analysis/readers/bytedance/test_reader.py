from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.readers.bytedance.format import CODE
from rankscope.analysis.readers.bytedance.graph import read_trace
from rankscope.analysis.readers.bytedance.reader import read_bytedance, split_bytedance_waits
from rankscope.analysis.replay.replayer import Replayer
from rankscope.tracer.span import NONE, Span, SpanKind, UnixNs
from rankscope.tracer.topology import Coords
from tests.support.analysis.bytedance_cluster import LATENCY, ByteDanceCluster
from tests.support.analysis.bytedance_files import published
from tests.support.analysis.cluster import MS
from tests.support.analysis.exit_builders import run_of
from tests.support.dashboard.builders import span_table

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport


def steady(dp: int, stage: int, step: int, mb: int, forward: bool) -> float:  # noqa: FBT001
    return MS * (10 if forward else 20)


def test_steady_pipeline_takes_its_textbook_time() -> None:
    # 1F1B: (micro-batches + stages - 1) x (forward + backward) = 5 x 30 ms, and of the
    # transfers those on the critical path: F0 to stage 1, B0 back, F2 there, B3 back.
    source = ByteDanceCluster(1, 2, 4, steady).run([0]).source()

    replayer = Replayer(read_bytedance(source.info, source.span_table).model)

    # Then gc, three collectives without waits, and the optimizer.
    assert replayer.recorded()[0] == 5 * 30 * MS + 4 * LATENCY + 3_000 + 3 * LATENCY + 2 * MS


def test_full_replay_reproduces_the_recorded_step() -> None:
    rng = np.random.default_rng(3)
    cluster = ByteDanceCluster(2, 4, 8, lambda *at: steady(*at) * rng.uniform(0.5, 2)).run([7, 9])
    source = cluster.source()
    reading = read_bytedance(source.info, source.span_table)

    full = Replayer(reading.model).full_recorded()

    # The replay posts receives as early as possible, this cluster only between two computes.
    assert full == pytest.approx(reading.actual_ns.astype(float), rel=5e-3)


@pytest.mark.parametrize("ahead_ms", [2, 30])
def test_transfer_far_below_zero_counts_as_zero_and_is_reported(ahead_ms: int) -> None:
    source = ByteDanceCluster(2, 1, 2, steady).run([0]).source()
    spans = source.span_table
    clip = spans.name == spans.names.index("optimizer-clip-main-grad")
    # One rank's clock runs ahead: it leaves the collective before the other one enters.
    spans.start_ns[clip & (spans.rank == 0)] -= ahead_ms * MS
    trace = read_trace(source.info, spans)

    rows = trace.rows.type == CODE["optimizer-clip-main-grad"]
    is_error = ahead_ms >= 10
    shorter = 0 if is_error else LATENCY - ahead_ms * MS
    assert sorted(trace.operations.duration_ns[rows]) == [shorter, LATENCY]
    warning = "1 transfers were negative by 10 ms or more (clock error) and count as 0"
    assert read_bytedance(source.info, spans).warnings == ((warning,) if is_error else ())
    assert trace.num_clock_errors == is_error


def test_empty_receive_after_the_last_compute_is_unpaired() -> None:
    cluster = ByteDanceCluster(1, 2, 2, steady).run([0])
    after = max(row[4] for row in cluster.rows if row[3] == "forward-compute" and row[1] == 1)
    cluster.rows.append((0, 1, 0, "forward-recv", after + MS, 1000, 2, NONE))
    source = cluster.source()

    trace = read_trace(source.info, source.span_table)

    recv = trace.rows.type == CODE["forward-recv"]
    assert trace.operations.group[recv].tolist()[-1] == NONE
    assert trace.rows.warnings == ()


def test_data_parallel_operations_of_a_job_without_replicas_are_left_out() -> None:
    cluster = ByteDanceCluster(1, 2, 2, steady).run([0])
    before = len(read_trace(cluster.source().info, cluster.source().span_table).operations)
    cluster.rows.append((0, 0, 0, "grads-reduce-scatter", 0, MS, 0, NONE))

    source = cluster.source()

    assert len(read_trace(source.info, source.span_table).operations) == before


def report_on(name: str) -> RunReport:
    return analyze_run(published(name)[0], name)


@pytest.mark.slow
def test_only_the_slow_worker_of_a_real_job_is_named() -> None:
    report = report_on("AR")

    assert [(found.cause, found.ranks) for found in report.findings] == [("slow-compute", (0,))]
    assert report.coords[0] == Coords(dp=0, pp=0)
    # It starves the stages behind it and their data-parallel peers more than any other rank does.
    culprit = {entry.rank: entry.waits_on[0].rank for entry in report.starved}
    assert {culprit[rank] for rank in (16, 32, 48, 20, 24, 28, 36, 40, 44)} == {0}


def test_overlong_last_stage_of_a_real_job_is_named() -> None:
    report = report_on("ST")

    assert [(found.cause, found.ranks) for found in report.findings] == [
        ("stage-imbalance", (6, 7))
    ]


def operation(name: str, rank: int, start_ms: int, end_ms: int, kind: SpanKind) -> Span:
    return Span(
        rank=rank,
        step=7,
        kind=kind,
        name=name,
        start_ns=UnixNs(start_ms * MS),
        duration_ns=(end_ms - start_ms) * MS,
        seq=0,
        microbatch=0,
        chunk=0,
    )


def worker(rank: int, *, arrives_ms: int) -> list[Span]:
    """Return the step of one of two data-parallel workers: gather, compute, reduce, optimizer."""
    return [
        operation("params-all-gather", rank, arrives_ms, 20, SpanKind.DP_COMM),
        operation("forward-compute", rank, 20, 30, SpanKind.FORWARD),
        operation("backward-compute", rank, 30, 50, SpanKind.BACKWARD),
        operation("grads-reduce-scatter", rank, 60 - arrives_ms, 80, SpanKind.DP_COMM),
        operation("layernorm-grads-all-reduce", rank, 52, 53, SpanKind.TP_COMM),
        operation("optimizer-clip-main-grad", rank, 80, 82, SpanKind.OTHER),
        operation("optimizer", rank, 82, 90, SpanKind.OPTIMIZER),
    ]


def test_wait_split_uses_inferred_groups() -> None:
    run = replace(run_of(2), source_format="bytedance")
    spans = span_table(worker(0, arrives_ms=0) + worker(1, arrives_ms=8))

    split = split_bytedance_waits(run, spans)

    names = [spans.names[code] for code in spans.name.tolist()]
    found = list(zip(names, spans.rank.tolist(), split.wait_ns.tolist(), strict=True))
    assert ("params-all-gather", 0, 8 * MS) in found
    assert ("params-all-gather", 1, 0) in found
    # Rank 0 begins to reduce at 60, rank 1 at 52.
    assert ("grads-reduce-scatter", 0, 0) in found
    assert ("grads-reduce-scatter", 1, 8 * MS) in found
    assert ("optimizer-clip-main-grad", 0, 0) in found
    assert ("forward-compute", 0, -1) in found
    known = split.wait_ns >= 0
    assert (split.wait_ns + split.transfer_ns == spans.duration_ns)[known].all()
    assert split.last_rank[names.index("params-all-gather")] == 1
