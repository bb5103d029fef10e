"""Handover of a decoded batch to another process through shared memory.

The receiver maps what the sender wrote; nothing is copied. The memory is sealed: the sender can no
longer shrink it (a reader would die of SIGBUS) or change it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ..arrow_columns import numbers, strings, to_numpy
from ..spool.cut import CutKey
from ..wire.codec import TABLES, CutBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
KEY_FIELDS = ("run_id", "epoch", "rank", "process", "segment", "first_row", "end_row")


def create_memory(name: str) -> int:
    """Return the descriptor of empty memory that can be sealed and passed on."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(descriptor: int) -> None:
    """Make the memory unchangeable."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)


def map_memory(descriptor: int) -> pa.Buffer:
    """Map sealed memory for reading. The descriptor may be closed afterwards.

    Raises:
        ValueError: The memory is not sealed, or empty.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("the memory is not sealed")
    view: Any = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    return pa.py_buffer(view)


def write_batch(descriptor: int, batch: CutBatch) -> list[int]:
    """Write a batch and seal the memory; return the end offset of each of its tables.

    Args:
        descriptor: Empty memory.
        batch: The batch.
    """
    ends: list[int] = []
    with (
        os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file,
        pa.PythonFile(file, mode="w") as sink,
    ):
        for table in (_key_table(batch), *(batch.tables[name] for name in TABLES)):
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table.unify_dictionaries().combine_chunks())
            ends.append(sink.tell())
    seal(descriptor)
    return ends


def read_batch(
    memory: pa.Buffer, ends: Sequence[int], *, unknown_columns: Sequence[str]
) -> CutBatch:
    """Return the batch that `write_batch` wrote, without a copy of its columns.

    Args:
        memory: The mapped memory.
        ends: What `write_batch` returned.
        unknown_columns: Columns of the body that this version does not know.

    Raises:
        pa.ArrowException: The memory holds no such batch.
        ValueError: Likewise.
    """
    parts: list[pa.Table] = []
    begin = 0
    for end in ends:
        part = pa.ipc.open_stream(memory.slice(begin, end - begin)).read_all()
        part.validate()
        parts.append(part)
        begin = end
    keys, *tables = parts
    columns: dict[str, list[Any]] = {
        name: keys[name].to_pylist() for name in (*KEY_FIELDS, "sha256", "num_torn")
    }
    return CutBatch(
        keys=tuple(
            CutKey(**dict(zip(KEY_FIELDS, row, strict=True)))
            for row in zip(*(columns[name] for name in KEY_FIELDS), strict=True)
        ),
        sha256=tuple(columns["sha256"]),
        num_torn=tuple(columns["num_torn"]),
        tables=dict(zip(TABLES, tables, strict=True)),
        offsets={
            table: np.concatenate([[0], np.cumsum(to_numpy(keys[table]))]).astype(np.int64)
            for table in TABLES
        },
        unknown_columns=tuple(unknown_columns),
    )


def _key_table(batch: CutBatch) -> pa.Table:
    """Return a table with a row per cut: its key, and its number of rows in each table."""
    keys = batch.keys
    named: dict[str, Any] = {
        "run_id": strings([key.run_id for key in keys]),
        "epoch": numbers(np.array([key.epoch for key in keys], dtype=np.int32)),
        "rank": numbers(np.array([key.rank for key in keys], dtype=np.int32)),
        "process": strings([key.process for key in keys]),
        "segment": numbers(np.array([key.segment for key in keys], dtype=np.uint64)),
        "first_row": numbers(np.array([key.first_row for key in keys], dtype=np.uint32)),
        "end_row": numbers(np.array([key.end_row for key in keys], dtype=np.uint32)),
        "sha256": strings(batch.sha256),
        "num_torn": numbers(np.array(batch.num_torn, dtype=np.uint32)),
    }
    for table in TABLES:
        named[table] = numbers(np.diff(batch.offsets[table]).astype(np.int64))
    return pa.Table.from_arrays(list(named.values()), names=list(named))
