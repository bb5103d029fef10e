from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope.collector.errors import RunExistsError
from rankscope.collector.importers.bytedance import import_bytedance
from rankscope.collector.importers.bytedance_meta import read_meta
from rankscope.collector.importers.bytedance_trace import read_trace
from rankscope.collector.importers.parquet_reader import ROWS_AT_ONCE
from rankscope.collector.read.runs import read_run_names
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import KIND_CODES, SpanKind
from tests.support.collector.trace_builder import Row, operation, write_meta, write_trace
from tests.support.traces import TRACES, needs_traces

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.trace.tables import SpanTable, StepTable
    from rankscope.collector.store.store import Store


Put = Callable[..., "tuple[SpanTable, StepTable]"]


@pytest.fixture
def put(store: Store, run_id: str, tmp_path: Path) -> Put:
    """Import these rows as ``run_id``, and read its spans and steps."""

    def put(*rows: Row, **sizes: object) -> tuple[SpanTable, StepTable]:
        trace = write_trace(tmp_path / "trace.parquet", [*rows])
        meta = write_meta(tmp_path / "meta.yaml", **sizes)
        import_bytedance(store, trace, run_id=run_id, meta=meta)
        source = StoreSource(store)
        return source.spans(run_id), source.steps(run_id)

    return put


@pytest.mark.slow
def test_seconds_become_whole_nanoseconds_once(put: Put) -> None:
    # 0.1 as float32 is 0.100000001490116..., so 100000001 ns and not 100000000.
    spans, _ = put(operation(), operation(start_ts=0.1, duration=0.25, seq_id=1))

    assert spans.start_ns.tolist() == [0, 100_000_001]
    assert spans.duration_ns.tolist() == [1_000_000_000, 250_000_000]


def test_steps_are_laid_end_to_end_in_step_order(put: Put) -> None:
    # Step 9 comes first in the file; step 4 lasts from 0.5 to 3.5 s.
    spans, steps = put(
        operation(step=9, start_ts=0.0, duration=2.0),
        operation(step=4, start_ts=0.5, duration=1.0),
        operation(step=4, start_ts=2.5, duration=1.0, seq_id=1),
    )

    assert spans.step.tolist() == [4, 4, 9]
    assert spans.start_ns.tolist() == [0, 2 * 10**9, 3 * 10**9]
    assert steps.step.tolist() == [4, 9]
    assert steps.start_ns.tolist() == [0, 3 * 10**9]
    assert steps.end_ns.tolist() == [3 * 10**9, 5 * 10**9]
    assert steps.num_tokens.tolist() == steps.peak_memory_bytes.tolist() == [-1, -1]
    assert np.isnan(steps.loss).all()


def test_a_step_row_covers_its_ranks_operations(put: Put) -> None:
    late = operation(rank=8, dp_rank=1, start_ts=1.0, duration=1.0)
    _, steps = put(late, operation(rank=3, start_ts=0.0, duration=5.0), dp_size=2, world_size=2)

    assert steps.rank.tolist() == [3, 8]
    assert (steps.start_ns // 10**9).tolist() == [0, 1]
    assert (steps.end_ns // 10**9).tolist() == [5, 2]


def test_the_operation_type_gives_the_kind_and_the_name(put: Put) -> None:
    expected = {
        "forward-compute": SpanKind.FORWARD,
        "backward-compute": SpanKind.BACKWARD,
        "forward-send": SpanKind.PP_SEND,
        "backward-send": SpanKind.PP_SEND,
        "forward-recv": SpanKind.PP_RECV,
        "backward-recv": SpanKind.PP_RECV,
        "params-all-gather": SpanKind.DP_COMM,
        "grads-reduce-scatter": SpanKind.DP_COMM,
        "separate-grads-all-reduce": SpanKind.DP_COMM,
        "layernorm-grads-all-reduce": SpanKind.TP_COMM,
        "embedding-grads-all-reduce": SpanKind.OTHER,
        "optimizer-clip-main-grad": SpanKind.OTHER,
        "gc": SpanKind.GC,
        "optimizer": SpanKind.OPTIMIZER,
        "something new": SpanKind.OTHER,
    }
    spans, _ = put(*(operation(optype, start_ts=float(at)) for at, optype in enumerate(expected)))

    assert [spans.names[code] for code in spans.name] == list(expected)
    assert spans.kind.tolist() == [KIND_CODES[kind] for kind in expected.values()]
    assert set(spans.flags.tolist()) == {0}
    assert set(spans.group_id.tolist()) == {0}


def test_every_field_of_an_operation_has_its_column(put: Put) -> None:
    spans, _ = put(operation(seq_id=31, mb_id=7, mc=1, step=1238, gmc=5), vpp_size=2)

    found = (spans.seq, spans.microbatch, spans.chunk, spans.step)
    assert [column.tolist() for column in found] == [[31], [7], [1], [1238]]
    for unrecorded in (spans.launch_ns, spans.num_bytes, spans.src_rank, spans.dst_rank):
        assert unrecorded.tolist() == [-1]
    assert (spans.flags.tolist(), spans.tracks[spans.track[0]]) == ([0], "")


def test_identical_operations_are_both_kept(store: Store, run_id: str, put: Put) -> None:
    spans, _ = put(operation(), operation())

    assert len(spans) == 2
    assert store.rows(
        "SELECT count() AS n FROM spans FINAL WHERE run_id = {r:String}", {"r": run_id}
    ) == [{"n": 2}]


def test_ranks_keep_their_numbers_and_positions(store: Store, run_id: str, put: Put) -> None:
    sizes = {"dp_size": 2, "pp_size": 2, "tp_size": 4, "dsp_size": 2, "world_size": 32}
    put(
        operation(rank=4, dp_rank=1, stage=0), operation(rank=24, dp_rank=0, stage=1),
        operation(rank=20, dp_rank=1, stage=1), operation(rank=0, dp_rank=0, stage=0), **sizes,
    )  # fmt: skip

    info = StoreSource(store).run_info(run_id)
    assert (info.source_format, info.world_size) == ("bytedance", 32)
    assert (info.layout.dp, info.layout.pp, info.layout.tp, info.layout.dsp) == (2, 2, 4, 2)
    assert [(rank.rank, rank.coords.dp, rank.coords.pp) for rank in info.epochs[0].ranks] == [
        (0, 0, 0),
        (4, 1, 0),
        (20, 1, 1),
        (24, 0, 1),
    ]
    assert (info.clock_error_ns, info.flops_per_token, info.paced) == (None, None, False)


def test_the_same_file_twice_is_imported_once(store: Store, run_id: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.parquet", [operation(), operation(seq_id=1)])
    meta = write_meta(tmp_path / "m.yaml")

    first = import_bytedance(store, trace, run_id=run_id, meta=meta)
    again = import_bytedance(store, trace, run_id=run_id, meta=meta)

    assert (first.already_imported, again.already_imported) == (False, True)
    assert (again.num_spans, again.num_steps, again.num_ranks) == (2, 1, 1)
    assert store.rows(
        "SELECT count() AS n FROM spans WHERE run_id = {r:String}", {"r": run_id}
    ) == [{"n": 2}]


@pytest.mark.parametrize("other_is", ["file", "sizes"])
def test_other_content_under_a_used_name_is_refused(
    store: Store, run_id: str, tmp_path: Path, other_is: str
) -> None:
    trace, meta = write_trace(tmp_path / "a.parquet", [operation()]), tmp_path / "m.yaml"
    import_bytedance(store, trace, run_id=run_id, meta=write_meta(meta))
    if other_is == "file":
        write_trace(trace, [operation(duration=2.0)])
    else:
        write_meta(meta, tp_size=8, world_size=8)

    with pytest.raises(RunExistsError, match="choose another --run name"):
        import_bytedance(store, trace, run_id=run_id, meta=meta)

    assert StoreSource(store).spans(run_id).duration_ns.tolist() == [10**9]


@pytest.mark.slow
def test_rows_of_an_interrupted_import_never_show(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # As after a kill: rows, and the ledger's line, but no row in `runs`.
    meta = write_meta(tmp_path / "m.yaml")
    lost = write_trace(tmp_path / "lost.parquet", [operation("lost"), operation("lost", seq_id=1)])
    import_bytedance(store, lost, run_id=run_id, meta=meta)
    store.command("DELETE FROM runs WHERE run_id = {r:String}", {"r": run_id})
    assert run_id not in read_run_names(store)

    trace = write_trace(tmp_path / "new.parquet", [operation("optimizer")])
    import_bytedance(store, trace, run_id=run_id, meta=meta)

    assert StoreSource(store).spans(run_id).names == ("optimizer",)
    summary = {run.run_id: run for run in StoreSource(store).runs()}[run_id]
    assert (summary.num_spans, summary.num_steps) == (1, 1)


def test_starts_of_64_bits_may_be_unix_times(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.parquet", [operation(), operation(seq_id=1, duration=0.5)])
    table = pq.read_table(path)
    at = table.schema.get_field_index("start_ts")
    starts = pa.array([1.7e9, 1.7e9 + 1.25], pa.float64())
    pq.write_table(table.set_column(at, "start_ts", starts), path)

    rows = read_trace(path, meta=read_meta(write_meta(tmp_path / "m.yaml"), trace=path))

    # 64-bit floats have Unix times to a quarter of a microsecond.
    assert rows.start_ns.tolist() == pytest.approx([0, 1_250_000_000], abs=256)


def test_a_trace_longer_than_a_batch_is_read_whole(tmp_path: Path) -> None:
    num = ROWS_AT_ONCE + 5
    path = write_trace(tmp_path / "t.parquet", [operation(), operation("gc", step=3)])
    table = pq.read_table(path).take(pa.array([*[0] * (num - 1), 1]))
    pq.write_table(table.set_column(6, "seq_id", pa.array(np.arange(num, dtype=np.int32))), path)

    trace = read_trace(path, meta=read_meta(write_meta(tmp_path / "m.yaml"), trace=path))

    assert trace.columns["seq_id"].tolist() == list(range(num))
    assert trace.optypes == ("forward-compute", "gc")
    assert np.flatnonzero(trace.optype == 1).tolist() == [num - 1]
    assert trace.start_ns.tolist() == [0] * (num - 1) + [10**9]


@pytest.mark.slow
@needs_traces
@pytest.mark.parametrize(
    ("name", "num_spans", "num_ranks", "num_steps"), [("AR", 117_216, 16, 44), ("ST", 6_784, 8, 32)]
)  # fmt: skip
def test_a_published_trace_comes_back_whole(
    store: Store, run_id: str, name: str, num_spans: int, num_ranks: int, num_steps: int
) -> None:
    file = TRACES / f"trace-{name}.parquet"
    import_bytedance(store, file, run_id=run_id, meta=TRACES / f"meta-{name}.yaml")

    spans = StoreSource(store).spans(run_id)
    table = pq.ParquetFile(file).read()
    assert (len(spans), len(np.unique(spans.rank)), len(np.unique(spans.step))) == (
        num_spans,
        num_ranks,
        num_steps,
    )
    seconds = np.asarray(table["duration"].to_numpy(), dtype=np.float64)
    assert int(spans.duration_ns.sum()) == int(np.rint(seconds * 1e9).sum())
    optypes = np.array(table["optype"].to_pylist())
    for code, optype in enumerate(spans.names):
        assert int((spans.name == code).sum()) == int((optypes == optype).sum())
