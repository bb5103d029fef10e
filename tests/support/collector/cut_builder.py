"""Builder of cuts: spans of one segment, named by their rows."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.collector.arrow_columns import (
    coded_strings,
    numbers,
    optional_numbers,
    repeated_string,
)
from rankscope.collector.spool.cut import Cut, CutKey
from rankscope.collector.spool.records import CutRows
from rankscope.collector.wire.codec import empty_column
from rankscope.collector.wire.schema import WIRE_TABLES, WireColumn

PROCESS = "ab" * 16
SEGMENT = 7


def span_cut(
    run_id: str,
    first_row: int,
    end_row: int,
    *,
    rank: int = 0,
    epoch: int = 0,
    segment: int = SEGMENT,
    content: str = "",
    names: list[str] | None = None,
    **columns: Any,  # noqa: ANN401 -- arrays by column
) -> Cut:
    """Return a cut of the rows ``first_row`` to ``end_row``, each a span named ``s<row>``.

    Args:
        content: Another text changes the hash, as other bytes in the same rows do.
        names: Names of the spans.
        columns: Values of further columns of the spans.
    """
    rows = np.arange(first_row, end_row, dtype=np.uint32)
    texts = [f"s{row}" for row in rows] if names is None else names
    held: dict[str, Any] = {
        "start_ns": 1_700_000_000_000_000_000 + rows.astype(np.int64) * 10,
        "duration_ns": np.full(len(rows), 5, dtype=np.int64),
        "row": rows,
        **columns,
    }
    named: dict[str, Any] = {}
    for column in WIRE_TABLES["spans"]:
        named[column.name] = _span_column(column, held, texts)
    tables = {
        table: _identified(_no_rows(table), run_id, rank, epoch, segment) for table in WIRE_TABLES
    }
    spans = pa.Table.from_arrays(list(named.values()), names=list(named))
    tables["spans"] = _identified(spans, run_id, rank, epoch, segment)
    digest = hashlib.sha256(f"{run_id} {segment} {first_row} {end_row} {content}".encode())
    return Cut(
        key=CutKey(
            run_id=run_id,
            epoch=epoch,
            rank=rank,
            process=PROCESS,
            segment=segment,
            first_row=first_row,
            end_row=end_row,
        ),
        sha256=digest.hexdigest(),
        num_torn=0,
        rows=CutRows(**tables),
    )


def _span_column(column: WireColumn, held: dict[str, Any], names: list[str]) -> Any:  # noqa: ANN401
    num_rows = len(names)
    if column.name in held:
        return numbers(held[column.name])
    if column.name == "name":
        return coded_strings(np.arange(num_rows), names)
    if column.name == "kind":
        return repeated_string("forward", num_rows)
    if column.name == "track":
        return repeated_string("main", num_rows)
    dtype: Any = column.arrow_type.to_pandas_dtype()
    if column.may_be_null:
        return optional_numbers(np.zeros(num_rows, dtype), np.zeros(num_rows, dtype=bool))
    missing = 0 if column.default is None else column.default
    return numbers(np.full(num_rows, missing, dtype=dtype))


def _no_rows(table: str) -> pa.Table:
    named = {column.name: empty_column(column) for column in WIRE_TABLES[table]}
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _identified(rows: pa.Table, run_id: str, rank: int, epoch: int, segment: int) -> pa.Table:
    identity: dict[str, Any] = {
        "run_id": repeated_string(run_id, rows.num_rows),
        "epoch": numbers(np.full(rows.num_rows, epoch, dtype=np.int32)),
        "rank": numbers(np.full(rows.num_rows, rank, dtype=np.int32)),
        "segment": numbers(np.full(rows.num_rows, segment, dtype=np.uint64)),
    }
    columns = [*identity.values(), *rows.columns]
    return pa.Table.from_arrays(columns, names=[*identity, *rows.column_names])
