from __future__ import annotations

from rankscope.analysis.readers.bytedance.waits import split_bytedance_waits
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RunInfo
from rankscope.tracer.span import Span, SpanKind, UnixNs
from rankscope.tracer.topology import Coords, Layout
from tests.support.dashboard.builders import span_table

MS = 1_000_000


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
