"""Where lanes get their segments: allocated, mapped and touched before they are needed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tracer.segment import MIN_SEGMENT_BYTES, PAGE_BYTES, Segment, segment_capacity
from tracer.spool import HEADER_BYTES, RECORD_BYTES, DropReason, SpoolIdentity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tracer.process_file import ProcessFile

DEFAULT_SEGMENT_BYTES = 8 << 20
DEFAULT_SPOOL_BYTES = 256 << 20
PAGES_AT_ONCE = 32
"""About 0.15 ms; after that the training thread, which may have waited, goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolLimits:
    """How much disk one process may take."""

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    spool_bytes: int = DEFAULT_SPOOL_BYTES
    """All segments of the process that still lie on disk."""

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


class SegmentSource:
    """Hands out segments that are allocated, mapped and touched beforehand."""

    def __init__(
        self,
        folder: Path,
        identity: SpoolIdentity,
        limits: SpoolLimits,
        *,
        process: ProcessFile,
        on_full: Callable[[str], None],
    ) -> None:
        capacity = segment_capacity(limits.segment_bytes)
        self._folder = folder
        self._identity = replace(identity, capacity=capacity)
        self._segment_bytes = HEADER_BYTES + capacity * RECORD_BYTES
        self._limits = limits
        self._numbers = itertools.count()
        self.spares: deque[Segment] = deque()
        """Ready segments."""

        self._process = process
        self._retired: deque[Segment] = deque()
        self._on_disk: list[Path] = []
        self._closed = False
        self._on_full: Callable[[str], None] | None = on_full
        self.drops = process.drops[DropReason.NO_SEGMENT]
        """Counts what is lost where `take` has nothing: not ready yet, or no room."""

    def take(self) -> Segment | None:
        """Return a ready segment; None where there is none (see `drops`). Does no I/O."""
        try:
            return self.spares.popleft()
        except IndexError:
            return None

    def retire(self, segment: Segment) -> None:
        """Take a sealed segment; unmapping it costs more than a training thread should pay."""
        self._retired.append(segment)

    def let_go(self) -> None:
        """Unmap what was retired. Never on a training thread."""
        self._retired.clear()

    def is_short(self) -> bool:
        """Return whether `prepare` has something to do."""
        return not self.spares and not self._closed

    def prepare(self) -> None:
        """Make one more spare where there is room. File I/O: never on a training thread."""
        self._on_disk = [path for path in self._on_disk if path.exists()]
        if (len(self._on_disk) + 1) * self._segment_bytes > self._limits.spool_bytes:
            self._no_room(f"the limit of {self._limits.spool_bytes} bytes is reached")
            return
        number = next(self._numbers)
        path = self._folder / f"seg-{number:06d}.rsp"
        try:
            segment = Segment(path, replace(self._identity, segment=number))
        except (OSError, ValueError, MemoryError) as problem:
            self._no_room(str(problem) or "out of memory")
            return
        self._on_disk.append(path)
        for page in range(self._segment_bytes // PAGE_BYTES):
            segment.fault_in(page)
            if page % PAGES_AT_ONCE == 0:
                time.sleep(0)  # lets go of the GIL: the training thread may want it
        self.drops = self._process.drops[DropReason.NO_SEGMENT]
        self.spares.append(segment)

    def _no_room(self, why: str) -> None:
        """Note that there is no room; the first time it is told too."""
        self.drops = self._process.drops[DropReason.SPOOL_FULL]
        on_full, self._on_full = self._on_full, None
        if on_full is not None:
            on_full(why)

    def close(self) -> None:
        """Hand out nothing more and remove the segments that nobody took."""
        self._closed = True
        while (segment := self.take()) is not None:
            with contextlib.suppress(OSError):
                segment.path.unlink()

    def forget(self) -> None:
        """Hand out nothing more and leave the files alone: they are a parent's."""
        self._closed = True
        self.spares.clear()
