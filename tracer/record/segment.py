"""A segment: a mapped file of fixed-size records whose rows are claimed one by one."""

from __future__ import annotations

import struct
from collections import deque
from operator import length_hint
from typing import TYPE_CHECKING

from ..native.choice import numbers
from ..spool import (
    HEADER_BYTES,
    OPEN_ENTRY_BYTES,
    OPEN_TABLE_OFFSET,
    RECORD_BYTES,
    SEALED,
    SEALED_OFFSET,
    SEGMENT_MAGIC,
    SpoolIdentity,
    pack_header,
)
from .process_file import map_file, private_memory

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator
    from pathlib import Path

LANE_OFFSET = struct.calcsize("<8sIIIII")
"""Offset of the lane in `IDENTITY`; it is written when a lane takes the segment."""

LANE = struct.Struct("<I")
PAGE_BYTES = 4096

MIN_SEGMENT_BYTES = HEADER_BYTES + RECORD_BYTES


class Segment:
    """A mapped segment file. One lane writes to it."""

    __slots__ = ("buffer", "capacity", "number", "open_slots", "path", "rows")

    def __init__(self, path: Path, identity: SpoolIdentity) -> None:
        num_bytes = HEADER_BYTES + identity.capacity * RECORD_BYTES
        self.path = path
        self.number = identity.segment
        self.capacity = identity.capacity
        self.buffer: mmap.mmap | bytearray = map_file(path, num_bytes)
        self.buffer[:HEADER_BYTES] = pack_header(identity, magic=SEGMENT_MAGIC)
        # Taking a row is one C call, so no other thread or signal handler gets the same row.
        self.rows: Iterator[int] = numbers(HEADER_BYTES, num_bytes, RECORD_BYTES)
        """Offsets of the rows not yet claimed, in bytes; taking one claims the row."""

        self.open_slots: deque[int] = deque(
            range(OPEN_TABLE_OFFSET, HEADER_BYTES, OPEN_ENTRY_BYTES)
        )
        """Offsets of the free entries of the open table, in bytes."""

    @property
    def num_pages(self) -> int:
        """Number of whole pages."""
        return len(self.buffer) // PAGE_BYTES

    def fault_in(self, page: int) -> None:
        """Touch one page, so that no training thread takes the page fault."""
        self.buffer[page * PAGE_BYTES] = self.buffer[page * PAGE_BYTES]

    def assign_to(self, lane: int) -> None:
        """Write the number of the lane into the header."""
        LANE.pack_into(self.buffer, LANE_OFFSET, lane)

    def num_claimed(self) -> int:
        """Return the number of claimed rows."""
        return self.capacity - length_hint(self.rows)

    def seal(self) -> None:
        """Mark the segment as finished: a row that is claimed but not committed is torn."""
        SEALED.pack_into(self.buffer, SEALED_OFFSET, 1 + self.num_claimed())

    def detach(self) -> None:
        """Write to private memory from now on: after a fork the file belongs to the parent."""
        self.buffer = private_memory(HEADER_BYTES + self.capacity * RECORD_BYTES)


def segment_capacity(num_bytes: int) -> int:
    """Return the number of records in a segment file of at most ``num_bytes``, at least 1."""
    return max(1, (num_bytes - HEADER_BYTES) // RECORD_BYTES)


class NoSegment(Segment):
    """The segment of a lane before its first and after its last one: it has no rows."""

    __slots__ = ()

    def __init__(self) -> None:
        self.number = -1
        self.capacity = 0
        self.buffer = bytearray(HEADER_BYTES)
        self.rows = iter(())
        self.open_slots = deque()

    def seal(self) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""


NO_SEGMENT = NoSegment()
