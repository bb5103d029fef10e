"""Reader of untrusted parquet files of ByteDance's format, in a child with limited memory.

A few kilobytes of parquet can inflate to gigabytes, and a damaged file can crash the library. The
child reads the columns of a file and sends them in batches, as an Arrow stream on a pipe. If it
needs too much memory or dies, the caller gets a `TraceError`.

Run as a program, this module is the child.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

if __name__ == "__main__":
    # The child needs no numpy; without it, pyarrow is imported in half the time.
    sys.modules["numpy"] = None  # type: ignore[assignment]

import pyarrow as pa

from ..errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyarrow import parquet

INTEGER_COLUMNS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id")
TIME_COLUMNS = ("start_ts", "duration")
TEXT_COLUMN = "optype"
"""Read as a dictionary, so that a long text is in memory once."""

COLUMNS = (*INTEGER_COLUMNS, *TIME_COLUMNS, TEXT_COLUMN)
ROWS_AT_ONCE = 1 << 18
NOT_PARQUET = "not a parquet file, or a damaged one: expected a trace of the bytedance format"

MEMORY_BYTES = 1 << 30
"""Address space of the child: 0.3 GB of libraries, one batch, and one page of each column."""

MAX_TEXT_BYTES = 64 << 20
"""Largest sum of the different texts of a batch, which the caller must hold."""

BUFFER_BYTES = 1 << 20
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20

FREE_ROWS = 1 << 20
MAX_ROWS_PER_BYTE = 4
"""Largest number of rows per byte of a file with more than `FREE_ROWS` rows: equal rows take almost
no bytes, and would fill the memory of the caller. The published traces have a row in 10 bytes."""

UNBOUNDED_ENCODING = "DELTA_BYTE_ARRAY"
"""Each text may repeat the one before it and add to it, so their sum has no bound."""

OUT_OF_MEMORY, DAMAGED, LONG_TEXTS = 3, 4, 5
"""Exit codes of the child."""


@contextmanager
def open_parquet(
    descriptor: int, *, path: Path
) -> Iterator[tuple[pa.Schema, int, Iterator[pa.RecordBatch]]]:
    """Open the columns of a parquet file for the duration of the block.

    Args:
        descriptor: The file, open for reading at its beginning.

    Returns:
        The schema of all columns, the number of rows, and batches of `COLUMNS` of at most
        `ROWS_AT_ONCE` rows; none if the schema lacks a column. The batches raise `TraceError` if
        the file is damaged or needs too much memory.

    Raises:
        TraceError: The file is not parquet, is damaged, has no rows, or more rows than its size
            allows.
    """
    module = "rankscope.collector.importers.parquet_reader"
    with subprocess.Popen(  # noqa: S603  # our own module
        [sys.executable, "-P", "-m", module, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # The other memory pools reserve address space.
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"},
    ) as child:
        try:
            schema, num_rows = _read_header(child, path)
            if not num_rows:
                raise TraceError(path, "has no rows: nothing to import")
            size = os.fstat(descriptor).st_size
            most = max(FREE_ROWS, size * MAX_ROWS_PER_BYTE)
            if num_rows > most:
                reason = f"has {num_rows:,} rows in {size:,} bytes: expected at most {most:,}"
                raise TraceError(path, reason)
            yield schema, num_rows, _read_batches(child, path)
        finally:
            child.kill()  # it may wait to write batches that nothing reads


def _pipe(child: subprocess.Popen[bytes]) -> Any:  # noqa: ANN401  # Arrow's stubs know no IO
    return child.stdout


def _read_header(child: subprocess.Popen[bytes], path: Path) -> tuple[pa.Schema, int]:
    pipe = _pipe(child)
    length = int.from_bytes(pipe.read(LENGTH_BYTES), "little")
    data = pipe.read(length) if length <= MAX_HEADER_BYTES else b""
    if not data or len(data) < length:
        raise _death_error(child, path)
    header = json.loads(data)
    if header["has_unbounded_text"]:
        raise TraceError(path, f"is encoded as {UNBOUNDED_ENCODING}: write it with dictionaries")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(header["schema"])))
    except (OSError, pa.ArrowException) as error:
        raise TraceError(path, NOT_PARQUET) from error
    return schema, int(header["num_rows"])


def _read_batches(child: subprocess.Popen[bytes], path: Path) -> Iterator[pa.RecordBatch]:
    try:
        with pa.ipc.open_stream(_pipe(child)) as stream:
            yield from stream
    except (OSError, pa.ArrowException) as error:
        raise _death_error(child, path) from error
    if child.wait():
        raise _death_error(child, path)


def _death_error(child: subprocess.Popen[bytes], path: Path) -> TraceError:
    reasons = {
        OUT_OF_MEMORY: f"needs more than {MEMORY_BYTES >> 20} MiB of memory to read",
        LONG_TEXTS: f"has more than {MAX_TEXT_BYTES >> 20} MiB of different texts",
    }
    return TraceError(path, reasons.get(child.wait(), NOT_PARQUET))


class _LongTextsError(Exception):
    """The texts of a batch are too long."""


def main() -> int:
    """Write the columns of the file of descriptor argv[1] to stdout; return an exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from pyarrow import parquet

    try:
        with os.fdopen(int(sys.argv[1]), "rb") as opened:
            declared = parquet.ParquetFile(opened)
            if not _write_header(declared, sys.stdout.buffer):
                return 0
            file = parquet.ParquetFile(
                opened,
                metadata=declared.metadata,
                read_dictionary=[TEXT_COLUMN],
                buffer_size=BUFFER_BYTES,
            )
            batches = file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[*COLUMNS])
            _write_batches(batches, sys.stdout.buffer)
    except MemoryError:
        return OUT_OF_MEMORY
    except _LongTextsError:
        return LONG_TEXTS
    except BrokenPipeError:
        return 0
    except (OSError, ValueError, pa.ArrowException):
        return DAMAGED
    return 0


def _write_header(file: parquet.ParquetFile, out: IO[bytes]) -> bool:
    """Write what the file declares; return whether it has the wanted columns."""
    metadata, schema = file.metadata, file.schema_arrow
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if metadata.num_rows != sum(group.num_rows for group in groups):
        raise ValueError("the numbers of rows contradict each other")
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    header = {
        "schema": schema.serialize().to_pybytes().hex(),
        "num_rows": metadata.num_rows,
        "has_unbounded_text": any(
            UNBOUNDED_ENCODING in chunk.encodings
            for chunk in chunks
            if chunk.path_in_schema in COLUMNS
        ),
    }
    data = json.dumps(header).encode()
    out.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    out.flush()
    return all(schema.names.count(name) == 1 for name in COLUMNS)


def _write_batches(batches: Iterator[pa.RecordBatch], out: Any) -> None:  # noqa: ANN401
    first = next(batches, None)
    if first is None:
        return
    with pa.ipc.new_stream(out, first.schema) as stream:
        for batch in itertools.chain([first], batches):
            column: Any = batch.column(TEXT_COLUMN)
            if pa.types.is_dictionary(column.type) and column.dictionary.nbytes > MAX_TEXT_BYTES:
                raise _LongTextsError
            stream.write_batch(batch)


if __name__ == "__main__":
    sys.exit(main())
