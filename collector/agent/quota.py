"""Quota of the spool, enforced when nothing can be sent."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.spool import PROCESS_FILE, SpoolError

from ..errors import CollectorError
from ..identity import segment_id
from ..spool.descriptions import ENDED, exit_state
from ..spool.folder import (
    BLOCK_BYTES,
    all_process_folders,
    remove_process_folder,
    remove_spool_file,
    segment_paths,
    stat_spool_file,
    used_bytes,
)
from ..spool.liveness import Liveness, read_liveness
from ..spool.process import ProcessFiles
from ..spool.segment import NotReadyError, SegmentReader, read_open_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ..spool.cut import CutKey
    from .journal import Journal

CHECK_PERIOD_S = 5.0
FULL = "agent-spool-full"
"""Reason in `ranks.dropped`."""


class SpoolQuota:
    """Largest size of a spool.

    Folders of ended processes whose rows are all stored are deleted first, the oldest first. Then
    segments that no process writes any more and of which nothing was sent, the newest first, so
    that the remaining rows have no gap. Each deleted row is counted. Segments that a running
    process writes are bounded by its own limit and are kept.

    Args:
        journal: Records dropped rows before they are deleted.
        monotonic_s: Clock of the checks, one every `CHECK_PERIOD_S`.
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

    def enforce(self, stored: Iterable[Path]) -> str | None:
        """Delete files if the spool is too large; return a line for the operator, if any.

        Args:
            stored: Folders of ended processes of which everything is stored.

        Raises:
            OSError: The folder can't be read.
            JournalError: The dropped rows can't be recorded, so they are kept.
        """
        if self._monotonic_s() < self._next_s:
            return None
        self._next_s = self._monotonic_s() + CHECK_PERIOD_S
        excess = used_bytes(self._spool) - self._max_bytes
        if excess <= 0:
            return None
        excess -= _remove_oldest(stored, excess)
        unsent_by_path: dict[Path, _Unsent] = {}
        for path in _newest_segments(self._spool):
            if excess <= 0:
                break
            unsent = self._unsent(path)
            if unsent is not None:
                unsent_by_path[path] = unsent
                excess -= unsent.num_bytes
        num_rows = {
            unsent.key: unsent.num_rows
            for unsent in unsent_by_path.values()
            if not unsent.is_settled
        }
        if num_rows:
            # Before the deletion: after a kill the files are found again, settled.
            self._journal.drop(num_rows, reason=FULL)
        for path, unsent in unsent_by_path.items():
            remove_spool_file(path, inode=unsent.inode)
        if not num_rows:
            return None
        return (
            f"the spool {self._spool} is larger than {self._max_bytes} bytes:"
            f" {sum(num_rows.values())} rows that were not sent are dropped, the newest first, and"
            " counted"
        )

    def _unsent(self, path: Path) -> _Unsent | None:
        """Return the rows of a segment that were never sent; None if it must be kept."""
        try:
            files = ProcessFiles(path.parent)
            reader = SegmentReader(path, grace_ns=0)
        except (OSError, CollectorError, SpoolError, NotReadyError):
            return None
        try:
            end_row = reader.end_row_if_final(has_ended=_has_ended(files))
            if end_row is None:
                return None
            files.place(self._journal.run_of(files.process) or files.run_id, files.epoch)
            segment = segment_id(files.process, reader.number)
            if any(key.segment == segment for key in self._journal.unanswered(files.run_id)):
                return None  # the cut may have arrived
            first_row = min(self._journal.end_rows(files.run_id).get(segment, 0), end_row)
            is_settled = first_row == end_row
            if is_settled and read_open_spans(path):
                return None  # evidence
            return _Unsent(
                key=files.cut_key(reader.number, first_row, end_row),
                num_rows=len(reader.reread(first_row, end_row).rows),
                num_bytes=stat_spool_file(path).st_blocks * BLOCK_BYTES,
                inode=reader.inode,
                is_settled=is_settled,
            )
        finally:
            reader.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsent:
    key: CutKey
    num_rows: int
    """Number of committed rows."""

    num_bytes: int
    inode: int
    is_settled: bool
    """True if an agent was killed after it counted the rows and before it deleted the file."""


def _has_ended(files: ProcessFiles) -> bool:
    try:
        record = files.exit_record()
    except CollectorError:
        record = None
    has_ended = record is not None and exit_state(record) == ENDED
    return has_ended or read_liveness(files.identity) is Liveness.GONE


def _newest_segments(spool: Path) -> list[Path]:
    changed: list[tuple[int, Path]] = []
    for folder in all_process_folders(spool):
        with contextlib.suppress(OSError):
            paths = segment_paths(folder)
            changed += [(stat_spool_file(path).st_mtime_ns, path) for path in paths]
    return [path for _, path in sorted(changed, reverse=True)]


def _remove_oldest(folders: Iterable[Path], excess: int) -> int:
    """Delete folders until ``excess`` bytes are free; return how many were freed."""
    freed = 0
    present: list[tuple[int, Path]] = []
    for folder in folders:
        with contextlib.suppress(OSError):
            present.append((stat_spool_file(folder / PROCESS_FILE).st_mtime_ns, folder))
    for _, folder in sorted(present):
        if freed >= excess:
            break
        freed += remove_process_folder(folder)
    return freed
