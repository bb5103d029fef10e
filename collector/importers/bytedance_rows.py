"""The rows of a ByteDance trace: read, checked, and turned into the store's columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from collector.columns import (
    coded_strings,
    numbers,
    optional_numbers,
    repeated_string,
    to_codes,
    to_numpy,
)
from collector.errors import MetaError, TraceError
from collector.names import storable_name
from tracer.span import NONE

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from collector.importers.bytedance_meta import TraceMeta

    Integers = np.integer[Any]
    Floats = np.floating[Any]

NS_PER_S = 1e9
MAX_SECONDS = 1e7
"""Four months: beyond it a time is not a step's but garbage."""

ROWS_AT_ONCE = 1 << 15

KIND_OF_OPTYPE = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-send": "pp-send",
    "backward-send": "pp-send",
    "forward-recv": "pp-recv",
    "backward-recv": "pp-recv",
    "params-all-gather": "dp-comm",
    "grads-reduce-scatter": "dp-comm",
    "separate-grads-all-reduce": "dp-comm",
    "layernorm-grads-all-reduce": "tp-comm",
    "gc": "gc",
    "optimizer": "optimizer",
}
"""Span kind of each operation type; any other type is ``other``."""

INTEGER_COLUMNS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id")
TIME_COLUMNS = ("start_ts", "duration")
TEXT_COLUMN = "optype"
COLUMNS = (*INTEGER_COLUMNS, *TIME_COLUMNS, TEXT_COLUMN)
MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRows:
    """A checked trace, one element a row of the file, in the file's order."""

    columns: dict[str, NDArray[Integers]]
    """The integer columns, as wide as the file has them."""

    optype: NDArray[np.int32]
    """Codes into ``optypes``."""

    optypes: tuple[str, ...]
    start_ns: NDArray[np.int64]
    """Steps laid end to end in step order, the first at 0."""

    duration_ns: NDArray[np.int64]
    steps: tuple[int, ...]
    """The steps of the trace, ascending."""

    workers: tuple[tuple[int, int, int], ...]
    """(rank, dp, pp) of each traced rank, ascending."""

    def span_table(self, run_id: str, *, epoch: int, segment: int, rows: slice) -> pa.Table:
        """Return table ``spans`` for a slice of the rows; ``row`` is the place in the file."""
        row = np.arange(len(self.start_ns), dtype=np.uint32)[rows]
        num_rows = len(row)
        held = {name: values[rows] for name, values in self.columns.items()}
        kinds = tuple(KIND_OF_OPTYPE.get(optype, "other") for optype in self.optypes)
        names = tuple(storable_name(optype) for optype in self.optypes)
        unknown = np.full(num_rows, NONE)
        zero = np.zeros(num_rows)
        named = {
            "run_id": repeated_string(run_id, num_rows),
            "epoch": numbers(np.full(num_rows, epoch), np.int32),
            "step": numbers(held["step"], np.int32),
            "rank": numbers(held["rank"], np.int32),
            "start_ns": numbers(self.start_ns[rows]),
            "kind": coded_strings(self.optype[rows], kinds),
            "name": coded_strings(self.optype[rows], names),
            "track": repeated_string("", num_rows),
            "group_id": numbers(zero, np.uint64),
            "seq": numbers(held["seq_id"], np.int64),
            "src_rank": numbers(unknown, np.int32),
            "dst_rank": numbers(unknown, np.int32),
            "microbatch": numbers(held["mb_id"], np.int32),
            "chunk": numbers(held["mc"], np.int32),
            "duration_ns": numbers(self.duration_ns[rows]),
            "launch_ns": numbers(unknown, np.int64),
            "num_bytes": numbers(unknown, np.int64),
            "interval_id": numbers(zero, np.int64),
            "parent_row": optional_numbers(zero.astype(np.uint32), zero > 0),
            "flags": numbers(zero, np.uint16),
            "depth": numbers(zero, np.int16),
            "segment": numbers(np.full(num_rows, segment, dtype=np.uint64)),
            "row": numbers(row),
        }
        return pa.Table.from_arrays(list(named.values()), names=list(named))

    def step_table(self, run_id: str, *, epoch: int, segment: int) -> pa.Table:
        """Return table ``steps``: from the first start to the last end of each (step, rank)."""
        keys = self.columns["step"].astype(np.int64) << 32 | self.columns["rank"]
        order = np.argsort(keys, kind="stable")
        firsts = np.flatnonzero(np.diff(keys[order], prepend=keys[order[0]] - 1))
        start_ns = np.minimum.reduceat(self.start_ns[order], firsts)
        end_ns = np.maximum.reduceat((self.start_ns + self.duration_ns)[order], firsts)
        at = order[firsts]
        num_rows = len(firsts)
        unknown = np.full(num_rows, NONE, dtype=np.int64)
        named = {
            "run_id": repeated_string(run_id, num_rows),
            "epoch": numbers(np.full(num_rows, epoch, dtype=np.int32)),
            "step": numbers(self.columns["step"][at], np.int32),
            "rank": numbers(self.columns["rank"][at], np.int32),
            "start_ns": numbers(start_ns),
            "end_ns": numbers(end_ns),
            "num_tokens": numbers(unknown),
            "loss": numbers(np.full(num_rows, np.nan)),
            "peak_memory_bytes": numbers(unknown),
            "segment": numbers(np.full(num_rows, segment, dtype=np.uint64)),
            "row": numbers(np.arange(num_rows, dtype=np.uint32)),
        }
        return pa.Table.from_arrays(list(named.values()), names=list(named))


def read_trace(path: Path, *, meta: TraceMeta) -> TraceRows:
    """Read and check a trace.

    Raises:
        TraceError: Not parquet, a column missing or of another type, no row, a
            null, or a time that is negative or not finite.
        MetaError: The sizes in ``meta`` contradict the trace.
    """
    table = _read_parquet(path)
    columns = {name: _integers(table, name, path=path) for name in INTEGER_COLUMNS}
    start_s, duration_s = (_seconds(table, name, path=path) for name in TIME_COLUMNS)
    optype, optypes = _texts(table, path=path)
    workers = _workers(columns, path=path)
    _check_sizes(columns, meta=meta)
    start_ns, duration_ns = _nanoseconds(start_s), _nanoseconds(duration_s)
    steps = _lay_end_to_end(columns["step"], start_ns, duration_ns)
    return TraceRows(
        columns=columns,
        optype=optype,
        optypes=optypes,
        start_ns=start_ns,
        duration_ns=duration_ns,
        steps=tuple(steps.tolist()),
        workers=workers,
    )


def _read_parquet(path: Path) -> pa.Table:
    try:
        file = pq.ParquetFile(path, memory_map=False)
        missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
        if missing:
            raise TraceError(
                path, f"no column {', '.join(missing)}: expected a trace of the bytedance format"
            )
        table = file.read(columns=list(COLUMNS))
    except (OSError, pa.ArrowException) as error:
        raise TraceError(
            path, "not a parquet file, or a damaged one: expected a trace of the bytedance format"
        ) from error
    if not table.num_rows:
        raise TraceError(path, "holds no operation: nothing to import")
    return table


def _integers(table: pa.Table, name: str, *, path: Path) -> NDArray[Integers]:
    column = table[name]
    if not pa.types.is_integer(column.type):
        raise TraceError(path, f"column {name} is {column.type}, expected whole numbers")
    _refuse_nulls(table, name, path=path)
    values = to_numpy(column)
    lowest = NONE if name in {"seq_id", "mc", "mb_id"} else 0
    if values.min() < lowest or values.max() > MAX_INT32:
        raise TraceError(
            path,
            f"column {name} goes from {values.min()} to {values.max()},"
            f" expected {lowest} to {MAX_INT32}",
        )
    return values


def _seconds(table: pa.Table, name: str, *, path: Path) -> NDArray[Floats]:
    column = table[name]
    if not pa.types.is_floating(column.type):
        raise TraceError(path, f"column {name} is {column.type}, expected seconds as floats")
    _refuse_nulls(table, name, path=path)
    values = to_numpy(column)
    if values.min() >= 0 and values.max() <= MAX_SECONDS:  # of a NaN neither is true
        return values
    bad = ~((values >= 0) & (values <= MAX_SECONDS))
    row = int(np.flatnonzero(bad)[0])
    raise TraceError(
        path,
        f"{name} is {float(values[row])} s in row {row} ({int(bad.sum())} such rows),"
        f" expected 0 to {MAX_SECONDS:.0f}",
    )


def _nanoseconds(seconds: NDArray[Floats]) -> NDArray[np.int64]:
    """Round to whole ns, a piece at a time so that the steps between stay in the cache."""
    whole = np.empty(len(seconds), dtype=np.int64)
    scratch = np.empty(ROWS_AT_ONCE)
    for first in range(0, len(seconds), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        here = scratch[: len(seconds[rows])]
        np.multiply(seconds[rows], NS_PER_S, out=here, dtype=np.float64)
        np.rint(here, out=here)
        whole[rows] = here
    return whole


def _run_begins(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return where runs of rows begin in which no column changes."""
    changes = np.ones(len(columns[0]), dtype=np.bool_)
    np.not_equal(columns[0][1:], columns[0][:-1], out=changes[1:])
    for column in columns[1:]:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def _texts(table: pa.Table, *, path: Path) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    column = table[TEXT_COLUMN]
    _refuse_nulls(table, TEXT_COLUMN, path=path)
    value_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(value_type) or pa.types.is_large_string(value_type)):
        raise TraceError(path, f"column {TEXT_COLUMN} is {column.type}, expected text")
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    codes, texts = to_codes(column)
    if None in texts:
        raise TraceError(path, f"column {TEXT_COLUMN} has empty values")
    return codes, texts


def _refuse_nulls(table: pa.Table, name: str, *, path: Path) -> None:
    if table[name].null_count:
        raise TraceError(path, f"column {name} has {table[name].null_count} empty rows")


def _workers(
    columns: dict[str, NDArray[Integers]], *, path: Path
) -> tuple[tuple[int, int, int], ...]:
    """Return (rank, dp, pp) of each rank, of which there is one for each (dp, pp)."""
    names = ("rank", "dp_rank", "stage")
    begins = _run_begins(*(columns[name] for name in names))
    ranks, dps, stages = (columns[name][begins].astype(np.int64) for name in names)
    rank, first, place = np.unique(ranks, return_index=True, return_inverse=True)
    dp, pp = dps[first], stages[first]
    if (dp[place] != dps).any() or (pp[place] != stages).any():
        raise TraceError(path, "a rank stands at two (dp_rank, stage) positions")
    if len(np.unique(dp << 32 | pp)) != len(rank):
        raise TraceError(path, "two ranks stand at one (dp_rank, stage) position")
    return tuple(zip(rank.tolist(), dp.tolist(), pp.tolist(), strict=True))


def _check_sizes(columns: dict[str, NDArray[Integers]], *, meta: TraceMeta) -> None:
    layout = meta.layout
    for column, name, size in (("dp_rank", "dp_size", layout.dp), ("stage", "pp_size", layout.pp)):
        found = int(columns[column].max()) + 1
        if found != size:
            raise MetaError(
                f"{meta.path} says {name} {size}, the trace has {column} 0 to {found - 1}:"
                " pass the meta file of this trace"
            )
    num_chunks = int(columns["mc"].max()) + 1
    if num_chunks > layout.vpp:
        raise MetaError(
            f"{meta.path} says vpp_size {layout.vpp}, the trace has mc 0 to {num_chunks - 1}:"
            " pass the meta file of this trace"
        )


def _lay_end_to_end(
    step: NDArray[Integers], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Shift ``start_ns`` so that each step begins where the one before ends; return the steps.

    The format has no common clock: each step's times begin at 0.
    """
    runs = _run_begins(step)
    steps, place = np.unique(step[runs].astype(np.int64), return_inverse=True)
    begin = np.full(len(steps), np.iinfo(np.int64).max)
    end = np.zeros(len(steps), dtype=np.int64)
    np.minimum.at(begin, place, np.minimum.reduceat(start_ns, runs))
    np.maximum.at(end, place, np.maximum.reduceat(start_ns + duration_ns, runs))
    lengths = end - begin
    shift = np.cumsum(lengths) - lengths - begin
    start_ns += np.repeat(shift[place], np.diff(runs, append=len(step)))
    return steps
