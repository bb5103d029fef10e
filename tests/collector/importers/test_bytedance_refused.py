from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.collector.errors import MetaError, RunNameError, TraceError
from rankscope.collector.importers.bytedance import import_bytedance
from rankscope.collector.importers.bytedance_meta import read_meta
from rankscope.collector.importers.bytedance_trace import read_trace
from rankscope.collector.importers.parquet_reader import (
    MAX_TEXT_BYTES,
    MEMORY_BYTES,
    ROWS_AT_ONCE,
)
from tests.support.collector.trace_builder import operation, write_meta, write_trace

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def test_a_bad_time_after_the_first_batch_is_named_with_its_row(tmp_path: Path) -> None:
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
    "two places": ({"stage": pa.array([0, 1])}, "a rank has two (dp_rank, stage)"),
    "two ranks": ({"rank": pa.array([0, 1])}, "two ranks have one (dp_rank, stage)"),
}


def with_columns(path: Path, columns: dict[str, Any]) -> Path:
    """Write a trace of two rows, with some columns replaced, or left out (None)."""
    table = pq.read_table(write_trace(path, [operation(), operation(seq_id=1)]))
    if columns == {"*": 0}:
        pq.write_table(table.slice(0, 0), path)
        return path
    replaced = {name: table[name] for name in table.column_names} | columns
    kept = {name: column for name, column in replaced.items() if column is not None}
    pq.write_table(pa.table(kept), path)
    return path


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in {"missing", "negative"} else pytest.mark.nightly)
        for case in BAD_COLUMNS
    ],
)
def test_a_bad_trace_is_refused_and_nothing_is_written(
    store: Store, run_id: str, tmp_path: Path, case: str
) -> None:
    columns, message = BAD_COLUMNS[case]
    path = with_columns(tmp_path / "trace.parquet", columns)

    with pytest.raises(TraceError) as caught:
        import_bytedance(store, path, run_id=run_id, meta=write_meta(tmp_path / "m.yaml"))

    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.rows(
        "SELECT count() AS n FROM ledger WHERE run_id = {r:String}", {"r": run_id}
    ) == [{"n": 0}]


@pytest.mark.parametrize("content", [b"", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet_is_refused(
    store: Store, run_id: str, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(content)

    with pytest.raises(TraceError, match="not a parquet file"):
        import_bytedance(store, path, run_id=run_id, meta=write_meta(tmp_path / "m.yaml"))


def test_a_repeated_column_is_refused(store: Store, run_id: str, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.parquet", [operation()])
    table = pq.read_table(path)
    twice = pa.Table.from_arrays(
        [*table.columns, table["rank"]], names=[*table.column_names, "rank"]
    )
    pq.write_table(twice, path)

    with pytest.raises(TraceError, match="more than one column rank"):
        import_bytedance(store, path, run_id=run_id, meta=write_meta(tmp_path / "m.yaml"))


@pytest.mark.nightly
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)  # each starts a process
def test_a_damaged_file_is_read_or_refused(flips: list[tuple[int, int]]) -> None:
    with TemporaryDirectory() as folder:
        path = write_trace(Path(folder) / "t.parquet", [operation(), operation(seq_id=1)])
        content = bytearray(path.read_bytes())
        for at, bit in flips:
            content[at % len(content)] ^= 1 << bit
        path.write_bytes(content)
        meta = read_meta(write_meta(Path(folder) / "m.yaml"), trace=path)

        with contextlib.suppress(TraceError, MetaError):
            read_trace(path, meta=meta)


def test_a_missing_file_is_refused(store: Store, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="check the path"):
        import_bytedance(
            store, tmp_path / "none", run_id=run_id, meta=write_meta(tmp_path / "m.yaml")
        )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp_size": None}, "has no pp_size"),
        ({"dp_size": 0}, "dp_size is 0"),
        ({"vpp_size": True}, "vpp_size is True"),
        ({"world_size": 7}, "world_size is 7, but dp x pp x tp x dsp is 1"),
        ({"dp_size": 2, "world_size": 2}, "dp_size 2, the trace has dp_rank 0 to 0"),
        ({"pp_size": 3, "world_size": 3}, "pp_size 3, the trace has stage 0 to 0"),
        ({"vpp_size": 2}, "vpp_size 2, the trace has mc 0 to 0"),
    ],
)
def test_invalid_or_contradicting_sizes_are_refused(
    store: Store, run_id: str, tmp_path: Path, sizes: dict[str, Any], message: str
) -> None:
    trace = write_trace(tmp_path / "t.parquet", [operation()])

    with pytest.raises(MetaError) as caught:
        import_bytedance(store, trace, run_id=run_id, meta=write_meta(tmp_path / "m.yaml", **sizes))

    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["", "[1, 2]", "a: ["])
def test_a_meta_file_that_is_not_a_mapping_is_refused(
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


@pytest.mark.parametrize("name", ["", "../x"])
def test_an_invalid_run_name_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    trace = write_trace(tmp_path / "t.parquet", [operation()])

    with pytest.raises(RunNameError):
        import_bytedance(store, trace, run_id=name, meta=write_meta(tmp_path / "m.yaml"))


@pytest.mark.slow
def test_texts_that_exceed_the_memory_are_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.parquet", [operation("x" * MAX_TEXT_BYTES)])

    with pytest.raises(TraceError, match="has more than 64 MiB of different texts"):
        read_trace(path, meta=read_meta(write_meta(tmp_path / "m.yaml"), trace=path))


@pytest.mark.nightly
def test_a_file_that_exceeds_the_memory_of_the_reader_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.parquet", [operation("x" * (MEMORY_BYTES // 2))])

    with pytest.raises(TraceError, match="needs more than 1024 MiB of memory to read"):
        read_trace(path, meta=read_meta(write_meta(tmp_path / "m.yaml"), trace=path))
