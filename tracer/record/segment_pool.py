"""The pool of segments, which are allocated, mapped and faulted in before a lane needs them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import TYPE_CHECKING

from ..spool import HEADER_BYTES, RECORD_BYTES, DropReason, SpoolIdentity
from .segment import MIN_SEGMENT_BYTES, Segment, segment_capacity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .process_file import ProcessFile

DEFAULT_SEGMENT_BYTES = 8 << 20
DEFAULT_SPOOL_BYTES = 256 << 20
STARTER_BYTES = 16 << 10
"""Size of a starter, the small segment for a lane's first 96 records.

Making one takes 0.1 ms, a whole segment about 20 ms, and several threads may begin at any time.
"""

STARTER_RECORDS = segment_capacity(STARTER_BYTES)

NUM_STARTERS = 4
"""Number of threads that may begin at the same moment without losing a record.

A lane whose segment is full while no whole segment is ready continues in a starter too.
"""

MIN_BUDGET_IN_STARTERS = 64
"""If the spool limit is less than this many starters, lanes begin in whole segments."""

RETRY_AFTER_NS = 2_000_000_000
"""Backoff after the disk has refused a segment: an attempt takes 0.3 ms of CPU time."""

PAGES_AT_ONCE = 32
"""Pages faulted in, about 0.15 ms, before a training thread that waits for the GIL goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolLimits:
    """Limits of the disk space of one process."""

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    spool_bytes: int = DEFAULT_SPOOL_BYTES
    """Limit of all segments of the process that are on the disk."""

    def __post_init__(self) -> None:
        if self.segment_bytes < MIN_SEGMENT_BYTES:
            raise ValueError(
                f"SpoolLimits.segment_bytes must be at least {MIN_SEGMENT_BYTES},"
                f" got {self.segment_bytes}"
            )
        if self.spool_bytes < 0:
            raise ValueError(
                f"SpoolLimits.spool_bytes must not be negative, got {self.spool_bytes}"
            )


class SegmentPool:
    """The segments of a process that no lane has taken yet."""

    def __init__(
        self,
        folder: Path,
        identity: SpoolIdentity,
        limits: SpoolLimits,
        *,
        process: ProcessFile,
        on_full: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._limits = limits
        self._numbers = itertools.count()
        self.spares: deque[Segment] = deque()
        """The segments that are ready: whole ones on the left, starters on the right."""

        self._has_starters = (
            segment_capacity(limits.segment_bytes) > STARTER_RECORDS
            and limits.spool_bytes >= MIN_BUDGET_IN_STARTERS * STARTER_BYTES
        )
        self._process = process
        self._retired: deque[Segment] = deque()
        self._on_disk: list[tuple[Path, int]] = []
        self._closed = False
        self._retry_at_ns = 0
        self._on_full: Callable[[str], None] | None = on_full
        self.drops = process.drops[DropReason.NO_SEGMENT]
        """Counts the records dropped when `take` returns None: not ready in time, or disk full."""

    def take_starter(self) -> Segment | None:
        """Return a starter for a new lane; None if none is ready."""
        with contextlib.suppress(IndexError):
            return self.spares.pop() if self._num_starters() else None
        return None

    def take(self) -> Segment | None:
        """Return a ready segment, a whole one if possible; None if none is (see `drops`).

        Does no I/O.
        """
        try:
            return self.spares.popleft()
        except IndexError:
            return None

    def retire(self, segment: Segment) -> None:
        """Keep a sealed segment for `unmap_retired`: a training thread must not unmap it."""
        self._retired.append(segment)

    def unmap_retired(self) -> None:
        """Unmap the retired segments. Never call it on a training thread."""
        self._retired.clear()

    def needs_segments(self) -> bool:
        """Return whether `replenish` would make segments."""
        is_missing = not self._has_whole() or self._needs_starter()
        return is_missing and not self._closed and not self._is_waiting_to_retry()

    def replenish(self) -> None:
        """Make the missing segments. Does file I/O: never call it on a training thread."""
        self._prepare_starters()
        if not self._has_whole():
            self.prepare_spare()

    def prepare_spare(self) -> None:
        """Make one more spare. Does file I/O: never call it on a training thread."""
        spare = self._make(self._limits.segment_bytes)
        if spare is None:
            return
        for page in range(spare.num_pages):
            spare.fault_in(page)
            if page % PAGES_AT_ONCE == 0:
                time.sleep(0)  # releases the GIL for the training thread
                self._prepare_starters()  # threads may have begun since
        self.drops = self._process.drops[DropReason.NO_SEGMENT]
        self.spares.appendleft(spare)

    def _prepare_starters(self) -> None:
        while self._needs_starter() and (starter := self._make(STARTER_BYTES)) is not None:
            for page in range(starter.num_pages):
                starter.fault_in(page)
            self.spares.append(starter)

    def _needs_starter(self) -> bool:
        return self._has_starters and self._num_starters() < NUM_STARTERS

    def _num_starters(self) -> int:
        if not self._has_starters:
            return 0
        return sum(ready.capacity == STARTER_RECORDS for ready in self.spares.copy())

    def _has_whole(self) -> bool:
        return self._num_starters() < len(self.spares)

    def _is_waiting_to_retry(self) -> bool:
        return monotonic_ns() < self._retry_at_ns

    def _make(self, num_bytes: int) -> Segment | None:
        """Return a new segment of at most ``num_bytes``, None if the limit or the disk is full."""
        if self._is_waiting_to_retry():
            return None
        self._on_disk = [(path, size) for path, size in self._on_disk if path.exists()]
        capacity = segment_capacity(num_bytes)
        num_bytes = HEADER_BYTES + capacity * RECORD_BYTES
        if sum(size for _, size in self._on_disk) + num_bytes > self._limits.spool_bytes:
            self._report_full(f"the limit of {self._limits.spool_bytes} bytes is reached")
            return None
        number = next(self._numbers)
        path = self._folder / f"seg-{number:06d}.rsp"
        identity = replace(self._identity, segment=number, capacity=capacity)
        try:
            segment = Segment(path, identity)
        except (OSError, ValueError, MemoryError) as problem:
            self._retry_at_ns = monotonic_ns() + RETRY_AFTER_NS
            self._report_full(str(problem) or "out of memory")
            return None
        self._on_disk.append((path, num_bytes))
        return segment

    def _report_full(self, why: str) -> None:
        """Count further drops as `SPOOL_FULL`; the first time, call ``on_full``."""
        self.drops = self._process.drops[DropReason.SPOOL_FULL]
        on_full, self._on_full = self._on_full, None
        if on_full is not None:
            on_full(why)

    def close(self) -> None:
        """Hand out no more segments and remove the files of those not taken."""
        self._closed = True
        while self.spares:
            with contextlib.suppress(OSError, IndexError):
                self.spares.popleft().path.unlink()

    def abandon(self) -> None:
        """Hand out no more segments, and keep the files: they belong to the parent process."""
        self._closed = True
        self.spares.clear()
