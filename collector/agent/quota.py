"""Keep the spool within a number of bytes although nothing can be shipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.spool import SEGMENT_GLOB, SpoolError

from ..errors import CollectorError
from ..identity import segment_id
from ..spool.cut import CutKey
from ..spool.descriptions import ENDED, exit_state
from ..spool.liveness import Liveness, read_liveness
from ..spool.process import ProcessFiles
from ..spool.segment import NotReadyError, SegmentReader
from ..spool.tail import run_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .journal import Journal

LOOK_S = 5.0
BLOCK_BYTES = 512
"""What `st_blocks` counts in."""

FULL = "agent-spool-full"
"""Reason under which `ranks.dropped` counts the rows."""


class SpoolQuota:
    """Bounds the bytes of a spool.

    What is over and shipped goes first, the oldest process first. Then segments that no
    process writes to any more and of which nothing was sent, the newest first: what is kept
    then reaches from the oldest row on without a hole. Each row that goes is counted. What a
    running process writes to is bounded by its own limit and stays.

    Args:
        spool: The folder.
        max_bytes: How much may be in it.
        journal: Notes what is given up before it goes.
        monotonic_s: The folder is looked at every `LOOK_S`.
    """

    def __init__(
        self,
        spool: Path,
        max_bytes: int,
        journal: Journal,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._max_bytes = max_bytes
        self._journal = journal
        self._monotonic_s = monotonic_s
        self._next_s = monotonic_s()

    def keep(self, settled: Iterable[Path]) -> str | None:
        """Make room if there is too little; return what to tell, if anything.

        Args:
            settled: Folders of processes that ended, whose every word was shipped.

        Raises:
            OSError: The folder can't be read.
            JournalError: What would go can't be noted, so it stays.
        """
        if self._monotonic_s() < self._next_s:
            return None
        self._next_s = self._monotonic_s() + LOOK_S
        excess = used_bytes(self._spool) - self._max_bytes
        if excess <= 0:
            return None
        excess -= _remove_oldest(settled, excess)
        num_rows = 0
        for path in _newest_segments(self._spool):
            if excess <= 0:
                break
            found = self._unsent(path)
            if found is None:
                continue
            self._journal.drop(found.key, reason=FULL, num_rows=found.num_rows)
            path.unlink(missing_ok=True)
            num_rows += found.num_rows
            excess -= found.num_bytes
        if not num_rows:
            return None
        return (
            f"the spool {self._spool} is over {self._max_bytes} bytes: {num_rows} rows that the"
            " collector did not take are dropped, the newest first, and counted"
        )

    def _unsent(self, path: Path) -> _Unsent | None:
        """Return what a segment holds that was never sent; None where it has to stay."""
        try:
            files = ProcessFiles(path.parent)
            reader = SegmentReader(path, grace_ns=0)
        except (OSError, CollectorError, SpoolError, NotReadyError):
            return None
        try:
            end_row = reader.end_row_if_final(has_ended=_has_ended(files))
            if end_row is None:
                return None
            segment = segment_id(files.process, reader.number)
            if any(key.segment == segment for key in self._journal.unanswered(files.run_id)):
                return None  # it may have arrived
            first_row = self._journal.end_rows(files.run_id).get(segment, 0)
            if first_row >= end_row:
                return None
            return _Unsent(
                key=CutKey(
                    run_id=files.run_id,
                    epoch=files.identity.epoch,
                    rank=files.identity.rank,
                    process=files.process,
                    segment=segment,
                    first_row=first_row,
                    end_row=end_row,
                ),
                num_rows=len(reader.reread(first_row, end_row).rows),
                num_bytes=path.stat().st_blocks * BLOCK_BYTES,
            )
        finally:
            reader.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsent:
    key: CutKey
    num_rows: int
    """Committed ones."""

    num_bytes: int


def used_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes on its disk; a file that goes meanwhile counts 0."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(f"{path}/{name}").st_blocks * BLOCK_BYTES
    return total


def _has_ended(files: ProcessFiles) -> bool:
    try:
        record = files.exit_record()
    except CollectorError:
        record = None
    has_ended = record is not None and exit_state(record) == ENDED
    return has_ended or read_liveness(files.identity) is Liveness.GONE


def _newest_segments(spool: Path) -> list[Path]:
    found: list[tuple[int, Path]] = []
    for run in run_folders(spool):
        for path in run.glob(f"*/{SEGMENT_GLOB}"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _remove_oldest(folders: Iterable[Path], excess: int) -> int:
    """Remove folders until enough is free; return the bytes that they took."""
    freed = 0
    present = [folder for folder in folders if folder.exists()]
    for folder in sorted(present, key=lambda path: path.stat().st_mtime_ns):
        if freed >= excess:
            break
        freed += used_bytes(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return freed
