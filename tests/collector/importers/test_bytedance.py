from __future__ import annotations

import contextlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.errors import CollectorError, MetaError, RunExistsError, RunNameError, TraceError
from collector.importers.bytedance import import_bytedance
from collector.importers.bytedance_file import ROWS_AT_ONCE
from collector.importers.bytedance_meta import read_meta
from collector.importers.bytedance_rows import read_trace
from collector.read import read_spans, run_names
from rankscope.source import StoreSource
from tracer.span import KIND_CODES, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from collector.store import Store

Row = dict[str, Any]

TRACES = Path(
    os.environ.get("RANKSCOPE_TRACE_DIR")
    or Path(__file__).parents[4] / "shared" / "data" / "bytedance"
)
needs_traces = pytest.mark.skipif(
    not (TRACES / "trace-AR.parquet").exists(),
    reason=f"the published traces are not in {TRACES}: set RANKSCOPE_TRACE_DIR",
)

DTYPES = {
    "dp_rank": pa.int8(), "stage": pa.int8(), "rank": pa.int16(), "step": pa.int64(),
    "start_ts": pa.float32(), "duration": pa.float32(), "seq_id": pa.int32(), "mc": pa.int8(),
    "mb_id": pa.int8(), "gmc": pa.int16(),
}  # fmt: skip


def operation(optype: str = "forward-compute", **fields: object) -> Row:
    row: Row = {
        "dp_rank": 0, "stage": 0, "rank": 0, "step": 0, "optype": optype, "start_ts": 0.0,
        "duration": 1.0, "seq_id": 0, "mc": 0, "mb_id": 0, "gmc": 0,
    }  # fmt: skip
    return row | fields


def write_trace(path: Path, rows: list[Row]) -> Path:
    columns = {name: pa.array([row[name] for row in rows], dtype) for name, dtype in DTYPES.items()}
    columns["optype"] = pa.array([row["optype"] for row in rows]).dictionary_encode()
    pq.write_table(pa.table(columns), path)
    return path


def write_meta(path: Path, **sizes: object) -> Path:
    plain: Row = {"dp_size": 1, "dsp_size": 1, "pp_size": 1, "tp_size": 1, "vpp_size": 1}
    document = plain | {"world_size": 1, "trial_name": "synthetic"} | sizes
    path.write_text(yaml.safe_dump({k: v for k, v in document.items() if v is not None}))
    return path


@pytest.fixture
def put(store: Store, run_id: str, tmp_path: Path) -> Callable[..., None]:
    """Import these rows as ``run_id``."""

    def put(rows: list[Row], **sizes: object) -> None:
        trace = write_trace(tmp_path / "trace.parquet", rows)
        meta = write_meta(tmp_path / "meta.yaml", **sizes)
        import_bytedance(store, trace, run_id=run_id, meta=meta)

    return put


def test_seconds_become_whole_nanoseconds_once(
    store: Store, run_id: str, put: Callable[..., None]
) -> None:
    # 0.1 as float32 is 0.100000001490116..., so 100000001 ns and not 100000000.
    put([operation(), operation(start_ts=0.1, duration=0.25, seq_id=1)])

    spans = StoreSource(store).spans(run_id)
    assert spans.start_ns.tolist() == [0, 100_000_001]
    assert spans.duration_ns.tolist() == [1_000_000_000, 250_000_000]


def test_steps_are_laid_end_to_end_in_step_order(
    store: Store, run_id: str, put: Callable[..., None]
) -> None:
    # Step 9 comes first in the file; step 4 lasts from 0.5 to 3.5 s.
    put(
        [
            operation(step=9, start_ts=0.0, duration=2.0),
            operation(step=4, start_ts=0.5, duration=1.0),
            operation(step=4, start_ts=2.5, duration=1.0, seq_id=1),
        ]
    )

    spans = StoreSource(store).spans(run_id)
    assert spans.step.tolist() == [4, 4, 9]
    assert spans.start_ns.tolist() == [0, 2 * 10**9, 3 * 10**9]
    steps = StoreSource(store).steps(run_id)
    assert steps.step.tolist() == [4, 9]
    assert steps.start_ns.tolist() == [0, 3 * 10**9]
    assert steps.end_ns.tolist() == [3 * 10**9, 5 * 10**9]
    assert steps.num_tokens.tolist() == [-1, -1]


def test_a_steps_row_spans_that_ranks_own_operations(
    store: Store, run_id: str, put: Callable[..., None]
) -> None:
    put(
        [
            operation(rank=8, dp_rank=1, start_ts=1.0, duration=1.0),
            operation(rank=3, dp_rank=0, start_ts=0.0, duration=5.0),
        ],
        dp_size=2,
        world_size=2,
    )

    steps = StoreSource(store).steps(run_id)
    assert steps.rank.tolist() == [3, 8]
    assert (steps.start_ns // 10**9).tolist() == [0, 1]
    assert (steps.end_ns // 10**9).tolist() == [5, 2]


def test_kinds_follow_the_operation_type_and_names_stay_verbatim(
    store: Store, run_id: str, put: Callable[..., None]
) -> None:
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
    put([operation(optype, start_ts=float(at)) for at, optype in enumerate(expected)])

    spans = StoreSource(store).spans(run_id)
    assert [spans.names[code] for code in spans.name] == list(expected)
    assert spans.kind.tolist() == [KIND_CODES[kind] for kind in expected.values()]
    assert set(spans.flags.tolist()) == {0}
    assert set(spans.group_id.tolist()) == {0}


def test_every_field_of_an_operation_finds_its_column(
    store: Store, run_id: str, put: Callable[..., None]
) -> None:
    put([operation(seq_id=31, mb_id=7, mc=1, step=1238, gmc=5)], vpp_size=2)

    (row,) = read_spans(store, run_id).to_pylist()
    assert (row["seq"], row["microbatch"], row["chunk"], row["step"]) == (31, 7, 1, 1238)
    assert (row["launch_ns"], row["num_bytes"], row["src_rank"], row["dst_rank"]) == (-1,) * 4


def test_identical_operations_stay_two(store: Store, run_id: str, put: Callable[..., None]) -> None:
    put([operation(), operation()])

    assert len(StoreSource(store).spans(run_id)) == 2
    assert store.rows(
        "SELECT count() AS n FROM spans FINAL WHERE run_id = {r:String}", {"r": run_id}
    ) == [{"n": 2}]


def test_ranks_keep_their_own_numbers_and_places(
    store: Store, run_id: str, put: Callable[..., None]
) -> None:
    put(
        [
            operation(rank=4, dp_rank=1, stage=0),
            operation(rank=24, dp_rank=0, stage=1),
            operation(rank=20, dp_rank=1, stage=1),
            operation(rank=0, dp_rank=0, stage=0),
        ],
        dp_size=2,
        pp_size=2,
        tp_size=4,
        dsp_size=2,
        world_size=32,
    )

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


def test_another_content_under_a_taken_name_is_refused(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    meta = write_meta(tmp_path / "m.yaml")
    first = write_trace(tmp_path / "a.parquet", [operation()])
    other = write_trace(tmp_path / "b.parquet", [operation(duration=2.0)])
    import_bytedance(store, first, run_id=run_id, meta=meta)

    with pytest.raises(RunExistsError, match="choose another --run name"):
        import_bytedance(store, other, run_id=run_id, meta=meta)

    assert StoreSource(store).spans(run_id).duration_ns.tolist() == [10**9]


def test_the_same_file_with_other_sizes_is_another_content(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "a.parquet", [operation()])
    import_bytedance(store, trace, run_id=run_id, meta=write_meta(tmp_path / "m.yaml"))
    larger = write_meta(tmp_path / "m2.yaml", tp_size=8, world_size=8)

    with pytest.raises(RunExistsError):
        import_bytedance(store, trace, run_id=run_id, meta=larger)


def test_what_an_import_cut_short_left_behind_never_shows(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # As a kill would leave it: rows and the ledger's note, but no row in `runs`.
    meta = write_meta(tmp_path / "m.yaml")
    lost = write_trace(tmp_path / "lost.parquet", [operation("lost"), operation("lost", seq_id=1)])
    import_bytedance(store, lost, run_id=run_id, meta=meta)
    store.command("DELETE FROM runs WHERE run_id = {r:String}", {"r": run_id})
    assert run_id not in run_names(store)

    trace = write_trace(tmp_path / "new.parquet", [operation("optimizer")])
    import_bytedance(store, trace, run_id=run_id, meta=meta)

    assert StoreSource(store).spans(run_id).names == ("optimizer",)
    summary = {run.run_id: run for run in StoreSource(store).runs()}[run_id]
    assert (summary.num_spans, summary.num_steps) == (1, 1)


def test_starts_of_64_bits_may_count_from_1970(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.parquet", [operation(), operation(seq_id=1, duration=0.5)])
    table = pq.read_table(path)
    at = table.schema.get_field_index("start_ts")
    starts = pa.array([1.7e9, 1.7e9 + 1.25], pa.float64())
    pq.write_table(table.set_column(at, "start_ts", starts), path)

    rows = read_trace(path, meta=read_meta(write_meta(tmp_path / "m.yaml"), trace=path))

    # 64 bits tell times since 1970 apart to a quarter of a microsecond.
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


def test_a_bad_time_behind_the_first_batch_is_named_by_its_row(tmp_path: Path) -> None:
    num = ROWS_AT_ONCE + 5
    path = write_trace(tmp_path / "t.parquet", [operation()])
    table = pq.read_table(path).take(pa.array([0] * num))
    times = np.ones(num, dtype=np.float32)
    times[num - 2] = -1
    pq.write_table(table.set_column(5, "duration", pa.array(times)), path)

    with pytest.raises(TraceError, match=rf"duration is -1.0 s in row {num - 2} \(1 such rows"):
        read_trace(path, meta=read_meta(write_meta(tmp_path / "m.yaml"), trace=path))


FLOAT = pa.float32()
BAD_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"optype": None, "step": None}, "no column step, optype"),
    "no rows": ({"*": 0}, "nothing to import"),
    "a null": ({"rank": pa.array([None, 1], pa.int16())}, "column rank has 1 empty rows"),
    "a null text": ({"optype": pa.array([None, "gc"])}, "column optype has 1 empty rows"),
    "text for numbers": ({"rank": pa.array(["a", "b"])}, "column rank is string"),
    "whole seconds": ({"start_ts": pa.array([1, 2])}, "column start_ts is int64"),
    "half floats": (
        {"duration": pa.array(np.ones(2, np.float16))},
        "column duration is halffloat, expected seconds as floats of 32 or 64 bits",
    ),
    "numbers for text": ({"optype": pa.array([1, 2])}, "column optype is int64"),
    "not a number": ({"duration": pa.array([1.0, np.nan], FLOAT)}, "duration is nan s in row 1"),
    "negative": ({"duration": pa.array([-0.5, 1.0], FLOAT)}, "duration is -0.5 s in row 0"),
    "endless": ({"start_ts": pa.array([0.0, np.inf], FLOAT)}, "start_ts is inf s in row 1"),
    "negative step": ({"step": pa.array([-1, 0])}, "column step goes from -1 to 0"),
    "huge step": ({"step": pa.array([0, 2**40])}, "column step goes from 0 to 1099511627776"),
    "two places": ({"stage": pa.array([0, 1])}, "a rank stands at two (dp_rank, stage)"),
    "two ranks": ({"rank": pa.array([0, 1])}, "two ranks stand at one (dp_rank, stage)"),
}


@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_a_bad_trace_is_refused_in_one_line_and_nothing_is_written(
    store: Store, run_id: str, tmp_path: Path, case: str
) -> None:
    columns, words = BAD_COLUMNS[case]
    path = write_trace(tmp_path / "trace.parquet", [operation(), operation(seq_id=1)])
    table = pq.read_table(path)
    if "*" in columns:
        table = table.slice(0, 0)
    sound = {name: table[name] for name in table.column_names}
    spoiled = {name: column for name, column in (sound | columns).items() if column is not None}
    spoiled.pop("*", None)
    pq.write_table(pa.table(spoiled), path)

    with pytest.raises(TraceError) as caught:
        import_bytedance(store, path, run_id=run_id, meta=write_meta(tmp_path / "m.yaml"))

    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.rows(
        "SELECT count() AS n FROM ledger WHERE run_id = {r:String}", {"r": run_id}
    ) == [{"n": 0}]


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"hello, I am no parquet file", b"PAR1" + bytes(100) + b"PAR1"]
)
def test_a_file_that_is_not_parquet_is_refused(
    store: Store, run_id: str, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(content)

    with pytest.raises(TraceError, match="not a parquet file"):
        import_bytedance(store, path, run_id=run_id, meta=write_meta(tmp_path / "m.yaml"))


def test_a_column_that_is_there_twice_is_refused(store: Store, run_id: str, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.parquet", [operation()])
    table = pq.read_table(path)
    twice = pa.Table.from_arrays(
        [*table.columns, table["rank"]], names=[*table.column_names, "rank"]
    )
    pq.write_table(twice, path)

    with pytest.raises(TraceError, match="more than one column rank"):
        import_bytedance(store, path, run_id=run_id, meta=write_meta(tmp_path / "m.yaml"))


@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_a_damaged_file_is_read_or_refused_by_name(flips: list[tuple[int, int]]) -> None:
    with TemporaryDirectory() as folder:
        path = write_trace(Path(folder) / "t.parquet", [operation(), operation(seq_id=1)])
        content = bytearray(path.read_bytes())
        for at, bit in flips:
            content[at % len(content)] ^= 1 << bit
        path.write_bytes(content)
        meta = read_meta(write_meta(Path(folder) / "m.yaml"), trace=path)

        with contextlib.suppress(TraceError, MetaError):
            read_trace(path, meta=meta)


def test_a_file_that_is_not_there_is_refused(store: Store, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="check the path"):
        import_bytedance(
            store, tmp_path / "none", run_id=run_id, meta=write_meta(tmp_path / "m.yaml")
        )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pp_size": None}, "has no pp_size"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"tp_size": "eight"}, "tp_size is 'eight'"),
        ({"vpp_size": True}, "vpp_size is True"),
        ({"world_size": 7}, "world_size is 7, but dp x pp x tp x dsp is 1"),
        ({"dp_size": 2, "world_size": 2}, "dp_size 2, the trace has dp_rank 0 to 0"),
        ({"pp_size": 3, "world_size": 3}, "pp_size 3, the trace has stage 0 to 0"),
        ({"vpp_size": 2}, "vpp_size 2, the trace has mc 0 to 0"),
    ],
)
def test_sizes_that_are_wrong_or_contradict_the_trace_are_refused(
    store: Store, run_id: str, tmp_path: Path, sizes: dict[str, Any], words: str
) -> None:
    trace = write_trace(tmp_path / "t.parquet", [operation()])

    with pytest.raises(MetaError) as caught:
        import_bytedance(store, trace, run_id=run_id, meta=write_meta(tmp_path / "m.yaml", **sizes))

    assert words in str(caught.value)


@pytest.mark.parametrize("content", ["", "just text", "[1, 2]", "a: [", "\0"])
def test_a_meta_file_that_is_no_mapping_is_refused(
    store: Store, run_id: str, tmp_path: Path, content: str
) -> None:
    trace = write_trace(tmp_path / "t.parquet", [operation()])
    meta = tmp_path / "m.yaml"
    meta.write_text(content)

    with pytest.raises(MetaError, match=r"m\.yaml"):
        import_bytedance(store, trace, run_id=run_id, meta=meta)


def test_a_missing_meta_file_says_what_to_pass(store: Store, run_id: str, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.parquet", [operation()])

    with pytest.raises(MetaError, match="pass --meta FILE"):
        import_bytedance(store, trace, run_id=run_id, meta=None)
    with pytest.raises(MetaError, match="No such file"):
        import_bytedance(store, trace, run_id=run_id, meta=tmp_path / "none.yaml")


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", "é", "x" * 129, "-x", "a\n"])
def test_a_name_that_cannot_stand_in_a_url_is_refused(
    store: Store, tmp_path: Path, name: str
) -> None:
    trace = write_trace(tmp_path / "t.parquet", [operation()])

    with pytest.raises(RunNameError):
        import_bytedance(store, trace, run_id=name, meta=write_meta(tmp_path / "m.yaml"))


def test_every_refusal_is_a_collector_error() -> None:
    assert all(
        issubclass(error, CollectorError)
        for error in (MetaError, TraceError, RunExistsError, RunNameError)
    )


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
