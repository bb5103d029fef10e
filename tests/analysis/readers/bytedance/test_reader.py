from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.readers.bytedance.format import CODE
from rankscope.analysis.readers.bytedance.graph import build_model, read_trace
from rankscope.analysis.readers.bytedance.reader import read_bytedance, split_bytedance_waits
from rankscope.analysis.replay.what_if import Replayer, WhatIf, what_if
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RunInfo, SpanTable, StepTable
from rankscope.tracer.span import NONE, Span, SpanKind, UnixNs
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.bytedance_cluster import LATENCY, ByteDanceCluster
from tests.support.analysis.cluster import MS, Source
from tests.support.dashboard.builders import span_table
from tests.support.traces import TRACES

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport


def steady(dp: int, stage: int, step: int, mb: int, forward: bool) -> float:  # noqa: FBT001
    return MS * (10 if forward else 20)


def test_a_steady_pipeline_takes_its_textbook_time() -> None:
    # 1F1B: (micro-batches + stages - 1) x (forward + backward) = 5 x 30 ms, and of the
    # transfers those on the critical path: F0 to stage 1, B0 back, F2 there, B3 back.
    source = ByteDanceCluster(1, 2, 4, steady).run([0]).source()

    replayer = Replayer(read_bytedance(source.info, source.span_table).model)

    # After it gc, three collectives that wait for nobody, and the optimizer.
    assert replayer.recorded()[0] == 5 * 30 * MS + 4 * LATENCY + 1000 + 3 * LATENCY + MS


def test_the_full_replay_reproduces_the_recorded_step() -> None:
    rng = np.random.default_rng(3)
    cluster = ByteDanceCluster(2, 4, 8, lambda *at: steady(*at) * rng.uniform(0.5, 2)).run([7, 9])
    source = cluster.source()
    reading = read_bytedance(source.info, source.span_table)

    full = Replayer(reading.model).full_recorded()

    # The model posts receives as early as it can, this cluster only between two computes.
    assert full == pytest.approx(reading.actual_ns.astype(float), rel=5e-3)


def test_a_transfer_far_below_zero_counts_as_zero_and_is_reported() -> None:
    source = ByteDanceCluster(2, 1, 2, steady).run([0]).source()
    spans = source.span_table
    clip = spans.name == spans.names.index("optimizer-clip-main-grad")
    # One rank's clock runs 30 ms ahead: it leaves the collective before the other one enters.
    spans.start_ns[clip & (spans.rank == 0)] -= 30 * MS
    trace = read_trace(source.info, spans)

    rows = trace.rows.type == CODE["optimizer-clip-main-grad"]
    assert sorted(trace.operations.duration_ns[rows]) == [0, LATENCY]
    assert read_bytedance(source.info, spans).warnings == (
        "1 transfers were negative by 10 ms or more (clock error) and count as 0",
    )


def test_a_small_negative_transfer_is_kept_as_it_is() -> None:
    source = ByteDanceCluster(2, 1, 2, steady).run([0]).source()
    spans = source.span_table
    clip = spans.name == spans.names.index("optimizer-clip-main-grad")
    spans.start_ns[clip & (spans.rank == 0)] -= 2 * MS
    trace = read_trace(source.info, spans)

    rows = trace.rows.type == CODE["optimizer-clip-main-grad"]
    assert sorted(trace.operations.duration_ns[rows]) == [LATENCY - 2 * MS, LATENCY]
    assert trace.num_clock_errors == 0


def test_an_empty_receive_after_the_last_compute_pairs_with_nobody() -> None:
    cluster = ByteDanceCluster(1, 2, 2, steady).run([0])
    after = max(row[4] for row in cluster.rows if row[3] == "forward-compute" and row[1] == 1)
    cluster.rows.append((0, 1, 0, "forward-recv", after + MS, 1000, 2, NONE))
    source = cluster.source()

    trace = read_trace(source.info, source.span_table)

    recv = trace.rows.type == CODE["forward-recv"]
    assert trace.operations.group[recv].tolist()[-1] == NONE
    assert trace.warnings == ()


def test_a_step_without_its_optimizer_is_left_out_and_named() -> None:
    cluster = ByteDanceCluster(2, 2, 2, steady).run([4, 5])
    cluster.rows.remove(next(r for r in cluster.rows if r[:4] == (1, 1, 5, "optimizer")))
    source = cluster.source()

    reading = read_bytedance(source.info, source.span_table)

    assert reading.steps == (4,)
    assert reading.left_out == {5: "1 of 4 workers have no optimizer"}


def test_without_data_parallelism_its_operations_are_left_out() -> None:
    cluster = ByteDanceCluster(1, 2, 2, steady).run([0])
    before = len(read_trace(cluster.source().info, cluster.source().span_table).operations)
    cluster.rows.append((0, 0, 0, "grads-reduce-scatter", 0, MS, 0, NONE))

    source = cluster.source()

    assert len(read_trace(source.info, source.span_table).operations) == before


def published(name: str) -> tuple[Source, dict[str, Any], float, float]:
    """Read a published trace straight from its file, past our importer."""
    if not (TRACES / f"trace-{name}.parquet").exists():
        pytest.skip(f"published traces are not at {TRACES} (set RANKSCOPE_TRACE_DIR)")
    parquet = pytest.importorskip("pyarrow.parquet")
    meta = yaml.safe_load((TRACES / f"meta-{name}.yaml").read_text())
    table = parquet.read_table(TRACES / f"trace-{name}.parquet")
    column = {key: table[key].to_numpy() for key in table.column_names if key != "optype"}
    optype = table["optype"].combine_chunks()
    num = len(optype)

    def ns(seconds: np.ndarray) -> np.ndarray:
        return np.rint(seconds.astype(np.float64) * 1e9).astype(np.int64)

    none32, none64 = np.full(num, NONE, np.int32), np.full(num, NONE, np.int64)
    spans = SpanTable(
        epoch=np.zeros(num, np.int32),
        step=column["step"].astype(np.int32),
        rank=column["rank"].astype(np.int32),
        kind=np.zeros(num, np.int8),
        name=optype.indices.to_numpy().astype(np.int32),
        track=np.zeros(num, np.int32),
        # Steps a day apart: each begins at 0 in the file.
        start_ns=ns(column["start_ts"]) + column["step"] * 86_400_000_000_000,
        duration_ns=ns(column["duration"]),
        launch_ns=none64,
        group_id=np.zeros(num, np.uint64),
        seq=column["seq_id"].astype(np.int64),
        src_rank=none32,
        dst_rank=none32,
        microbatch=column["mb_id"].astype(np.int32),
        chunk=column["mc"].astype(np.int32),
        num_bytes=none64,
        interval_id=np.zeros(num, np.int64),
        flags=np.zeros(num, np.uint16),
        depth=np.zeros(num, np.int16),
        names=tuple(optype.dictionary.to_pylist()),
        tracks=("",),
    )
    places = set(
        zip(
            *(column[key].tolist() for key in ("rank", "dp_rank", "stage")),
            strict=True,
        )
    )
    ranks = tuple(RankInfo(rank=r, coords=Coords(dp=d, pp=s)) for r, d, s in sorted(places))
    info = RunInfo(
        run_id=name,
        source_format="bytedance",
        layout=Layout(dp=meta["dp_size"], pp=meta["pp_size"], tp=meta["tp_size"]),
        world_size=meta["world_size"],
        epochs=(EpochInfo(epoch=0, ranks=ranks),),
    )
    pairs = np.unique(np.stack((spans.step, spans.rank)), axis=1)
    rows = pairs.shape[1]
    steps = StepTable(
        epoch=np.zeros(rows, np.int32),
        step=pairs[0],
        rank=pairs[1],
        start_ns=np.zeros(rows, np.int64),
        end_ns=np.zeros(rows, np.int64),
        num_tokens=np.full(rows, NONE, np.int64),
        loss=np.full(rows, np.nan),
        left_out=np.zeros(rows, np.uint32),
    )
    result = json.loads((TRACES / f"result-{name}.json").read_text())
    m_w = json.loads((TRACES / f"mw-{name}.json").read_text())["rem"]
    m_s = json.loads((TRACES / f"ms-{name}.json").read_text())["rem"]
    return Source(info, spans, steps), result, m_w, m_s


@pytest.fixture(scope="module", params=["AR", "ST"])
def trace(request: pytest.FixtureRequest) -> tuple[WhatIf, dict[str, Any], float, float]:
    source, result, m_w, m_s = published(request.param)
    model = build_model(read_trace(source.info, source.span_table))
    return what_if(Replayer(model)), result, m_w, m_s


def test_the_published_slowdowns_are_reproduced(
    trace: tuple[WhatIf, dict[str, Any], float, float],
) -> None:
    found, result, _, _ = trace

    assert found.slowdown(found.replayed_ns) == pytest.approx(result["blocking_slowdown"], rel=1e-6)
    by_step = {
        str(step): found.replayed_ns[k] / found.ideal_ns[k] for k, step in enumerate(found.steps)
    }
    assert by_step == pytest.approx(result["blocking_step_slowdown"], rel=1e-6)


@pytest.mark.parametrize(
    ("published_key", "attribute"),
    [
        ("blocking_decompose_by_dp_rank", "by_dp_ns"),
        ("blocking_decompose_by_stage", "by_stage_ns"),
        ("blocking_decompose_by_optype", "by_kind_ns"),
    ],
)
def test_the_published_parts_are_reproduced(
    trace: tuple[WhatIf, dict[str, Any], float, float], published_key: str, attribute: str
) -> None:
    found, result, _, _ = trace
    parts = {str(key): times for key, times in getattr(found, attribute).items()}

    overall = {key: found.slowdown(times) for key, times in parts.items()}
    assert overall == pytest.approx(result[published_key], rel=1e-6)
    for k, step in enumerate(found.steps):
        here = {key: times[k] / found.ideal_ns[k] for key, times in parts.items()}
        assert here == pytest.approx(result[f"{published_key}_per_step"][str(step)], rel=1e-6)


def test_the_published_recoverable_shares_are_reproduced(
    trace: tuple[WhatIf, dict[str, Any], float, float],
) -> None:
    found, result, m_w, m_s = trace
    slowdown = result["blocking_slowdown"]
    tolerance = max(2e-6, 1e-6 * slowdown / (slowdown - 1))

    assert found.m_w == pytest.approx(m_w, abs=tolerance)
    assert found.m_s == pytest.approx(m_s, abs=tolerance)


def report_on(name: str) -> RunReport:
    return analyze_run(published(name)[0], name)


def test_the_slowed_worker_of_a_real_job_is_named_and_nobody_else() -> None:
    report = report_on("AR")

    assert [(found.cause, found.ranks) for found in report.findings] == [("slow-compute", (0,))]
    assert report.coords[0] == Coords(dp=0, pp=0)
    # The stages behind it, and their data-parallel peers, are starved by it more than by others.
    culprit = {entry.rank: entry.waits_on[0].rank for entry in report.starved}
    assert {culprit[rank] for rank in (16, 32, 48, 20, 24, 28, 36, 40, 44)} == {0}


def test_the_overlong_last_stage_of_a_real_job_is_named() -> None:
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
    """Two data-parallel workers that gather, compute, reduce and step together."""
    return [
        operation("params-all-gather", rank, arrives_ms, 20, SpanKind.DP_COMM),
        operation("forward-compute", rank, 20, 30, SpanKind.FORWARD),
        operation("backward-compute", rank, 30, 50, SpanKind.BACKWARD),
        operation("grads-reduce-scatter", rank, 60 - arrives_ms, 80, SpanKind.DP_COMM),
        operation("layernorm-grads-all-reduce", rank, 52, 53, SpanKind.TP_COMM),
        operation("optimizer-clip-main-grad", rank, 80, 82, SpanKind.OTHER),
        operation("optimizer", rank, 82, 90, SpanKind.OPTIMIZER),
    ]


def test_groups_that_the_format_leaves_out_are_inferred() -> None:
    layout = Layout(dp=2)
    run = RunInfo(
        run_id="r",
        source_format="bytedance",
        layout=layout,
        world_size=2,
        epochs=(
            EpochInfo(
                epoch=0,
                ranks=tuple(RankInfo(rank=dp, coords=Coords(dp=dp)) for dp in (0, 1)),
            ),
        ),
    )
    spans = span_table(worker(0, arrives_ms=0) + worker(1, arrives_ms=8))

    split = split_bytedance_waits(run, spans)

    names = [spans.names[code] for code in spans.name.tolist()]
    told = list(zip(names, spans.rank.tolist(), split.wait_ns.tolist(), strict=True))
    assert ("params-all-gather", 0, 8 * MS) in told
    assert ("params-all-gather", 1, 0) in told
    # Rank 0 begins to reduce at 60, rank 1 at 52.
    assert ("grads-reduce-scatter", 0, 0) in told
    assert ("grads-reduce-scatter", 1, 8 * MS) in told
    assert ("optimizer-clip-main-grad", 0, 0) in told
    assert ("forward-compute", 0, -1) in told
    known = split.wait_ns >= 0
    assert (split.wait_ns + split.transfer_ns == spans.duration_ns)[known].all()
    assert split.last_rank[names.index("params-all-gather")] == 1
