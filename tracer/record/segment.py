"""One segment: a mapped file of fixed-size records, and the claim on its rows."""

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
"""Where `IDENTITY` holds the lane, which is known only once a lane takes the segment."""

LANE = struct.Struct("<I")
PAGE_BYTES = 4096

MIN_SEGMENT_BYTES = HEADER_BYTES + RECORD_BYTES


class Segment:
    """A mapped segment file that one lane writes."""

    __slots__ = ("buffer", "capacity", "number", "open_slots", "path", "rows")

    def __init__(self, path: Path, identity: SpoolIdentity) -> None:
        num_bytes = HEADER_BYTES + identity.capacity * RECORD_BYTES
        self.path = path
        self.number = identity.segment
        self.capacity = identity.capacity
        self.buffer: mmap.mmap | bytearray = map_file(path, num_bytes)
        self.buffer[:HEADER_BYTES] = pack_header(identity, magic=SEGMENT_MAGIC)
        # One C call takes a row, so neither another thread nor a signal handler can get it too.
        self.rows: Iterator[int] = numbers(HEADER_BYTES, num_bytes, RECORD_BYTES)
        """Where the rows not yet claimed begin, in bytes; who takes one has claimed it."""

        self.open_slots: deque[int] = deque(
            range(OPEN_TABLE_OFFSET, HEADER_BYTES, OPEN_ENTRY_BYTES)
        )
        """Where the free lines of the open table begin, in bytes."""

    @property
    def num_pages(self) -> int:
        """Whole pages, for `fault_in`."""
        return len(self.buffer) // PAGE_BYTES

    def fault_in(self, page: int) -> None:
        """Touch one page, so that the training thread does not pay for its first write."""
        self.buffer[page * PAGE_BYTES] = self.buffer[page * PAGE_BYTES]

    def assign_to(self, lane: int) -> None:
        """Note which lane writes here."""
        LANE.pack_into(self.buffer, LANE_OFFSET, lane)

    def num_claimed(self) -> int:
        """Return how many rows were taken."""
        return self.capacity - length_hint(self.rows)

    def seal(self) -> None:
        """Say that the lane has moved on; what is claimed and not committed never will be."""
        SEALED.pack_into(self.buffer, SEALED_OFFSET, 1 + self.num_claimed())

    def detach(self) -> None:
        """Write to private memory from now on: after a fork the file is the parent's alone."""
        self.buffer = private_memory(HEADER_BYTES + self.capacity * RECORD_BYTES)


def segment_capacity(num_bytes: int) -> int:
    """Return how many records a segment file of at most ``num_bytes`` holds, one at least."""
    return max(1, (num_bytes - HEADER_BYTES) // RECORD_BYTES)


class NoSegment(Segment):
    """What a lane writes to before its first segment and after its last: nothing fits."""

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
