"""Hand a decoded batch from one process to another through memory that both see.

The receiver maps what the sender wrote; nothing is copied. The memory is sealed: whoever
wrote it can neither shrink it (a reader would die of SIGBUS) nor change it any more.
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


def new_memory(name: str) -> int:
    """Return the descriptor of empty memory that can be sealed and passed on."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(descriptor: int) -> None:
    """Let nobody change the memory any more."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)


def mapped(descriptor: int) -> pa.Buffer:
    """Return sealed memory, mapped for reading; the descriptor may be closed afterwards.

    Raises:
        ValueError: It is not sealed, or empty.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("the memory is not sealed")
    view: Any = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    return pa.py_buffer(view)


def write_batch(descriptor: int, batch: CutBatch) -> list[int]:
    """Write a batch; return where each of its parts ends.

    Args:
        descriptor: Empty memory; sealed afterwards.
        batch: What to hand over.
    """
    ends: list[int] = []
    with (
        os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file,
        pa.PythonFile(file, mode="w") as sink,
    ):
        for part in (_key_table(batch), *(batch.tables[table] for table in TABLES)):
            with pa.ipc.new_stream(sink, part.schema) as stream:
                stream.write_table(part.unify_dictionaries().combine_chunks())
            ends.append(sink.tell())
    seal(descriptor)
    return ends


def read_batch(
    memory: pa.Buffer, ends: Sequence[int], *, unknown_columns: Sequence[str]
) -> CutBatch:
    """Return the batch that `write_batch` wrote; its columns are the memory itself.

    Raises:
        pa.ArrowException: It is no such batch.
        ValueError: As above.
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
