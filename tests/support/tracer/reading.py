"""Rows of a spool, read through the contract modules only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.span import KINDS, SpanFlag, SpanKind, unpack_kinds
from rankscope.tracer.spool import (
    COMM,
    COMM_OFFSET,
    CORE,
    HAS_COMM,
    HEADER_BYTES,
    KEPT_REASONS,
    OPEN_CAPACITY,
    OPEN_COMM,
    OPEN_COMM_OFFSET,
    OPEN_ENTRY,
    OPEN_ENTRY_BYTES,
    OPEN_TABLE_OFFSET,
    PROCESS_FILE,
    PROCESS_MAGIC,
    SEGMENT_GLOB,
    STEP,
    DropReason,
    RecordType,
    iter_committed,
    read_dropped,
    read_header,
    read_names,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    record: RecordType
    kind: str
    name: str
    flags: SpanFlag
    start_ns: int
    duration_ns: int
    step: int
    microbatch: int
    chunk: int
    track: str
    depth: int
    group_id: int = 0
    seq: int = -1
    src_rank: int = -1
    dst_rank: int = -1
    num_bytes: int = -1
    interval_id: int = 0
    second: bytes = b""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


def process_folders(spool: Path) -> dict[int, Path]:
    """Return the folder of each rank below a run's folder or a spool with one run."""
    folders = {}
    for manifest in sorted(spool.rglob("manifest.json")):
        folders[json.loads(manifest.read_text())["rank"]] = manifest.parent
    return folders


def only_folder(spool: Path) -> Path:
    """Return the folder of the one process that recorded."""
    (folder,) = process_folders(spool).values()
    return folder


def read_rows(folder: Path) -> list[Row]:
    """Return all committed records of a process folder, by start."""
    records = [
        record
        for path in sorted(folder.glob(SEGMENT_GLOB))
        for _, record in iter_committed(path.read_bytes())
    ]
    # Read last: a process that still runs names a new span before it records it.
    names = read_names((folder / PROCESS_FILE).read_bytes())
    rows = [_row(record, names) for record in records]
    return sorted(rows, key=lambda row: (row.start_ns, -row.duration_ns))


def read_spans(folder: Path) -> list[Row]:
    """Return all spans except garbage collector pauses, which occur at any time."""
    rows = read_rows(folder)
    return [row for row in rows if row.record == RecordType.SPAN and row.kind != SpanKind.GC]


def missing_kinds(folder: Path) -> list[set[str]]:
    """Return the kinds that each step record lists as not recorded."""
    steps = [row for row in read_rows(folder) if row.record == RecordType.STEP]
    masks = [STEP.unpack(row.second)[3] for row in sorted(steps, key=lambda row: row.step)]
    return [set(unpack_kinds(mask)) for mask in masks]


def dropped(folder: Path) -> dict[DropReason, int]:
    data = (folder / PROCESS_FILE).read_bytes()
    read_header(data, magic=PROCESS_MAGIC, path=folder)
    return read_dropped(data)


def count_dropped(folder: Path) -> int:
    """Return how many records the process dropped, for all reasons except `KEPT_REASONS`."""
    return sum(num for reason, num in dropped(folder).items() if reason not in KEPT_REASONS)


def open_names(folder: Path) -> list[str]:
    """Return the names of all entries in the open tables."""
    entries = [OPEN_ENTRY.unpack_from(data, at) for data, at in _open_slots(folder)]
    names = read_names((folder / PROCESS_FILE).read_bytes())
    return [names[entry[3]] for entry in entries if entry[0] == entry[-1]]


def open_comms(folder: Path) -> list[tuple[int, int, int]]:
    """Return the bytes and sides in all entries in the open tables."""
    return [OPEN_COMM.unpack_from(data, at + OPEN_COMM_OFFSET) for data, at in _open_slots(folder)]


def _open_slots(folder: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the segment and the offset of each slot in use; a segment may be without them yet."""
    for path in sorted(folder.glob(SEGMENT_GLOB)):
        data = path.read_bytes()
        for slot in range(OPEN_CAPACITY if len(data) >= HEADER_BYTES else 0):
            at = OPEN_TABLE_OFFSET + slot * OPEN_ENTRY_BYTES
            if OPEN_ENTRY.unpack_from(data, at)[0]:
                yield data, at


def _row(record: bytes, names: dict[int, str]) -> Row:
    core = CORE.unpack_from(record)
    comm = COMM.unpack_from(record, COMM_OFFSET) if core[2] & HAS_COMM else (0, -1, -1, -1, -1, 0)
    return Row(
        record=RecordType(core[0]),
        kind=KINDS[core[1]],
        flags=SpanFlag(core[2] & ~HAS_COMM),
        name=names[core[3]],
        step=core[4],
        microbatch=core[5],
        chunk=core[6],
        track=names[core[7]],
        start_ns=core[8],
        duration_ns=core[9] - core[8],
        depth=core[10],
        group_id=comm[0],
        seq=comm[1],
        src_rank=comm[2],
        dst_rank=comm[3],
        num_bytes=comm[4],
        interval_id=comm[5],
        second=record[COMM_OFFSET:],
    )
