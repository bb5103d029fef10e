"""The rows of a ByteDance trace: read, checked, and turned into the store's columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import NONE

from ..arrow_columns import coded_strings, numbers, optional_numbers, repeated_string
from ..errors import MetaError, TraceError
from ..identity import MAX_INT64
from ..names import storable_name
from .bytedance_file import TIME_COLUMNS, read_columns

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from .bytedance_meta import TraceMeta

    Integers = np.integer[Any]
    Floats = np.floating[Any]

ROWS_AT_ONCE = 1 << 18
"""Rows of one piece: what is made in between is small."""

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
    file = read_columns(path)
    workers = _workers(file.integers, path=path)
    _check_sizes(file.integers, meta=meta)
    start_ns, duration_ns = (file.times_ns[name] for name in TIME_COLUMNS)
    steps = _lay_end_to_end(file.integers["step"], start_ns, duration_ns)
    return TraceRows(
        columns=file.integers,
        optype=file.optype,
        optypes=tuple(file.optypes),
        start_ns=start_ns,
        duration_ns=duration_ns,
        steps=tuple(steps.tolist()),
        workers=workers,
    )


def _run_begins(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return where runs of rows begin in which no column changes."""
    changes = np.ones(len(columns[0]), dtype=np.bool_)
    np.not_equal(columns[0][1:], columns[0][:-1], out=changes[1:])
    for column in columns[1:]:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def _workers(
    columns: dict[str, NDArray[Integers]], *, path: Path
) -> tuple[tuple[int, int, int], ...]:
    """Return (rank, dp, pp) of each rank, of which there is one for each (dp, pp)."""
    places = [columns[name] for name in ("rank", "dp_rank", "stage")]
    sizes = [int(values.max()) + 1 for values in places]
    if math.prod(sizes) > MAX_INT64:
        raise TraceError(path, f"rank, dp_rank and stage go up to {sizes}: no job is that large")
    seen: set[int] = set()
    for at in range(0, len(places[0]), ROWS_AT_ONCE):
        here = [values[at : at + ROWS_AT_ONCE] for values in places]
        begins = _run_begins(*here)
        seen.update(np.unique(np.ravel_multi_index([v[begins] for v in here], sizes)).tolist())
    ranks, dps, stages = np.unravel_index(np.array(sorted(seen)), sizes)
    if len(np.unique(ranks)) != len(ranks):
        raise TraceError(path, "a rank stands at two (dp_rank, stage) positions")
    if len(np.unique(dps * sizes[2] + stages)) != len(ranks):
        raise TraceError(path, "two ranks stand at one (dp_rank, stage) position")
    return tuple(zip(ranks.tolist(), dps.tolist(), stages.tolist(), strict=True))


def _check_sizes(columns: dict[str, NDArray[Integers]], *, meta: TraceMeta) -> None:
    layout = meta.layout
    for column, name, size in (("dp_rank", "dp_size", layout.dp), ("stage", "pp_size", layout.pp)):
        found = int(columns[column].max()) + 1
        if found != size:
            raise MetaError(
                f"{meta.path} says {name} {size}, the trace has {column} 0 to {found - 1}:"
                " pass the meta file of this trace"
            )
    num_chunks = max(int(columns["mc"].max()) + 1, 1)
    if num_chunks != layout.vpp:
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
    steps = np.unique(step[_run_begins(step)]).astype(np.int64)
    begin = np.full(len(steps), np.iinfo(np.int64).max)
    end = np.zeros(len(steps), dtype=np.int64)
    pieces = [slice(at, at + ROWS_AT_ONCE) for at in range(0, len(step), ROWS_AT_ONCE)]
    for rows in pieces:
        runs = _run_begins(step[rows])
        place = np.searchsorted(steps, step[rows][runs])
        np.minimum.at(begin, place, np.minimum.reduceat(start_ns[rows], runs))
        np.maximum.at(end, place, np.maximum.reduceat(start_ns[rows] + duration_ns[rows], runs))
    lengths = end - begin
    shift = np.cumsum(lengths) - lengths - begin
    for rows in pieces:
        runs = _run_begins(step[rows])
        shifts = shift[np.searchsorted(steps, step[rows][runs])]
        start_ns[rows] += np.repeat(shifts, np.diff(runs, append=len(step[rows])))
    return steps
