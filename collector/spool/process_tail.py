"""Tail of one traced process: its segments, its groups and events, and its end."""

from __future__ import annotations

import hashlib
import os
import time
from bisect import bisect
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import KINDS
from rankscope.tracer.spool import PROCESS_FILE, STALL_NS, SpoolError

from ..arrow_columns import to_numpy
from ..identity import MAX_SEGMENT, segment_id
from ..names import storable_name
from .cut import Cut
from .descriptions import (
    ENDED,
    LOST,
    LOST_LINE,
    RUNNING,
    STALLED_LINE,
    DescriptionProblems,
    event_row,
    event_rows,
    exit_event,
    exit_state,
    group_rows,
    kernel_rows,
    rank_row,
)
from .folder import TEMPORARY, held_open, segment_paths
from .liveness import Liveness, read_liveness
from .process import MAX_LINE_BYTES, LineBudget, SpoolFolderError
from .records import Part, decode
from .segment import CHUNK_ROWS, NotReadyError, SegmentReader, read_open_spans
from .segment_removal import SegmentRemoval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Set
    from pathlib import Path

    from rankscope.tracer.spool import SpoolCounts

    from ..clock.map import ClockMap
    from ..identity import Row
    from .cut import CutKey, Resume
    from .deaths import DeathWatch
    from .process import ProcessFiles
    from .records import CutRows
    from .segment import Reading

PRODUCED_PERIOD_NS = 60_000_000_000
"""Time between rows of a running process that differ in its number of records only. The store
keeps such a row for each rank, so more often would be a load."""

MAX_READERS = 64
"""Segments of a process that are open at once: more than it has lanes. A process of short threads
leaves thousands of small ones."""

SETTLED_NS = 2_000_000_000
"""Age from which on a folder's time of change is that of its last one. The file system's clock has
ticks of milliseconds, and a second file may be created within the same one."""

COUNTS_PERIOD_NS = 1_000_000_000
"""A running process writes its counters so often: it may have ended so much after the last ones."""

MAX_OPEN_SPANS = 256
MAX_SKIPPED_LOGGED = 8

REMOVED = "segment-removed"
"""Reason in `ranks.dropped` for rows of segments that were deleted before they were read."""


TRUNCATED = "segment-truncated"
"""Reason for rows of segments whose file ends before them."""


class ProcessTail:
    """A cursor over everything that one process writes."""

    def __init__(
        self,
        files: ProcessFiles,
        *,
        clock: ClockMap,
        resume: Resume,
        grace_ns: int,
        deaths: DeathWatch,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self.files = files
        self._deaths = deaths
        self._pidfd = deaths.follow(files.identity)
        self.state = RUNNING
        self.exit_ns: int | None = None
        self.problems: list[str] = []
        self.last_step = -1
        self.last_end_ns = 0
        self.clock = clock
        self._resume = resume
        self._grace_ns = grace_ns
        self._chunk_rows = chunk_rows
        self._readers: dict[Path, SegmentReader] = {}
        self._waiting: deque[Path] = deque()
        """Segments that are not open, the next one first."""

        self._newest_opened: Path | None = None
        self._listed_ns: int | None = None
        """Last change of the folder, Unix ns, if all segments that it has since then are known."""

        self._stored = SegmentRemoval()
        self._unreadable: set[Path] = set()
        self._exit_seen_ns = 0
        self._unanswered = [key for key in resume.unanswered if key.process == files.process]
        self._exit_record: dict[str, Any] | None = None
        self._has_ended = False
        self._dropped: dict[str, int] = {}
        self._counts: SpoolCounts | None = None
        self._now_ns = 0
        self._end_rows = dict(resume.end_rows)
        self._numbers: set[int] = set()
        self._num_removed: int | None = None
        self._num_cut_off = 0
        self._is_cut = False
        self._stored_row: tuple[str, Mapping[str, int], Mapping[str, Any]] | None = None
        self._stored_produced: int | None = None
        self._stored_ns = 0
        self._progress_ns: int | None = None
        self._reported_stall: list[dict[str, Any]] = []
        self._reported_lines: dict[Path, int] = {}
        self._problems = DescriptionProblems(files)

    @property
    def is_finished(self) -> bool:
        """True if the process has ended and everything that it wrote is stored."""
        return self.state != RUNNING and not self._readers and not self._waiting

    @property
    def has_ended(self) -> bool:
        """True if the process can't write any more."""
        return self._has_ended

    @property
    def has_waiting_segments(self) -> bool:
        """True if segments wait to be opened."""
        return bool(self._waiting)

    @property
    def unreadable(self) -> frozenset[Path]:
        """Segments that can't be read, for instance of a newer version."""
        return frozenset(self._unreadable)

    def poll(self, *, now_ns: int, budget: LineBudget | None = None) -> dict[str, list[Row]]:
        """Find new segments, read new lines, and check whether the process has ended.

        Args:
            now_ns: Current time of a monotonic clock.
            budget: What may be read of the line files; None: that of one process.

        Returns:
            New rows by table: `groups`, `events` and `kernels`.
        """
        with held_open(self.files.folder) as status:
            return self._poll(status, now_ns=now_ns, budget=budget or LineBudget())

    def _poll(
        self, folder: os.stat_result | None, *, now_ns: int, budget: LineBudget
    ) -> dict[str, list[Row]]:
        files = self.files
        self._now_ns = now_ns
        if self._progress_ns is None:
            self._progress_ns = now_ns
        files.refresh_derived()
        if self._exit_record is None:
            try:
                self._exit_record = files.exit_record()
            except SpoolFolderError as error:
                self.problems.append(str(error))
                self._exit_record = {}  # a failure
            self._exit_seen_ns = now_ns
        self._has_ended = self._check_ended(now_ns)
        self._dropped, self._counts = files.counts()
        if folder is None or self._has_ended or folder.st_mtime_ns != self._listed_ns:
            self._find_segments()
            is_settled = folder is not None and time.time_ns() - folder.st_mtime_ns > SETTLED_NS
            self._listed_ns = folder.st_mtime_ns if folder is not None and is_settled else None
        groups, wrong_lines = group_rows(files, files.groups.read(budget))
        events, wrong_events = event_rows(files, files.events.read(budget))
        kernels, wrong_kernels = kernel_rows(files, files.kernels.read(budget))
        self._report_long_lines()
        invalid = self._problems.poll([*wrong_lines, *wrong_events, *wrong_kernels])
        self.problems += [f"{files.folder}: {row['text']}" for row in invalid]
        return {"groups": groups, "events": [*events, *invalid], "kernels": kernels}

    @property
    def has_more_lines(self) -> bool:
        """True if complete lines wait for the next poll."""
        return any(lines.has_more for lines in self.files.line_files)

    def cuts(self, *, now_ns: int) -> Iterator[RawCut]:
        """Yield one cut for each segment with new rows; `advance` moves the cursors."""
        self._open_waiting()
        readers = {key: self._reader_of(key.segment) for key in self._unanswered}
        again = [(key, reader) for key, reader in readers.items() if reader is not None]
        is_missing = [key for key, reader in readers.items() if reader is None]
        self._unanswered = is_missing if self._waiting else []
        for key, reader in again:
            yield RawCut(self, reader, reader.reread(key.first_row, key.end_row))
        if again:
            return  # the cursors are before these cuts until they are stored
        for reader in list(self._readers.values()):
            reading = reader.read(now_ns=now_ns, has_ended=self._has_ended)
            if reading is not None:
                yield RawCut(self, reader, reading)
            elif reader.is_finished:
                self._finish(reader)

    def advance(self, cut: Cut) -> None:
        """Move the cursor past a cut that is stored."""
        reader = self._reader_of(cut.key.segment)
        if reader is not None:
            reader.advance(cut.key.end_row)
            if reader.is_exhausted:
                self._finish(reader)
        read_before = self._end_rows.get(cut.key.segment, 0)
        self._end_rows[cut.key.segment] = max(read_before, cut.key.end_row)
        self._progress_ns, self._reported_stall = self._now_ns, []
        spans = cut.rows.spans
        for table in (spans, cut.rows.steps):
            if table.num_rows:
                self.last_step = max(self.last_step, int(to_numpy(table["step"]).max()))
        if spans.num_rows:
            end_ns = to_numpy(spans["start_ns"]) + to_numpy(spans["duration_ns"])
            self.last_end_ns = max(self.last_end_ns, int(end_ns.max()))

    def end(self) -> list[Row]:
        """Set the final state if the process has ended; return the event of its end, once."""
        if not self._has_ended or self.state != RUNNING:
            return []
        if self.has_more_lines or self._waiting or self._readers:
            return []
        if self._exit_record is None:
            self.state = LOST
            event = self._lost_event()
            self.exit_ns = event["at_ns"] or None
            if not self._numbers and not self._unreadable and self._has_stored_rows():
                return []  # an earlier reader stored the event, and then deleted the segments
            return [event]
        row = exit_event(self.files, self._exit_record)
        self.state = exit_state(self._exit_record)
        self.exit_ns = row["at_ns"] or None
        return [row]

    def stalled_event(self, *, least_ns: int = STALL_NS) -> list[Row]:
        """Return the event of a process that has recorded nothing for ``least_ns``.

        It comes once for each set of open spans.
        """
        silent_ns = self._now_ns - (self._progress_ns or self._now_ns)
        if self._has_ended or self.state != RUNNING or silent_ns < least_ns:
            return []
        open_spans = self._open_spans()
        if not open_spans or open_spans == self._reported_stall:
            return []
        self._reported_stall = open_spans
        at_ns = self._recorded_ns(open_spans)
        return [self._open_event("stalled", STALLED_LINE, open_spans, at_ns=at_ns)]

    def changed_row(self) -> Row | None:
        """Return the row of table ``ranks`` if it changed since the last call."""
        dropped = {**self._dropped, **self._resume.dropped.get(self.files.process, {})}
        if self._num_removed is None and self.is_finished:
            self._num_removed = self._count_removed()
        if self._num_removed:
            dropped[TRUNCATED if self._is_cut else REMOVED] = self._num_removed
        if self._num_cut_off:
            dropped[TRUNCATED] = dropped.get(TRUNCATED, 0) + self._num_cut_off
        current = (self.state, dropped, self.files.derived)
        counts = self._counts
        produced = None if counts is None or not counts.at_ns else counts.num_produced
        is_due = self.state != RUNNING or self._now_ns - self._stored_ns >= PRODUCED_PERIOD_NS
        if current == self._stored_row and (produced == self._stored_produced or not is_due):
            return None
        self._stored_row = current
        self._stored_produced, self._stored_ns = produced, self._now_ns
        return rank_row(
            self.files,
            state=self.state,
            exit_ns=self.exit_ns,
            dropped=dropped,
            produced=produced,
        )

    def delete_segments(self) -> None:
        """Delete the stored segments."""
        has_event = self.state != RUNNING and self._has_stored_rows()
        problem = self._stored.delete(has_event=has_event)
        if problem is not None:
            self.problems.append(problem)

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        if self._pidfd is not None:
            self._deaths.leave(self._pidfd)
            self._pidfd = None

    def _report_long_lines(self) -> None:
        """Report the first skipped line of each file, and at the end their number."""
        for lines in self.files.line_files:
            is_end = self._has_ended and not lines.has_more
            if lines.num_skipped > self._reported_lines.get(lines.path, 0) and (
                is_end or lines.path not in self._reported_lines
            ):
                self._reported_lines[lines.path] = lines.num_skipped
                self.problems.append(
                    f"{lines.path}: {lines.num_skipped} lines are longer than {MAX_LINE_BYTES}"
                    " bytes and are skipped"
                )

    def _has_stored_rows(self) -> bool:
        first = segment_id(self.files.process, 0)
        return any(
            end_row > 0 and 0 <= segment - first <= MAX_SEGMENT
            for segment, end_row in self._end_rows.items()
        )

    def _count_removed(self) -> int:
        if self._unreadable:
            return 0  # the number of rows in these segments is unknown
        try:
            _, counts = self.files.counts()
        except OSError:
            return 0  # the whole folder was removed
        num_removed = count_removed_rows(
            self.files.process,
            num_written=counts.num_written,
            end_rows=self._end_rows,
            found=self._numbers,
            num_dropped=sum(self._resume.dropped.get(self.files.process, {}).values())
            + self._num_cut_off,
            is_cut=self._is_cut,
        )
        if num_removed and not self._is_cut:
            self.problems.append(
                f"{self.files.folder}: segments with {num_removed} rows were removed before they"
                " were read"
            )
        return num_removed

    def _finish(self, reader: SegmentReader) -> None:
        """Stop reading a segment of which all rows are stored, or cut off with its file."""
        num = reader.num_cut_off
        if num != 0:
            self._is_cut |= num is None
            self._num_cut_off += num or 0
            rows = "rows" if num is None else f"{num} rows"
            self.problems.append(
                f"{reader.path} is shorter than its header says: {rows} behind its end are lost."
                " Write a segment in its full size, and delete it instead of truncating it"
            )
        reader.close()
        del self._readers[reader.path]
        self._stored.add(reader.path, reader.inode)

    def _check_ended(self, now_ns: int) -> bool:
        record = self._exit_record
        if record is not None and exit_state(record) == ENDED:
            return True
        # A process that recorded an exception still runs its exit handlers, and may write.
        liveness = read_liveness(self.files.identity)
        is_past_grace = now_ns - self._exit_seen_ns >= self._grace_ns
        return liveness is Liveness.GONE or (
            record is not None and liveness is Liveness.UNKNOWN and is_past_grace
        )

    def _lost_event(self) -> Row:
        """Return the event of a process that ended without an exit record.

        Its time is that of the end, or else the last at which the process is known to have run.
        """
        open_spans = self._open_spans()
        recorded_ns = self._recorded_ns(open_spans)
        at_ns = None if self._pidfd is None else self._deaths.died_ns(self._pidfd)
        error_ns = 0 if at_ns is not None else COUNTS_PERIOD_NS
        if at_ns is None and self._counts is not None:
            at_ns = self._counts.at_ns
        ran_ns = self.clock.unix_at(at_ns) if at_ns else 0
        status = None if self._pidfd is None else self._deaths.exit_status(self._pidfd)
        ended = {} if status is None else {"exit_code": os.waitstatus_to_exitcode(status)}
        return self._open_event(
            "lost",
            LOST_LINE,
            open_spans,
            at_ns=max(ran_ns, recorded_ns) or self.files.identity.anchor_unix_ns,
            at_error_ns=error_ns,
            recorded_ns=recorded_ns,
            **ended,
        )

    def _recorded_ns(self, open_spans: list[dict[str, Any]]) -> int:
        """Return when the process last began or ended a span; 0 if that is unknown."""
        return max([self.last_end_ns, *(int(span["start_ns"]) for span in open_spans)])

    def _open_event(
        self, kind: str, line: int, open_spans: list[dict[str, Any]], *, at_ns: int, **more: int
    ) -> Row:
        step = max([self.last_step, *(span["step"] for span in open_spans)])
        names = ", ".join(span["name"] for span in open_spans) or "none"
        return event_row(
            self.files,
            line=line,
            at_ns=at_ns,
            kind=kind,
            text=f"{kind} at step {step}, open span = {names}",
            data={"step": step, "open": open_spans, **more},
        )

    def _open_spans(self) -> list[dict[str, Any]]:
        """Return the open spans of all segments, as the data of an event."""
        files = self.files
        with suppress(OSError):  # the folder was removed
            paths = segment_paths(files.folder)[-MAX_OPEN_SPANS:]
            spans = (span for path in paths for span in read_open_spans(path))
            return [
                {
                    "name": storable_name(files.texts([span.name_id])[0]),
                    "kind": str(KINDS[span.kind]) if span.kind < len(KINDS) else "other",
                    "step": span.step,
                    "start_ns": self.clock.unix_at(span.start_ns),
                    "group_id": f"{span.group_id:016x}",
                    "seq": span.seq,
                    **({"num_bytes": span.num_bytes} if span.num_bytes > 0 else {}),
                    **({"sides": span.sides} if span.sides else {}),
                }
                for span in islice(spans, MAX_OPEN_SPANS)
            ]
        return []

    def _find_segments(self) -> None:
        known = self._readers.keys() | self._stored.paths | self._unreadable
        waiting = [path for path in segment_paths(self.files.folder) if path not in known]
        newest = self._newest_opened
        behind = 0 if newest is None else bisect(waiting, newest)
        self._waiting = deque(waiting[behind:] + waiting[:behind])

    def _open_waiting(self) -> None:
        """Open waiting segments in turn, in place of those that have no new rows."""
        if self._waiting and len(self._readers) >= MAX_READERS:
            idle = [path for path, reader in self._readers.items() if reader.is_idle]
            for path in idle[: len(self._waiting)]:
                self._readers.pop(path).close()
                self._waiting.append(path)
        while self._waiting and len(self._readers) < MAX_READERS:
            path = self._waiting.popleft()
            try:
                self._open(path)
            except OSError as error:
                if error.errno in TEMPORARY:
                    self._waiting.appendleft(path)
                    return
                self._skip(path, str(error))
            self._newest_opened = path

    def _open(self, path: Path) -> None:
        try:
            reader = SegmentReader(path, grace_ns=self._grace_ns, chunk_rows=self._chunk_rows)
        except (FileNotFoundError, NotReadyError):
            self._listed_ns = None  # look for it again
            return
        except SpoolError as error:
            self._skip(path, str(error))
            return
        problem = self._mismatch(reader)
        if problem is not None:
            reader.close()
            self._skip(path, f"{path} {problem}: it is left unchanged")
            return
        reader.advance(self._end_rows.get(self._segment(reader), 0))
        self._readers[path] = reader
        self._numbers.add(reader.number)

    def _mismatch(self, reader: SegmentReader) -> str | None:
        """Return why a segment does not belong to this process; None if it does.

        If the identities in the two headers differ, one file is damaged or misplaced, and the
        rows would be stored under another rank.
        """
        if reader.number > MAX_SEGMENT:
            return f"has number {reader.number}, more than {MAX_SEGMENT}"
        for name in ("run_id", "epoch", "rank", "process_uuid"):
            if getattr(self.files.identity, name) != getattr(reader.identity, name):
                return f"has another {name} than {PROCESS_FILE}"
        return None

    def _skip(self, path: Path, reason: str) -> None:
        """Leave a file unchanged and report the reason."""
        self._unreadable.add(path)
        if len(self._unreadable) <= MAX_SKIPPED_LOGGED:
            self.problems.append(reason)
        elif len(self._unreadable) == MAX_SKIPPED_LOGGED + 1:
            self.problems.append(f"{self.files.folder} has more segments that can't be read")

    def _segment(self, reader: SegmentReader) -> int:
        return segment_id(self.files.process, reader.number)

    def _reader_of(self, segment: int) -> SegmentReader | None:
        for reader in self._readers.values():
            if self._segment(reader) == segment:
                return reader
        return None


@dataclass(slots=True)
class RawCut:
    """Rows of a segment that leave the spool together, not decoded yet."""

    tail: ProcessTail
    reader: SegmentReader
    reading: Reading

    @property
    def num_rows(self) -> int:
        """Number of its rows, torn ones included."""
        return self.reading.end_row - self.reading.first_row

    def extend(self, *, now_ns: int) -> None:
        """Add the row after the last one if a second reading agrees with the first.

        Else the last row of each step would be a cut of its own.
        """
        self.reading = self.reader.extended(self.reading, now_ns=now_ns)

    def part(self) -> Part:
        """Return what is decoded."""
        files, reading = self.tail.files, self.reading
        return Part(
            key=files.cut_key(self.reader.number, reading.first_row, reading.end_row),
            records=reading.records,
            rows=reading.rows,
            names=files,
            clock=self.tail.clock,
        )

    def cut(self, key: CutKey, rows: CutRows) -> Cut:
        """Return the cut with its decoded rows."""
        reading = self.reading
        sha256 = hashlib.sha256(reading.data).hexdigest()
        return Cut(key=key, sha256=sha256, num_torn=reading.num_torn, rows=rows)


def decode_cuts(raw: Sequence[RawCut]) -> list[Cut]:
    """Decode cuts, which are faster together."""
    parts = [each.part() for each in raw]
    rows = decode(parts)
    return [each.cut(part.key, own) for each, part, own in zip(raw, parts, rows, strict=True)]


def count_removed_rows(
    process: str,
    *,
    num_written: int,
    end_rows: Mapping[int, int],
    found: Set[int],
    num_dropped: int,
    is_cut: bool = False,
) -> int:
    """Return how many rows of an ended process were neither read nor are on disk.

    Segments are numbered without gaps, so each missing number was a segment that was removed.
    Its rows are those that the process wrote less all known ones.

    Args:
        process: UUID of the process in hex.
        num_written: Rows that the process claimed in all segments, by its own account.
        end_rows: Row after the last that was read, by segment, of any processes.
        found: Numbers of the segments that were seen on disk, with rows or without.
        num_dropped: Rows of the process that the sink gave up and counted.
        is_cut: Whether a segment's file was cut and its number of rows is unknown.

    Returns:
        0 if no number is missing and no file was cut.
    """
    first = segment_id(process, 0)
    own = {
        segment - first: end_row
        for segment, end_row in end_rows.items()
        if 0 <= segment - first <= MAX_SEGMENT
    }
    numbers = own.keys() | found
    if len(numbers) > max(numbers, default=-1) and not is_cut:
        return 0
    return max(0, num_written - sum(own.values()) - num_dropped)
