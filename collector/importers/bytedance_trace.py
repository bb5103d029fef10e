"""Rows of a ByteDance trace: read in batches, checked, and turned into the store's columns.

Only the columns themselves stay in memory, as narrow as their content allows.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import NONE, NS_PER_S
from rankscope.tracer.spool import open_regular_file

from ..arrow_columns import (
    NUMPY_NAMES,
    coded_strings,
    numbers,
    repeated_string,
    to_codes,
    to_numpy,
)
from ..errors import MetaError, TraceError
from ..identity import MAX_INT32, MAX_INT64
from ..names import storable_name
from .parquet_reader import (
    COLUMNS,
    INTEGER_COLUMNS,
    NOT_PARQUET,
    ROWS_AT_ONCE,
    TEXT_COLUMN,
    TIME_COLUMNS,
    open_parquet,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from .bytedance_meta import TraceMeta

    Integers = np.integer[Any]

MAX_SECONDS = 1e7
"""Four months; a larger time in a step is garbage."""

MAX_UNIX_SECONDS = 9e9
"""The year 2255. Starts as 64-bit floats may be Unix times, because steps are laid end to end
anyway. 32-bit floats are too coarse for them: their values differ by minutes."""

MAX_OPTYPES = 10_000
"""As many names as a run may have."""

MAX_OPTYPE_CHARS = 4096

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
    """A checked trace, one element per row of the file, in the file's order."""

    columns: dict[str, NDArray[Integers]]
    """The integer columns, of at most 32 bits."""

    optype: NDArray[np.int32]
    """Codes that index ``optypes``."""

    optypes: tuple[str, ...]
    start_ns: NDArray[np.int64]
    """Steps are laid end to end in step order, from 0."""

    duration_ns: NDArray[np.int64]
    steps: tuple[int, ...]
    """Steps of the trace, ascending."""

    workers: tuple[tuple[int, int, int], ...]
    """(rank, dp, pp) of each traced rank, ascending."""

    def span_table(self, run_id: str, *, epoch: int, segment: int, rows: slice) -> pa.Table:
        """Return table ``spans`` for a slice of the rows; ``row`` is the number in the file.

        Columns that the format does not record are missing.
        """
        row = np.arange(len(self.start_ns), dtype=np.uint32)[rows]
        num_rows = len(row)
        values = {name: column[rows] for name, column in self.columns.items()}
        kinds = tuple(KIND_OF_OPTYPE.get(optype, "other") for optype in self.optypes)
        names = tuple(storable_name(optype) for optype in self.optypes)
        named = {
            "run_id": repeated_string(run_id, num_rows),
            "epoch": numbers(np.full(num_rows, epoch), np.int32),
            "step": numbers(values["step"], np.int32),
            "rank": numbers(values["rank"], np.int32),
            "start_ns": numbers(self.start_ns[rows]),
            "kind": coded_strings(self.optype[rows], kinds),
            "name": coded_strings(self.optype[rows], names),
            "track": repeated_string("", num_rows),
            "seq": numbers(values["seq_id"], np.int64),
            "microbatch": numbers(values["mb_id"], np.int32),
            "chunk": numbers(values["mc"], np.int32),
            "duration_ns": numbers(self.duration_ns[rows]),
            "segment": numbers(np.full(num_rows, segment, dtype=np.uint64)),
            "row": numbers(row),
        }
        return pa.Table.from_arrays(list(named.values()), names=list(named))

    def step_table(self, run_id: str, *, epoch: int, segment: int) -> pa.Table:
        """Return table ``steps``: from the first start to the last end of each (step, rank).

        Columns that the format does not record are missing.
        """
        # A trace has few runs of rows of one rank in one step: only these are sorted.
        runs = _run_begins(self.columns["step"], self.columns["rank"])
        first_ns = np.minimum.reduceat(self.start_ns, runs)
        last_ns = np.maximum.reduceat(self.start_ns + self.duration_ns, runs)
        keys = self.columns["step"][runs].astype(np.int64) << 32 | self.columns["rank"][runs]
        order = np.argsort(keys, kind="stable")
        firsts = np.flatnonzero(np.diff(keys[order], prepend=keys[order[0]] - 1))
        start_ns = np.minimum.reduceat(first_ns[order], firsts)
        end_ns = np.maximum.reduceat(last_ns[order], firsts)
        at = runs[order[firsts]]
        num_rows = len(firsts)
        named = {
            "run_id": repeated_string(run_id, num_rows),
            "epoch": numbers(np.full(num_rows, epoch, dtype=np.int32)),
            "step": numbers(self.columns["step"][at], np.int32),
            "rank": numbers(self.columns["rank"][at], np.int32),
            "start_ns": numbers(start_ns),
            "end_ns": numbers(end_ns),
            "segment": numbers(np.full(num_rows, segment, dtype=np.uint64)),
            "row": numbers(np.arange(num_rows, dtype=np.uint32)),
        }
        return pa.Table.from_arrays(list(named.values()), names=list(named))


def read_trace(
    path: Path, *, meta: TraceMeta, show: Callable[[str], None] = lambda _: None
) -> TraceRows:
    """Read and check a trace.

    Args:
        show: Gets a line that says how far it is.

    Raises:
        TraceError: The file is not parquet, a column is missing or has another type, there are no
            rows, or a value is null, out of range, negative or not finite.
        MetaError: The sizes in ``meta`` contradict the trace.
    """
    file = _read_columns(path, show)
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


class _TraceFile:
    """The checked columns of a trace, in the file's order."""

    def __init__(self, path: Path, schema: pa.Schema, num_rows: int) -> None:
        self.path = path
        self.integers: dict[str, NDArray[Integers]] = {}
        for name in INTEGER_COLUMNS:
            dtype = np.dtype(NUMPY_NAMES[str(schema.field(name).type)])
            narrow = dtype if dtype.itemsize <= np.dtype(np.int32).itemsize else np.dtype(np.int32)
            self.integers[name] = np.empty(num_rows, dtype=narrow)
        self.times_ns = {name: np.empty(num_rows, dtype=np.int64) for name in TIME_COLUMNS}
        self.optype = np.empty(num_rows, dtype=np.int32)
        self.optypes: dict[str, int] = {}
        """Code of each operation type."""

        self._scratch = np.empty(min(num_rows, ROWS_AT_ONCE))
        self.num_read = 0
        """Rows that were added."""

    def add(self, batch: pa.Table) -> None:
        """Check and add the next rows."""
        for name in COLUMNS:
            if batch[name].null_count:
                raise TraceError(
                    self.path, f"column {name} has {batch[name].null_count} empty rows"
                )
        rows = slice(self.num_read, self.num_read + batch.num_rows)
        if rows.stop > len(self.optype):
            raise TraceError(
                self.path, f"has more than the {len(self.optype)} rows it declares: copy it again"
            )
        for name, column in self.integers.items():
            values = to_numpy(batch[name])
            lowest = NONE if name in {"seq_id", "mc", "mb_id"} else 0
            if values.min() < lowest or values.max() > MAX_INT32:
                raise TraceError(
                    self.path,
                    f"column {name} goes from {values.min()} to {values.max()},"
                    f" expected {lowest} to {MAX_INT32}",
                )
            column[rows] = values
        for name, times_ns in self.times_ns.items():
            seconds = to_numpy(batch[name])
            self._check_seconds(name, seconds)
            here = self._scratch[: len(seconds)]
            np.multiply(seconds, float(NS_PER_S), out=here, dtype=np.float64)
            times_ns[rows] = np.rint(here, out=here)
        self.optype[rows] = self._optype_codes(batch[TEXT_COLUMN])
        self.num_read = rows.stop

    def _optype_codes(self, column: pa.ChunkedArray[Any]) -> NDArray[np.int32]:
        codes, texts = to_codes(
            column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        )
        longest = max(map(len, texts), default=0)
        if longest > MAX_OPTYPE_CHARS:
            raise TraceError(
                self.path,
                f"column {TEXT_COLUMN} has a text of {longest:,} characters,"
                f" expected at most {MAX_OPTYPE_CHARS:,}",
            )
        joint = [self.optypes.setdefault(text, len(self.optypes)) for text in texts]
        if len(self.optypes) > MAX_OPTYPES:
            raise TraceError(
                self.path, f"has more than {MAX_OPTYPES:,} operation types in column {TEXT_COLUMN}"
            )
        return np.array(joint, dtype=np.int32)[codes]

    def _check_seconds(self, name: str, seconds: NDArray[np.floating[Any]]) -> None:
        may_be_unix = name == "start_ts" and seconds.dtype == np.float64
        most = MAX_UNIX_SECONDS if may_be_unix else MAX_SECONDS
        if seconds.min() >= 0 and seconds.max() <= most:  # both are false for NaN
            return
        bad = np.flatnonzero(~((seconds >= 0) & (seconds <= most)))
        raise TraceError(
            self.path,
            f"{name} is {float(seconds[bad[0]])} s in row {self.num_read + int(bad[0])}"
            f" ({len(bad)} such rows among {len(seconds)}), expected 0 to {most:.0f}",
        )


def _read_columns(path: Path, show: Callable[[str], None]) -> _TraceFile:
    try:
        with (
            os.fdopen(open_regular_file(path), "rb") as opened,
            open_parquet(opened.fileno(), path=path) as (schema, num_rows, batches),
        ):
            _check_schema(path, schema)
            trace = _TraceFile(path, schema, num_rows)
            for batch in batches:
                trace.add(pa.Table.from_batches([batch]))
                show(f"read {trace.num_read:,} of {num_rows:,} rows")
            if trace.num_read < num_rows:
                reason = f"has {trace.num_read} rows, not the {num_rows} it declares"
                raise TraceError(path, f"{reason}: copy it again")
            return trace
    except OSError as error:
        if error.strerror:  # of the system; Arrow's errors have a text only
            raise TraceError(path, f"cannot be read ({error.strerror}): check the path") from error
        raise TraceError(path, NOT_PARQUET) from error
    except (UnicodeDecodeError, MemoryError, pa.ArrowException) as error:
        raise TraceError(path, NOT_PARQUET) from error


def _check_schema(path: Path, schema: pa.Schema) -> None:
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise TraceError(
            path, f"no column {', '.join(missing)}: expected a trace of the bytedance format"
        )
    repeated = [name for name in COLUMNS if schema.names.count(name) > 1]
    if repeated:
        raise TraceError(path, f"more than one column {', '.join(repeated)}: leave one in the file")
    for names, is_expected, expected in (
        (INTEGER_COLUMNS, pa.types.is_integer, "whole numbers"),
        (TIME_COLUMNS, _is_seconds, "seconds as floats of 32 or 64 bits"),
        ((TEXT_COLUMN,), _is_text, "text"),
    ):
        for name in names:
            found = schema.field(name).type
            if not is_expected(found):
                raise TraceError(path, f"column {name} is {found}, expected {expected}")


def _is_seconds(found: pa.DataType) -> bool:
    return pa.types.is_float32(found) or pa.types.is_float64(found)


def _is_text(found: pa.DataType) -> bool:
    value_type = found.value_type if pa.types.is_dictionary(found) else found
    return pa.types.is_string(value_type) or pa.types.is_large_string(value_type)


def _workers(
    columns: dict[str, NDArray[Integers]], *, path: Path
) -> tuple[tuple[int, int, int], ...]:
    """Return (rank, dp, pp) of each rank; there is one for each (dp, pp)."""
    positions = [columns[name] for name in ("rank", "dp_rank", "stage")]
    sizes = [int(values.max()) + 1 for values in positions]
    if math.prod(sizes) > MAX_INT64:
        raise TraceError(path, f"rank, dp_rank and stage go up to {sizes}: no job is that large")
    seen: set[int] = set()
    for at in range(0, len(positions[0]), ROWS_AT_ONCE):
        here = [values[at : at + ROWS_AT_ONCE] for values in positions]
        begins = _run_begins(*here)
        seen.update(np.unique(np.ravel_multi_index([v[begins] for v in here], sizes)).tolist())
    ranks, dps, stages = np.unravel_index(np.array(sorted(seen)), sizes)
    if len(np.unique(ranks)) != len(ranks):
        raise TraceError(path, "a rank has two (dp_rank, stage) positions")
    if len(np.unique(dps * sizes[2] + stages)) != len(ranks):
        raise TraceError(path, "two ranks have one (dp_rank, stage) position")
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
    """Shift ``start_ns`` so that each step begins at the end of the one before; return the steps.

    The format has no common clock: the times of each step begin at 0.
    """
    steps = np.unique(step[_run_begins(step)]).astype(np.int64)
    begin = np.full(len(steps), np.iinfo(np.int64).max)
    end = np.zeros(len(steps), dtype=np.int64)
    slices = [slice(at, at + ROWS_AT_ONCE) for at in range(0, len(step), ROWS_AT_ONCE)]
    for rows in slices:
        runs = _run_begins(step[rows])
        place = np.searchsorted(steps, step[rows][runs])
        np.minimum.at(begin, place, np.minimum.reduceat(start_ns[rows], runs))
        np.maximum.at(end, place, np.maximum.reduceat(start_ns[rows] + duration_ns[rows], runs))
    lengths = end - begin
    shift = np.cumsum(lengths) - lengths - begin
    for rows in slices:
        runs = _run_begins(step[rows])
        shifts = shift[np.searchsorted(steps, step[rows][runs])]
        start_ns[rows] += np.repeat(shifts, np.diff(runs, append=len(step[rows])))
    return steps


def _run_begins(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return the first row of each run of rows in which no column changes."""
    changes = np.ones(len(columns[0]), dtype=np.bool_)
    np.not_equal(columns[0][1:], columns[0][:-1], out=changes[1:])
    for column in columns[1:]:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)
