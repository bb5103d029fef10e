"""Open spans and communications of each rank, read from its files: for hangs and after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..span import KINDS, NONE, NS_PER_S, SpanKind
from ..spool import (
    EXIT_FILE,
    GROUPS_FILE,
    HEADER_BYTES,
    OPEN_CAPACITY,
    OPEN_ENTRY,
    OPEN_ENTRY_BYTES,
    OPEN_TABLE_OFFSET,
    PROCESS_FILE,
    SEGMENT_GLOB,
    SEGMENT_MAGIC,
    SpoolError,
    open_regular_file,
    read_header,
    read_names,
    read_regular_file,
)
from .identity import read_boot_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_FILE_BYTES = 64 << 20
"""A longer file is skipped: the names of a process take some MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An open top-level span or communication."""

    rank: int
    pid: int
    name: str
    kind: SpanKind
    step: int
    group_id: int
    group_name: str
    """"" if the span is no communication, or its group is unknown."""

    seq: int
    start_monotonic_ns: int
    since_ns: int | None
    """How long it has lasted; None if it ran on another boot of this host or on another host."""


def read_running(spool: Path, *, now_monotonic_ns: int | None = None) -> list[Running]:
    """Return what is open in every process without an exit record, by rank, longest first.

    A killed process has no exit record either, so its last open spans are returned too. Nothing
    waits for a process.

    Args:
        spool: A spool, the folder of a run in it, or that of a process.
        now_monotonic_ns: ``CLOCK_MONOTONIC`` of this host; if None, now.
    """
    now_ns = time.monotonic_ns() if now_monotonic_ns is None else now_monotonic_ns
    entries = [
        entry
        for file in sorted(spool.rglob(PROCESS_FILE))
        if not (file.parent / EXIT_FILE).exists()
        for entry in _of_process(file.parent, now_ns)
    ]
    return sorted(entries, key=lambda entry: (entry.rank, entry.start_monotonic_ns))


def format_running(entry: Running) -> str:
    """Return what is open in one line, without control codes: other users may write the files."""
    since_ns = entry.since_ns
    duration = "an unknown time" if since_ns is None else f"{since_ns / NS_PER_S:.1f} s"
    where = "" if entry.step == NONE else f"  step {entry.step}"
    name = entry.group_name or f"{entry.group_id:016x}"
    group = f"  {name if name.isprintable() else repr(name)}" if entry.group_id else ""
    seq = f" seq {entry.seq}" if entry.group_id and entry.seq != NONE else ""
    return (
        f"rank {entry.rank}  pid {entry.pid}  {entry.kind} {entry.name!r}"
        f"{group}{seq}{where}  open for {duration}"
    )


def _of_process(folder: Path, now_ns: int) -> Iterator[Running]:
    try:
        names = read_names(read_regular_file(folder / PROCESS_FILE, max_bytes=MAX_FILE_BYTES))
    except OSError:
        return
    groups = _group_names(folder)
    boot_id = read_boot_id()
    for path in sorted(folder.glob(SEGMENT_GLOB)):
        with (
            contextlib.suppress(OSError, SpoolError),
            os.fdopen(open_regular_file(path), "rb") as file,
        ):
            header = file.read(HEADER_BYTES)
            identity = read_header(header, magic=SEGMENT_MAGIC, path=path)
            is_here = identity.boot_id == boot_id and any(boot_id)
            for entry in _entries(header):
                start_ns, group_id, seq, name_id, step, kind, _, _ = entry
                yield Running(
                    rank=identity.rank,
                    pid=identity.pid,
                    name=names.get(name_id, ""),
                    kind=KINDS[kind] if kind < len(KINDS) else SpanKind.OTHER,
                    step=step,
                    group_id=group_id,
                    group_name=groups.get(group_id, ""),
                    seq=seq,
                    start_monotonic_ns=start_ns,
                    since_ns=now_ns - start_ns if is_here else None,
                )


def _entries(header: bytes) -> Iterator[tuple[int, ...]]:
    for slot in range(OPEN_CAPACITY):
        entry = OPEN_ENTRY.unpack_from(header, OPEN_TABLE_OFFSET + slot * OPEN_ENTRY_BYTES)
        if entry[0] and entry[0] == entry[-1]:
            yield entry


def _group_names(folder: Path) -> dict[int, str]:
    names = {}
    with contextlib.suppress(OSError):
        for text in read_regular_file(folder / GROUPS_FILE, max_bytes=MAX_FILE_BYTES).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                names[int(line["group_id"], 16)] = str(line["name"])
    return names
