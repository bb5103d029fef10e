"""Reader of one segment file, while its lane may still write it."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.spool import (
    HEADER_BYTES,
    OPEN_CAPACITY,
    OPEN_COMM,
    OPEN_COMM_OFFSET,
    OPEN_ENTRY,
    OPEN_ENTRY_BYTES,
    OPEN_TABLE_OFFSET,
    RECORD_BYTES,
    SEGMENT_MAGIC,
    NotASpoolError,
    SpoolError,
    read_header,
    sealed_rows,
)

from .folder import open_spool_file, segment_paths
from .records import RECORD

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from rankscope.tracer.spool import SpoolIdentity

CHUNK_ROWS = 65_536
"""Largest number of rows of one reading: 8 MiB."""

REREAD_NS = 2_000_000
"""Least time between two readings of the newest row of a live segment that must agree."""

MAX_FIRST_SEGMENTS = 8
"""Segments in which the first step is looked for: more than a process has recording threads."""

FIRST_READ_ROWS = 512
"""Rows read first; a live segment rarely has more new ones."""


class NotReadyError(Exception):
    """The file exists and its header is not written yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A range of rows, ``first_row`` up to ``end_row``, none of which will change."""

    first_row: int
    end_row: int
    data: bytes
    """Bytes of all records, torn ones included."""

    rows: NDArray[np.uint32]
    """Row number of each committed record."""

    @property
    def records(self) -> NDArray[np.void]:
        """The committed records, shape (rows,)."""
        everything = np.frombuffer(self.data, dtype=RECORD)
        if len(self.rows) == len(everything):
            return everything
        return everything[self.rows - self.first_row]

    @property
    def num_torn(self) -> int:
        """Number of rows that were claimed and never committed."""
        return self.end_row - self.first_row - len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSpan:
    """An entry of a segment's open table: a span that has begun and not ended."""

    start_ns: int
    group_id: int
    seq: int
    name_id: int
    step: int
    kind: int
    num_bytes: int
    """0: none, or unknown."""

    sides: tuple[int, int] | None
    """Source and destination of a p2p; None: of none, or unknown."""


class SegmentReader:
    """A cursor over one segment file.

    Reads with `pread`, not through a memory map: if a mapped file is cut short, its reader is
    killed with SIGBUS.
    """

    def __init__(self, path: Path, *, grace_ns: int, chunk_rows: int = CHUNK_ROWS) -> None:
        self.path = path
        self.next_row = 0
        self.is_finished = False
        self.is_idle = False
        """True if the last reading found no row that is final or may become so."""

        self._grace_ns = grace_ns
        self._chunk_rows = chunk_rows
        self._gaps: dict[int, int] = {}
        self._last_seen: tuple[int, bytes, int] | None = None
        self._descriptor = open_spool_file(path)
        self.inode = os.fstat(self._descriptor).st_ino
        try:
            identity = _identity(self._header(), path)
        except BaseException:
            self.close()
            raise
        self.identity = identity
        self.number = identity.segment
        self.capacity = identity.capacity

    def read(self, *, now_ns: int, has_ended: bool) -> Reading | None:
        """Return the final rows from the cursor on; None if there are none.

        A row is final if a later row is committed, if two readings of it agree (on Arm, its
        stores may become visible out of order), or if the process has ended. A row that is not
        committed is skipped as torn after the grace time, or at once if the process has ended.
        The cursor moves with `advance` only.

        Args:
            now_ns: Current time of a monotonic clock.
            has_ended: Whether the process can't write any more.
        """
        sealed = sealed_rows(self._header())
        end = min(sealed, self.capacity) if sealed is not None else self.capacity
        data, is_committed = self._read_ahead(end)
        num_final = self._count_final(
            data, is_committed, now_ns=now_ns, has_ended=has_ended, is_sealed=sealed is not None
        )
        self.is_idle = not num_final and not is_committed.any() and not self._gaps
        if not num_final:
            self.is_finished = has_ended or (sealed is not None and self.next_row >= end)
            return None
        rows = self.next_row + np.flatnonzero(is_committed[:num_final])
        return Reading(
            first_row=self.next_row,
            end_row=self.next_row + num_final,
            data=data[: num_final * RECORD_BYTES],
            rows=rows.astype(np.uint32),
        )

    @property
    def num_cut_off(self) -> int | None:
        """Rows that were claimed behind the file's end; None if the file ends too early and how
        many there were is unknown.
        """
        size = os.fstat(self._descriptor).st_size
        if size >= HEADER_BYTES + self.capacity * RECORD_BYTES:
            return 0
        sealed = sealed_rows(self._header())
        if sealed is None:
            return None
        held = max(size - HEADER_BYTES, 0) // RECORD_BYTES
        return max(0, min(sealed, self.capacity) - held)

    @property
    def is_exhausted(self) -> bool:
        """True if the segment is sealed and the cursor is behind its last row."""
        sealed = sealed_rows(self._header())
        return sealed is not None and self.next_row >= min(sealed, self.capacity)

    def end_row_if_final(self, *, has_ended: bool) -> int | None:
        """Return the row after the last one; None if the segment may still be written.

        Args:
            has_ended: Whether the process can't write any more.
        """
        sealed = sealed_rows(self._header())
        if sealed is not None:
            return min(sealed, self.capacity)
        return _count_written(self._rows(0, self.capacity)) if has_ended else None

    def reread(self, first_row: int, end_row: int) -> Reading:
        """Return the rows of a cut that was sent before."""
        data = self._rows(first_row, end_row)
        rows = first_row + np.flatnonzero(_committed(data, first_row=first_row))
        return Reading(first_row=first_row, end_row=end_row, data=data, rows=rows.astype(np.uint32))

    def extended(self, reading: Reading, *, now_ns: int) -> Reading:
        """Return a reading with the row after its last one, if two readings of that row agree.

        Args:
            now_ns: As for `read`, but later.
        """
        row = reading.end_row
        if self._last_seen is None or self._last_seen[0] != row:
            return reading
        record = self._rows(row, row + 1)
        if not self._agrees(row, record, now_ns=now_ns):
            return reading
        rows = np.append(reading.rows, np.uint32(row))
        return replace(reading, end_row=row + 1, data=reading.data + record, rows=rows)

    def advance(self, end_row: int) -> None:
        """Move the cursor past stored rows."""
        self.next_row = max(self.next_row, end_row)
        self._gaps = {row: seen for row, seen in self._gaps.items() if row >= self.next_row}

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _count_final(
        self,
        data: bytes,
        is_committed: NDArray[np.bool_],
        *,
        now_ns: int,
        has_ended: bool,
        is_sealed: bool,
    ) -> int:
        committed = np.flatnonzero(is_committed)
        num_seen = int(committed[-1]) + 1 if len(committed) else 0
        if has_ended:
            return len(is_committed) if is_sealed else max(num_seen, _count_written(data))
        num_claimed = len(is_committed) if is_sealed else num_seen
        for gap in np.flatnonzero(~is_committed[:num_claimed]).tolist():
            first_seen_ns = self._gaps.setdefault(self.next_row + gap, now_ns)
            if now_ns - first_seen_ns < self._grace_ns:
                num_claimed = gap
                break
        if is_sealed or not num_claimed or num_claimed < num_seen:
            return num_claimed
        last = data[(num_claimed - 1) * RECORD_BYTES : num_claimed * RECORD_BYTES]
        is_stable = self._agrees(self.next_row + num_claimed - 1, last, now_ns=now_ns)
        return num_claimed if is_stable else num_claimed - 1

    def _agrees(self, row: int, record: bytes, *, now_ns: int) -> bool:
        """Return whether an earlier reading of this row had the same bytes; else keep this one."""
        seen = self._last_seen
        if seen is None or seen[:2] != (row, record):
            self._last_seen = (row, record, now_ns)
            return False
        return now_ns - seen[2] >= REREAD_NS

    def _read_ahead(self, end: int) -> tuple[bytes, NDArray[np.bool_]]:
        """Return the rows from the cursor on that may be new, and which of them are committed."""
        num_rows = min(FIRST_READ_ROWS, self._chunk_rows)
        while True:
            data = self._rows(self.next_row, min(end, self.next_row + num_rows))
            is_committed = _committed(data, first_row=self.next_row)
            is_all = len(is_committed) < num_rows or num_rows >= self._chunk_rows
            if is_all or not is_committed[num_rows // 2 :].any():
                return data, is_committed
            num_rows = min(num_rows * 16, self._chunk_rows)

    def _header(self) -> bytes:
        return os.pread(self._descriptor, HEADER_BYTES, 0)

    def _rows(self, first: int, end: int) -> bytes:
        """Return whole records; fewer than requested if the file is shorter."""
        data = os.pread(
            self._descriptor,
            max(end - first, 0) * RECORD_BYTES,
            HEADER_BYTES + first * RECORD_BYTES,
        )
        return data[: len(data) - len(data) % RECORD_BYTES]


def _identity(header: bytes, path: Path) -> SpoolIdentity:
    if not any(header):
        raise NotReadyError(path)
    identity = read_header(header, magic=SEGMENT_MAGIC, path=path)
    if identity.record_bytes != RECORD_BYTES or identity.header_bytes != HEADER_BYTES:
        raise NotASpoolError(
            f"{path} has a header of {identity.header_bytes} bytes and records of"
            f" {identity.record_bytes}, expected {HEADER_BYTES} and {RECORD_BYTES}: it has another"
            " layout"
        )
    return identity


def read_first_step(folder: Path) -> int | None:
    """Return the first step that a process recorded or is in; None if there is none yet.

    Its first segments are read, of which each lane has at least one.
    """
    steps: list[int] = []
    try:
        paths = segment_paths(folder)[:MAX_FIRST_SEGMENTS]
    except OSError:
        return None
    for path in paths:
        try:
            reader = SegmentReader(path, grace_ns=0)
        except (OSError, SpoolError, NotReadyError):
            continue
        with closing(reader):
            steps += reader.reread(0, CHUNK_ROWS).records["step"].tolist()
        steps += [span.step for span in read_open_spans(path)]
    return min((step for step in steps if step >= 0), default=None)


def read_open_spans(path: Path) -> list[OpenSpan]:
    """Return the entries of a segment's open table.

    An empty list if the file can't be read or is of another version, whose table may differ.
    """
    try:
        with os.fdopen(open_spool_file(path), "rb") as file:
            header = file.read(HEADER_BYTES)
        read_header(header, magic=SEGMENT_MAGIC, path=path)
    except (OSError, SpoolError):
        return []
    spans = []
    for slot in range(OPEN_CAPACITY):
        at = OPEN_TABLE_OFFSET + slot * OPEN_ENTRY_BYTES
        num_bytes, *sides = OPEN_COMM.unpack_from(header, at + OPEN_COMM_OFFSET)
        entry = OPEN_ENTRY.unpack_from(header, at)
        start_ns, group_id, seq, name_id, step, kind, _depth, check = entry
        if start_ns and check == start_ns:
            spans.append(
                OpenSpan(
                    start_ns=start_ns,
                    group_id=group_id,
                    seq=seq,
                    name_id=name_id,
                    step=step,
                    kind=kind,
                    num_bytes=num_bytes,
                    sides=None if sides[0] == sides[1] else (sides[0], sides[1]),
                )
            )
    return spans


def _committed(data: bytes, *, first_row: int) -> NDArray[np.bool_]:
    """Return which records are committed: their commit word is the row's offset in the file."""
    commit = np.frombuffer(data, dtype=RECORD)["commit"]
    rows = np.arange(first_row, first_row + len(commit), dtype=np.uint64)
    offsets = rows * np.uint64(RECORD_BYTES) + np.uint64(HEADER_BYTES)
    is_committed: NDArray[np.bool_] = commit == offsets
    return is_committed


def _count_written(data: bytes) -> int:
    """Return the number of rows up to the last one that is not all zero."""
    return -(-len(data.rstrip(b"\0")) // RECORD_BYTES)
