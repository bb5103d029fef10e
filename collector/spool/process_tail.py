"""Follow one traced process: its segments, its words, its end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import KINDS
from rankscope.tracer.spool import PROCESS_FILE, SEGMENT_GLOB, SpoolError

from ..arrow_columns import to_numpy
from ..identity import MAX_SEGMENT, segment_id
from ..names import storable_name
from .cut import Cut, CutKey
from .descriptions import (
    ENDED,
    LOST,
    LOST_LINE,
    RUNNING,
    STALLED_LINE,
    event_row,
    event_rows,
    exit_event,
    exit_state,
    group_rows,
    rank_row,
)
from .liveness import Liveness, read_liveness
from .process import SpoolFolderError
from .records import Origin, decode
from .segment import CHUNK_ROWS, NotReadyError, SegmentReader, read_open_spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set
    from pathlib import Path

    from ..clock.map import ClockMap
    from ..identity import Row
    from .cut import Resume
    from .process import ProcessFiles
    from .segment import Reading


STALL_NS = 60_000_000_000
"""How long a process may record nothing before it is said what it stands in: longer than any
step, shorter than the ten minutes after which NCCL gives up by default."""

REMOVED = "segment-removed"
"""Reason under which `ranks.dropped` counts the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a process said since the last look, besides spans: rows by table."""

    groups: list[Row]
    events: list[Row]


class ProcessTail:
    """A cursor over all that one process writes."""

    def __init__(
        self,
        files: ProcessFiles,
        *,
        clock: ClockMap,
        resume: Resume,
        grace_ns: int,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self.files = files
        self.state = RUNNING
        self.exit_ns: int | None = None
        self.problems: list[str] = []
        self.last_step = -1
        self.last_end_ns = 0
        self._clock = clock
        self._resume = resume
        self._grace_ns = grace_ns
        self._chunk_rows = chunk_rows
        self._readers: dict[Path, SegmentReader] = {}
        self._finished: set[Path] = set()
        self._freed: set[Path] = set()
        self._refused: set[Path] = set()
        self._exit_seen_ns = 0
        self._unanswered = [key for key in resume.unanswered if key.process == files.process]
        self._exit_record: dict[str, Any] | None = None
        self._is_over = False
        self._dropped: dict[str, int] = {}
        self._end_rows = dict(resume.end_rows)
        self._numbers: set[int] = set()
        self._num_removed: int | None = None
        self._told: tuple[str, Mapping[str, int], Mapping[str, Any]] | None = None
        self._moved_ns: int | None = None
        self._stalled_in: list[dict[str, Any]] = []

    @property
    def is_finished(self) -> bool:
        """Whether the process has ended and all that it wrote is stored."""
        return self.state != RUNNING and not self._readers

    @property
    def is_over(self) -> bool:
        """Whether the process can't write any more."""
        return self._is_over

    @property
    def refused(self) -> frozenset[Path]:
        """Segments that can't be read, of a newer version say; they are left as they are."""
        return frozenset(self._refused)

    def look(self, *, now_ns: int) -> Words:
        """Find new segments, read new lines, and see whether the process has ended."""
        files = self.files
        files.refresh_derived()
        if self._exit_record is None:
            self._exit_record = self._read_exit()
            self._exit_seen_ns = now_ns
        self._is_over = self._has_ended(now_ns)
        self._dropped = files.dropped()
        self._find_segments()
        return Words(
            groups=group_rows(files, files.groups.read()),
            events=event_rows(files, files.events.read()) + self._stalled_event(now_ns),
        )

    def cuts(self, *, now_ns: int) -> Iterator[Cut]:
        """Yield one cut for each segment that has news. The cursors move by `advance`."""
        again, self._unanswered = self._unanswered, []
        for key in again:
            reader = self._reader_of(key.segment)
            if reader is not None:
                yield self._cut(reader, reader.reread(key.first_row, key.end_row))
        if again:
            return  # the cursors stand before these cuts until they are stored
        for reader in list(self._readers.values()):
            reading = reader.read(now_ns=now_ns, is_over=self._is_over)
            if reading is not None:
                yield self._cut(reader, reading)
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
        self._moved_ns = None
        self._note_progress(cut)

    def conclude(self) -> list[Row]:
        """Once all is read: settle how the process ended, and return the event that says so."""
        if not self._is_over or self.state != RUNNING:
            return []
        if self._exit_record is None:
            self.state = LOST
            self.exit_ns = self.last_end_ns or None
            return [self._lost_event()]
        row = exit_event(self.files, self._exit_record)
        self.state = exit_state(self._exit_record)
        self.exit_ns = row["at_ns"] or None
        return [row]

    def changed_row(self) -> Row | None:
        """Return the row of table ``ranks`` if it changed since the last call."""
        given_up = self._resume.dropped.get(self.files.process, {})
        dropped = {**self._dropped, **given_up}
        if self._num_removed is None and self.is_finished:
            self._num_removed = self._count_removed()
        if self._num_removed:
            dropped[REMOVED] = self._num_removed
        told = (self.state, dropped, self.files.derived)
        if told == self._told:
            return None
        self._told = told
        return rank_row(self.files, state=self.state, exit_ns=self.exit_ns, dropped=dropped)

    def free_segments(self) -> None:
        """Delete the segment files that hold nothing that is not stored."""
        for path in self._finished - self._freed:
            if not read_open_spans(path):
                path.unlink(missing_ok=True)
                self._freed.add(path)

    def close(self) -> None:
        """Let go of the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _count_removed(self) -> int:
        if self._refused:
            return 0  # what these hold can't be told
        try:
            num_stored = self.files.num_stored()
        except OSError:
            return 0  # the folder went as a whole
        num_removed = count_removed_rows(
            self.files.process,
            num_stored=num_stored,
            end_rows=self._end_rows,
            there=self._numbers,
            num_given_up=sum(self._resume.dropped.get(self.files.process, {}).values()),
        )
        if num_removed:
            self.problems.append(
                f"{self.files.folder}: segments were removed before they were read, and"
                f" {num_removed} rows with them"
            )
        return num_removed

    def _finish(self, reader: SegmentReader) -> None:
        """Read a segment no more: all of it is stored."""
        reader.close()
        del self._readers[reader.path]
        self._finished.add(reader.path)

    def _read_exit(self) -> dict[str, Any] | None:
        """Return the exit record; one that can't be read counts as a failure of unknown kind."""
        try:
            return self.files.exit_record()
        except SpoolFolderError as error:
            self.problems.append(str(error))
            return {}

    def _has_ended(self, now_ns: int) -> bool:
        """Return whether nothing more can come."""
        record = self._exit_record
        if record is not None and exit_state(record) == ENDED:
            return True
        # A process that recorded an exception still runs its exit handlers, and may write.
        fate = read_liveness(self.files.identity)
        is_past_grace = now_ns - self._exit_seen_ns >= self._grace_ns
        return fate is Liveness.GONE or (
            record is not None and fate is Liveness.UNKNOWN and is_past_grace
        )

    def _note_progress(self, cut: Cut) -> None:
        for table in (cut.rows.spans, cut.rows.steps):
            if table.num_rows:
                self.last_step = max(self.last_step, int(to_numpy(table["step"]).max()))
        spans = cut.rows.spans
        if spans.num_rows:
            end_ns = to_numpy(spans["start_ns"]) + to_numpy(spans["duration_ns"])
            self.last_end_ns = max(self.last_end_ns, int(end_ns.max()))

    def _stalled_event(self, now_ns: int) -> list[Row]:
        """Return the event of a process that stands still, told once for each place."""
        if self._moved_ns is None:
            self._moved_ns, self._stalled_in = now_ns, []
        if self._is_over or now_ns - self._moved_ns < STALL_NS:
            return []
        found = self._open_now()
        if not found or found == self._stalled_in:
            return []
        self._stalled_in = found
        at_ns = max(self.last_end_ns, *(span["start_ns"] for span in found))
        return [self._standing_event("stalled", STALLED_LINE, found, at_ns)]

    def _lost_event(self) -> Row:
        """Return the event of a process that went without goodbye, with what it was doing."""
        at_ns = self.last_end_ns or self.files.identity.anchor_unix_ns
        return self._standing_event("lost", LOST_LINE, self._open_now(), at_ns)

    def _standing_event(self, kind: str, line: int, found: list[dict[str, Any]], at_ns: int) -> Row:
        step = max([self.last_step, *(span["step"] for span in found)])
        doing = ", ".join(span["name"] for span in found) or "none"
        return event_row(
            self.files,
            line=line,
            at_ns=at_ns,
            kind=kind,
            text=f"{kind} at step {step}, open span = {doing}",
            data={"step": step, "open": found},
        )

    def _open_now(self) -> list[dict[str, Any]]:
        """Return what the process has begun and not ended."""
        files = self.files
        return [
            {
                "name": storable_name(files.texts([span.name_id])[0]),
                "kind": str(KINDS[span.kind]) if span.kind < len(KINDS) else "other",
                "step": span.step,
                "start_ns": self._clock.unix_at(span.start_ns),
                "group_id": f"{span.group_id:016x}",
                "seq": span.seq,
            }
            for path in sorted(files.folder.glob(SEGMENT_GLOB))
            for span in read_open_spans(path)
        ]

    def _find_segments(self) -> None:
        known = self._readers.keys() | self._finished | self._refused
        for path in sorted(set(self.files.folder.glob(SEGMENT_GLOB)) - known):
            try:
                reader = SegmentReader(path, grace_ns=self._grace_ns, chunk_rows=self._chunk_rows)
            except (FileNotFoundError, NotReadyError):
                continue
            except (SpoolError, OSError) as error:
                self._refuse(path, str(error))
                continue
            problem = self._why_not_ours(reader)
            if problem is not None:
                reader.close()
                self._refuse(path, f"{path} {problem}: it is left as it is")
                continue
            reader.advance(self._resume.end_rows.get(self._segment(reader), 0))
            self._readers[path] = reader
            self._numbers.add(reader.number)

    def _why_not_ours(self, reader: SegmentReader) -> str | None:
        """Return why a segment can't be one of this process; None where it can.

        Both files say whose they are: where they differ, one of them is damaged or misplaced,
        and its rows would be another rank's.
        """
        if reader.number > MAX_SEGMENT:
            return f"has number {reader.number}, more than {MAX_SEGMENT}"
        own, told = self.files.identity, reader.identity
        for name in ("run_id", "epoch", "rank", "process_uuid"):
            if getattr(own, name) != getattr(told, name):
                return f"says another {name} than {PROCESS_FILE}"
        return None

    def _refuse(self, path: Path, reason: str) -> None:
        """Leave a file as it is, and say so once."""
        self._refused.add(path)
        self.problems.append(reason)

    def _segment(self, reader: SegmentReader) -> int:
        return segment_id(self.files.process, reader.number)

    def _reader_of(self, segment: int) -> SegmentReader | None:
        for reader in self._readers.values():
            if self._segment(reader) == segment:
                return reader
        return None

    def _cut(self, reader: SegmentReader, reading: Reading) -> Cut:
        identity = self.files.identity
        segment = self._segment(reader)
        origin = Origin(
            run_id=self.files.run_id,
            epoch=identity.epoch,
            rank=identity.rank,
            segment=segment,
            clock=self._clock,
        )
        return Cut(
            key=CutKey(
                run_id=self.files.run_id,
                epoch=identity.epoch,
                rank=identity.rank,
                process=self.files.process,
                segment=segment,
                first_row=reading.first_row,
                end_row=reading.end_row,
            ),
            sha256=hashlib.sha256(reading.data).hexdigest(),
            num_torn=reading.num_torn,
            rows=decode(reading.records, reading.rows, names=self.files, origin=origin),
        )


def count_removed_rows(
    process: str,
    *,
    num_stored: int,
    end_rows: Mapping[int, int],
    there: Set[int],
    num_given_up: int,
) -> int:
    """Return the rows of a process that has ended which are neither read nor on the disk.

    Segments are numbered without gaps, so a number that nobody knows was a segment. What it held
    is what the process says that it wrote, less what is known; 0 where that can't be told.

    Args:
        process: The process's uuid in hex.
        num_stored: Rows that it claimed in all segments, by its own account.
        end_rows: Behind the last row that was read, by segment, of any processes.
        there: Numbers of the segments that lie or lay there, with rows or without.
        num_given_up: Rows that were dropped and counted on the way.
    """
    first = segment_id(process, 0)
    own = {
        segment - first: end_row
        for segment, end_row in end_rows.items()
        if 0 <= segment - first <= MAX_SEGMENT
    }
    numbers = own.keys() | there
    if len(numbers) > max(numbers, default=-1):
        return 0
    return max(0, num_stored - sum(own.values()) - num_given_up)
