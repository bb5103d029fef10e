"""The columns of a ByteDance trace's parquet file: read and checked a batch of rows at a time.

A batch's memory is used again for the next, so what stays is little more than
the columns themselves, as narrow as their content allows.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.tracer.span import NONE

from ..arrow_columns import NUMPY_NAMES, to_codes, to_numpy
from ..errors import TraceError
from ..identity import MAX_INT32
from .parquet_pages import NOT_PARQUET, check_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    Integers = np.integer[Any]

NS_PER_S = 1e9
MAX_SECONDS = 1e7
"""Four months: beyond it a time is not a step's but garbage."""

MAX_UNIX_SECONDS = 9e9
"""Starts as 64-bit floats may count from 1970, to the year 2255; steps are laid end to end anyway.
Of 32 bits they would be minutes apart."""

ROWS_AT_ONCE = 1 << 18
MAX_OPTYPES = 10_000
"""As many names as a run may have."""

MAX_OPTYPE_CHARS = 4096
INTEGER_COLUMNS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id")
TIME_COLUMNS = ("start_ts", "duration")
TEXT_COLUMN = "optype"
COLUMNS = (*INTEGER_COLUMNS, *TIME_COLUMNS, TEXT_COLUMN)


class TraceFile:
    """A trace's columns in the file's order, after `read_columns`."""

    def __init__(self, path: Path, schema: pa.Schema, num_rows: int) -> None:
        self.path = path
        self.integers: dict[str, NDArray[Integers]] = {
            name: np.empty(num_rows, dtype=_narrow(schema.field(name).type))
            for name in INTEGER_COLUMNS
        }
        self.times_ns = {name: np.empty(num_rows, dtype=np.int64) for name in TIME_COLUMNS}
        self.optype = np.empty(num_rows, dtype=np.int32)
        """Codes into ``optypes``."""

        self.optypes: dict[str, int] = {}
        """The code of each text."""

        self._scratch = np.empty(min(num_rows, ROWS_AT_ONCE))
        self._num_read = 0

    def take(self, batch: pa.Table) -> None:
        """Check some more rows, and keep them.

        Raises:
            TraceError: A null, a number out of range, or a time that is negative
                or not finite.
        """
        for name in COLUMNS:
            if batch[name].null_count:
                raise TraceError(
                    self.path, f"column {name} has {batch[name].null_count} empty rows"
                )
        rows = slice(self._num_read, self._num_read + batch.num_rows)
        if rows.stop > len(self.optype):
            raise TraceError(
                self.path, f"holds more than the {len(self.optype)} rows it says: copy it again"
            )
        for name, whole in self.integers.items():
            whole[rows] = self._checked(name, to_numpy(batch[name]))
        for name, times_ns in self.times_ns.items():
            seconds = to_numpy(batch[name])
            self._check_seconds(name, seconds)
            here = self._scratch[: len(seconds)]
            np.multiply(seconds, NS_PER_S, out=here, dtype=np.float64)
            times_ns[rows] = np.rint(here, out=here)
        codes, texts = to_codes(_dictionary(batch[TEXT_COLUMN]))
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
        self.optype[rows] = np.array(joint, dtype=np.int32)[codes]
        self._num_read = rows.stop

    def check_whole(self) -> None:
        """Check that all rows came.

        Raises:
            TraceError: The file has no row, or fewer than it says.
        """
        num_rows = len(self.optype)
        if not num_rows:
            raise TraceError(self.path, "holds no operation: nothing to import")
        if self._num_read < num_rows:
            raise TraceError(
                self.path, f"holds {self._num_read} rows where it says {num_rows}: copy it again"
            )

    def _checked(self, name: str, values: NDArray[Integers]) -> NDArray[Integers]:
        lowest = NONE if name in {"seq_id", "mc", "mb_id"} else 0
        if values.min() < lowest or values.max() > MAX_INT32:
            raise TraceError(
                self.path,
                f"column {name} goes from {values.min()} to {values.max()},"
                f" expected {lowest} to {MAX_INT32}",
            )
        return values

    def _check_seconds(self, name: str, seconds: NDArray[np.floating[Any]]) -> None:
        may_be_unix = name == "start_ts" and seconds.dtype == np.float64
        most = MAX_UNIX_SECONDS if may_be_unix else MAX_SECONDS
        if seconds.min() >= 0 and seconds.max() <= most:  # of a NaN neither is true
            return
        bad = np.flatnonzero(~((seconds >= 0) & (seconds <= most)))
        raise TraceError(
            self.path,
            f"{name} is {float(seconds[bad[0]])} s in row {self._num_read + int(bad[0])}"
            f" ({len(bad)} such rows among {len(seconds)}), expected 0 to {most:.0f}",
        )


def read_columns(path: Path) -> TraceFile:
    """Read a trace's columns.

    Raises:
        TraceError: Not parquet, a column missing or of another type, no row, a
            null, a number out of range, or a time that is negative or not finite.
    """
    with _damage_named(path):
        check_pages(path, columns=COLUMNS)
        with pq.ParquetFile(path, memory_map=False) as looked_at:
            schema, metadata = looked_at.schema_arrow, looked_at.metadata
        _check_schema(path, schema)
        # As a dictionary: a long text stands once, however many rows have it.
        file = pq.ParquetFile(
            path, metadata=metadata, memory_map=False, read_dictionary=[TEXT_COLUMN]
        )
        found = TraceFile(path, schema, metadata.num_rows)
        with ThreadPoolExecutor(1) as beside:  # one batch is kept while the next is decoded
            kept: Future[None] | None = None
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=list(COLUMNS)):
                if kept:
                    kept.result()
                kept = beside.submit(found.take, pa.Table.from_batches([batch]))
            if kept:
                kept.result()
    found.check_whole()
    return found


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.strerror:  # the system's; Arrow's own have a text alone
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
    twice = [name for name in COLUMNS if schema.names.count(name) > 1]
    if twice:
        raise TraceError(path, f"more than one column {', '.join(twice)}: leave one in the file")
    for names, fits, expected in (
        (INTEGER_COLUMNS, pa.types.is_integer, "whole numbers"),
        (TIME_COLUMNS, _is_seconds, "seconds as floats of 32 or 64 bits"),
        ((TEXT_COLUMN,), _is_text, "text"),
    ):
        for name in names:
            found = schema.field(name).type
            if not fits(found):
                raise TraceError(path, f"column {name} is {found}, expected {expected}")


def _is_seconds(found: pa.DataType) -> bool:
    return pa.types.is_float32(found) or pa.types.is_float64(found)


def _is_text(found: pa.DataType) -> bool:
    value_type = found.value_type if pa.types.is_dictionary(found) else found
    return pa.types.is_string(value_type) or pa.types.is_large_string(value_type)


def _narrow(found: pa.DataType) -> np.dtype[Any]:
    """Return the type that holds a column of integers: no number beyond 32 bits is taken."""
    dtype = np.dtype(NUMPY_NAMES[str(found)])
    return dtype if dtype.itemsize <= np.dtype(np.int32).itemsize else np.dtype(np.int32)


def _dictionary(column: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    return column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
