"""Arrow tables of a step, with the columns of the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .placement import Placement
    from .recorder import SpanColumns
    from .workload import Lengths

    Column = pa.Array[Any]

EPOCH = 0
SEGMENT_BITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """Tables of one step."""

    step: int
    segment: int
    """Segment number of all rows of the step; with ``row`` it identifies a row."""

    spans: pa.Table
    """Ordered by (rank, start)."""

    steps: pa.Table
    microbatches: pa.Table
    samples: pa.Table
    events: pa.Table


@dataclass(frozen=True, slots=True, kw_only=True)
class RowName:
    """Columns that identify the rows of a step."""

    run_id: str
    process_hash: int
    """Hash of the process, 40 bits."""

    step: int

    @property
    def segment(self) -> int:
        """Segment number of the step, as if one process had recorded the whole cluster."""
        return self.process_hash << SEGMENT_BITS | self.step

    def columns(self, num_rows: int) -> dict[str, Column]:
        """Return the first columns of a table."""
        return {
            "run_id": same_column(self.run_id, num_rows),
            "epoch": same_number(EPOCH, num_rows, np.int32),
            "step": same_number(self.step, num_rows, np.int32),
        }

    def row_columns(self, num_rows: int, *, first_row: int = 0) -> dict[str, Column]:
        """Return the last columns of a table."""
        row = np.arange(first_row, first_row + num_rows, dtype=np.uint32)
        return {
            "segment": same_number(self.segment, num_rows, np.uint64),
            "row": number_column(row),
        }


def span_table(spans: SpanColumns, name: RowName) -> pa.Table:
    """Return table ``spans``; start and launch are already Unix ns."""
    num_rows = len(spans)
    return table(
        {
            **name.columns(num_rows),
            "rank": number_column(spans.rank, np.int32),
            "start_ns": number_column(spans.start),
            "kind": coded_column(spans.kind, [kind.value for kind in KINDS]),
            "name": coded_column(spans.name, spans.names),
            "track": coded_column(spans.track, spans.tracks),
            "group_id": number_column(spans.group_id),
            "seq": number_column(spans.seq),
            "src_rank": number_column(spans.src_rank, np.int32),
            "dst_rank": number_column(spans.dst_rank, np.int32),
            "microbatch": number_column(spans.microbatch, np.int32),
            "chunk": number_column(spans.chunk, np.int32),
            "duration_ns": number_column(spans.end - spans.start),
            "launch_ns": number_column(spans.launch),
            "num_bytes": number_column(spans.num_bytes),
            "interval_id": number_column(spans.interval),
            "parent_row": pa.nulls(num_rows, pa.uint32()),
            "flags": number_column(spans.flags),
            "depth": number_column(spans.depth),
            **name.row_columns(num_rows),
        }
    )


def microbatch_table(
    lengths: Lengths | None,
    placement: Placement,
    name: RowName,
    *,
    first_row: int,
) -> pa.Table:
    """Return table ``microbatches``; without rows if ``lengths`` is None."""
    ranks = np.arange(len(placement.dp) if lengths else 0, dtype=np.int32)
    squares = (
        lengths.sum_squared_lengths[:, placement.dp].T
        if lengths
        else np.zeros((0, 0), dtype=np.int64)
    )
    num_microbatches, num_rows = squares.shape[1], squares.size
    num_tokens = lengths.num_tokens if lengths else 0
    return table(
        {
            **name.columns(num_rows),
            "rank": number_column(np.repeat(ranks, num_microbatches)),
            "microbatch": number_column(
                np.tile(np.arange(num_microbatches, dtype=np.int32), len(ranks))
            ),
            "num_tokens": same_number(num_tokens, num_rows, np.int64),
            "sum_squared_lengths": number_column(squares.ravel()),
            **name.row_columns(num_rows, first_row=first_row),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a rank."""

    rank: int
    at_ns: int
    """Unix time on the rank's clock."""

    kind: str
    text: str
    data: str
    """A JSON object."""


EXIT_LINE = -1
"""Line number of an exit event, which is in no file of events."""


def event_table(events: Sequence[Event], run_id: str, *, process: str) -> pa.Table:
    """Return table ``events``."""
    num_rows = len(events)
    return table(
        {
            "run_id": same_column(run_id, num_rows),
            "epoch": same_number(EPOCH, num_rows, np.int32),
            "rank": number_column(np.array([event.rank for event in events], dtype=np.int32)),
            "at_ns": number_column(np.array([event.at_ns for event in events], dtype=np.int64)),
            "kind": text_column([event.kind for event in events]),
            "text": text_column([event.text for event in events]),
            "data": text_column([event.data for event in events]),
            "process": same_column(process, num_rows),
            "line": same_number(EXIT_LINE, num_rows, np.int64),
        }
    )


ARROW_TYPES: dict[str, pa.DataType] = {
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float64": pa.float64(),
}


def number_column(values: NDArray[Any], dtype: Any = None) -> Column:  # noqa: ANN401  # a numpy dtype
    """Return a column on the memory of ``values``, or on a copy if ``dtype`` differs."""
    held = np.ascontiguousarray(values, dtype=dtype)
    return pa.Array.from_buffers(
        ARROW_TYPES[held.dtype.name], len(held), [None, pa.py_buffer(held.data)]
    )


def text_column(texts: Sequence[str]) -> Column:
    """Return a column of texts."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def coded_column(codes: NDArray[Any], texts: Sequence[str]) -> Column:
    """Return a dictionary column with ``texts[codes[i]]`` in row ``i``; texts must differ."""
    return pa.DictionaryArray.from_arrays(number_column(codes, np.int32), text_column(texts))


def same_column(text: str, num_rows: int) -> Column:
    """Return a dictionary column with ``text`` in every row."""
    return coded_column(np.zeros(num_rows, dtype=np.int32), [text])


def same_number(value: float, num_rows: int, dtype: Any) -> Column:  # noqa: ANN401  # a numpy dtype
    """Return a column with ``value`` in every row."""
    return number_column(np.full(num_rows, value, dtype=dtype))


def table(columns: dict[str, Column]) -> pa.Table:
    """Return a table of columns."""
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))
