"""Conversion of the store's Arrow tables to the columns of the analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.readers.waits import Arrivals
from rankscope.analysis.trace.context import MicrobatchTable, SampleTable
from rankscope.analysis.trace.rows import make_span_table
from rankscope.analysis.trace.tables import SpanTable, StepTable
from rankscope.collector.arrow_columns import to_codes, to_numpy
from rankscope.tracer.span import KIND_CODES, NONE, SPAN_COLUMNS, SpanKind

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

READ_COLUMNS = {"epoch", "rank", *(c.name for c in SPAN_COLUMNS if c.in_analysis)}

MEMORY_COLUMNS = ("peak_memory_bytes", "peak_reserved_bytes", "num_alloc_retries")

OTHER_CODE = KIND_CODES[SpanKind.OTHER]


def span_table(table: pa.Table) -> SpanTable:
    """Return spans, in the order of the table."""
    kind, kinds = to_codes(table["kind"])
    name, names = to_codes(table["name"])
    if "track" in table.column_names:
        track, tracks = to_codes(table["track"])
    else:
        track, tracks = np.broadcast_to(np.int32(0), table.num_rows), ("",)
    coded = {"kind", "name", "track"}
    columns: dict[str, NDArray[Any]] = {
        column: to_numpy(table[column]) for column in READ_COLUMNS & {*table.column_names} - coded
    }
    columns |= {"kind": _kind_codes(kind, kinds), "name": name, "track": track}
    return make_span_table(**columns, names=names, tracks=tracks)


def step_table(table: pa.Table) -> StepTable:
    """Return step rows, in the order of the table."""
    columns = _columns(table, "epoch", "step", "rank", "start_ns", "end_ns", "num_tokens", "loss")
    columns |= {name: _numbers(table, name) for name in MEMORY_COLUMNS}
    left_out = _numbers(table, "left_out", missing=0, dtype=np.uint32)
    return StepTable(**columns, left_out=left_out)


def _columns(table: pa.Table, *names: str) -> dict[str, NDArray[Any]]:
    return {name: to_numpy(table[name]) for name in names}


def _numbers(
    table: pa.Table, name: str, *, missing: int = NONE, dtype: type[np.integer] = np.int64
) -> NDArray[Any]:
    if name in table.column_names:
        return to_numpy(table[name])
    return np.full(table.num_rows, missing, dtype=dtype)


def arrivals_table(table: pa.Table) -> Arrivals:
    """Return what `collector.read.spans.read_arrivals` read."""
    columns = _columns(table, "group_id", "seq", "num_spans", "num_ranks", "latest_ns", "last_rank")
    ends = {"src_rank": table["source_rank"], "dst_rank": table["target_rank"]}
    return Arrivals(**columns, **{name: to_numpy(column) for name, column in ends.items()})


def microbatch_table(table: pa.Table) -> MicrobatchTable:
    """Return micro-batch rows, in the order of the table."""
    columns = _columns(
        table, "epoch", "step", "rank", "microbatch", "num_tokens", "sum_squared_lengths"
    )
    columns |= {name: _numbers(table, name) for name in ("sum_windowed_lengths", "num_elements")}
    return MicrobatchTable(**columns)


def sample_table(table: pa.Table) -> SampleTable:
    """Return samples, in the order of the table, which their codes follow."""
    host, hosts = _ordered_codes(table["host"])
    name, names = _ordered_codes(table["name"])
    return SampleTable(
        host=host,
        device=to_numpy(table["device"]),
        at_ns=to_numpy(table["at_ns"]),
        name=name,
        value=to_numpy(table["value"]),
        hosts=hosts,
        names=names,
    )


def _ordered_codes(
    column: pa.ChunkedArray[Any],
) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Return `to_codes` with ascending texts: a dictionary of the store has any order."""
    codes, texts = to_codes(column)
    order = sorted(range(len(texts)), key=texts.__getitem__)
    places = np.empty(len(texts), dtype=np.int32)
    places[order] = np.arange(len(texts))
    return places[codes], tuple(texts[at] for at in order)


def _kind_codes(codes: NDArray[np.int32], kinds: tuple[str, ...]) -> NDArray[np.int8]:
    """Convert kind codes from the order of ``kinds`` to that of `tracer.span.KINDS`.

    A kind that only a newer collector knows becomes ``other``.
    """
    known = set(SpanKind)
    lookup = [KIND_CODES[SpanKind(kind)] if kind in known else OTHER_CODE for kind in kinds]
    return np.array([*lookup, OTHER_CODE], dtype=np.int8)[codes]
