"""Arrow schema of cuts on the wire, with the defaults of columns that older senders lack.

One Arrow row is one cut. Its tables are lists of structs, so that the identity of the cut is
written once and not with each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import NONE, SPAN_COLUMNS

if TYPE_CHECKING:
    from rankscope.tracer.span import SpanColumn

SCHEMA_VERSION = 1
"""Version that is written."""

OLDEST_VERSION = 1
"""Oldest version that is read."""

SCHEMA_KEY = b"rankscope.schema"
"""Key of the version, decimal text, in the metadata of the stream's schema."""

CODED_TEXT = cast("pa.DataType", pa.dictionary(pa.int32(), pa.string()))


@dataclass(frozen=True, slots=True)
class WireColumn:
    """One column of a nested table."""

    name: str
    arrow_type: pa.DataType
    default: int | float | None = None
    """Value if an older sender does not have the column; None: every sender has it."""

    may_be_null: bool = False


def _span_column(column: SpanColumn) -> WireColumn:
    is_text = column.dtype == "text"
    arrow_type = CODED_TEXT if is_text else pa.from_numpy_dtype(np.dtype(column.dtype))
    return WireColumn(column.name, arrow_type, column.missing, may_be_null=column.nullable)


WIRE_TABLES: dict[str, tuple[WireColumn, ...]] = {
    "spans": tuple(_span_column(column) for column in SPAN_COLUMNS),
    "steps": (
        WireColumn("step", pa.int32()),
        WireColumn("start_ns", pa.int64()),
        WireColumn("end_ns", pa.int64()),
        WireColumn("num_tokens", pa.int64(), NONE),
        WireColumn("loss", pa.float64(), math.nan),
        WireColumn("peak_memory_bytes", pa.int64(), NONE),
        WireColumn("left_out", pa.uint32(), 0),
        WireColumn("peak_reserved_bytes", pa.int64(), NONE),
        WireColumn("num_alloc_retries", pa.int64(), NONE),
        WireColumn("row", pa.uint32()),
    ),
    "microbatches": (
        WireColumn("step", pa.int32()),
        WireColumn("microbatch", pa.int32()),
        WireColumn("num_tokens", pa.int64(), NONE),
        WireColumn("sum_squared_lengths", pa.int64(), NONE),
        WireColumn("sum_windowed_lengths", pa.int64(), NONE),
        WireColumn("num_elements", pa.int64(), NONE),
        WireColumn("row", pa.uint32()),
    ),
    "bad_rows": (
        WireColumn("row", pa.uint32()),
        WireColumn("reason", CODED_TEXT),
        WireColumn("record", pa.string()),
    ),
}
"""Columns by table, in the order of `spool.records.CutRows`, without those of the key."""

KEY_COLUMNS: tuple[WireColumn, ...] = (
    WireColumn("run_id", pa.string()),
    WireColumn("epoch", pa.int32()),
    WireColumn("rank", pa.int32()),
    WireColumn("process", pa.string()),
    WireColumn("segment", pa.uint64()),
    WireColumn("first_row", pa.uint32()),
    WireColumn("end_row", pa.uint32()),
    WireColumn("sha256", pa.string()),
    WireColumn("num_torn", pa.uint32(), 0),
)
"""Columns of a cut's key and header."""


ROW_RANK = WireColumn("rank", pa.int32())
"""First column of the nested tables if a cut has rows of several ranks, as in simulated runs. The
rank of the cut itself is then -1."""


def wire_columns(table: str, *, has_ranks: bool = False) -> tuple[WireColumn, ...]:
    """Return the columns of a nested table."""
    return (ROW_RANK, *WIRE_TABLES[table]) if has_ranks else WIRE_TABLES[table]


def cuts_schema(*, has_ranks: bool = False) -> pa.Schema:
    """Return the schema of a stream of cuts, as it is written."""
    fields: list[pa.Field[Any]] = [
        pa.field(column.name, column.arrow_type, nullable=False) for column in KEY_COLUMNS
    ]
    for table in WIRE_TABLES:
        item = pa.field("item", struct_type(table, has_ranks=has_ranks), nullable=False)
        fields.append(pa.field(table, pa.list_(item), nullable=False))
    return pa.schema(fields, metadata={SCHEMA_KEY: str(SCHEMA_VERSION).encode()})


def struct_type(table: str, *, has_ranks: bool = False) -> pa.StructType:
    """Return the type of one row of a nested table."""
    return pa.struct(
        [
            pa.field(column.name, column.arrow_type, nullable=column.may_be_null)
            for column in wire_columns(table, has_ranks=has_ranks)
        ]
    )
