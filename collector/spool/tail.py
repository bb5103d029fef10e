"""Tail of a spool folder: hands everything that traced processes write there to a sink, once."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.tracer.spool import PROCESS_FILE, STALL_NS

from ..clock.map import AnchorClocks
from ..errors import describe_defect
from .deaths import DeathWatch
from .descriptions import LOST, RUNNING, manifest_row, run_row, run_state
from .folder import TEMPORARY, process_folders, run_folders
from .process import LineBudget, ProcessFiles, SpoolFolderError
from .process_tail import ProcessTail, decode_cuts
from .segment import read_first_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..clock.map import Clocks
    from ..identity import Row
    from .cut import Cut, Resume, Sink
    from .process_tail import RawCut

GRACE_NS = 2_000_000_000
"""How long a claimed row may stay uncommitted before it counts as torn."""

FEW_ROWS = 4096
"""A poll reads a segment again if its last cut had at least this many rows."""

BATCH_ROWS = 262_144
"""Rows of one insert: a larger one is hardly faster, and is held in memory as a whole."""

CUTS_PER_POLL = 1_024
"""A poll begins no further round of the segments after so many cuts: a small cut takes some 2 ms,
and other runs wait meanwhile."""

FIND_NS = 2_000_000_000
"""A poll begins to follow no further run after this time. Later polls follow the others."""

CHUNKS_PER_BATCH = 4
"""A batch ends with the chunk that fills it, so it is larger by at most a quarter."""


class SegmentPolicy(Enum):
    """Treatment of a segment when all its rows are stored."""

    KEEP = "keep"
    DELETE = "delete"
    """Delete it, so that jobs do not fill the spool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailProgress:
    """Result of one poll."""

    num_cuts: int
    num_spans: int
    num_steps: int
    num_torn: int
    num_bad: int
    num_processes: int
    """Processes found since the start."""

    num_running: int
    """Processes that have not ended."""

    num_later: int
    """New processes whose turn has not come yet."""

    has_more_lines: bool
    """Whether lines of groups, events or kernels wait for the next poll."""

    num_unreadable: int
    """Segments and folders found since the start that can't be read, and are left unchanged."""

    problems: tuple[str, ...]
    """What can't be read and why, one line each; each problem is in one poll's result only."""


@dataclass(slots=True)
class _Epoch:
    """The processes of one epoch of a run."""

    processes: list[ProcessTail] = field(default_factory=list)
    stored: tuple[object, ...] = ()
    """State in which its row of table ``runs`` was last stored."""


class SpoolTail:
    """A cursor over a spool folder, polled by one thread.

    A restarted tail continues where the sink's ledger ends. A cut that the sink failed to store
    is sent again unchanged.
    """

    def __init__(  # noqa: PLR0913  # clocks and sink come in here
        self,
        spool_dir: Path,
        sink: Sink,
        *,
        segment_policy: SegmentPolicy = SegmentPolicy.KEEP,
        only_run: str | None = None,
        clocks: Clocks | None = None,
        batch_rows: int = BATCH_ROWS,
        grace_ns: int = GRACE_NS,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Prepare to follow ``spool_dir``, which need not exist yet.

        Args:
            spool_dir: Folder with one folder per run.
            sink: Receives the cuts, for instance a `StoreWriter`.
            segment_policy: What happens to a segment when all its rows are stored.
            only_run: Name of the only run folder to follow; None: all of them.
            clocks: Maps the hosts' clocks; None: by the first anchor of each boot of a host.
            batch_rows: Rows that are held in memory and given to the sink at once.
            grace_ns: How long a claimed row may stay uncommitted.
            monotonic_ns: Clock for the grace time.
        """
        self._spool_dir = Path(spool_dir)
        self._sink = sink
        self._only_run = only_run
        self._segment_policy = segment_policy
        self._batch_rows = batch_rows
        self._grace_ns = grace_ns
        self._monotonic_ns = monotonic_ns
        self._clocks = clocks
        self._resumes: dict[str, Resume] = {}
        self._epochs: dict[tuple[str, int], _Epoch] = {}
        self._active: dict[Path, ProcessTail] = {}
        self._done: set[Path] = set()
        self._waiting: set[Path] = set()
        self._unfinished: dict[Path, str] = {}
        self._notes: set[str] = set()
        self._moved: dict[tuple[str, int, int, int], tuple[str, int] | None] = {}
        self._stored: list[Path] = []
        self._pending_cuts: list[tuple[ProcessTail, Cut]] = []
        self._pending_rows: list[tuple[str, list[Row]]] = []
        self._manifests: set[tuple[str, str]] = set()
        self._new_manifests: list[Row] = []
        self._new_clocks: list[Row] = []
        self._num_processes = 0
        self._num_later = 0
        self._deaths = DeathWatch()
        self._unreadable: set[Path] = set()
        self._problems: list[str] = []

    def poll(self) -> TailProgress:
        """Read what is new, hand it to the sink, and return once it is stored.

        Raises:
            StoreError: The sink failed. Nothing is lost: the next poll sends the same again.
        """
        now_ns = self._monotonic_ns()
        totals: Counter[str] = Counter()
        self._flush_rows()
        self._send_cuts(totals)
        self._find_processes()
        while True:
            self._poll_processes(now_ns)
            self._store_states()
            for batch in self._batches():
                self._pending_cuts = batch
                self._send_cuts(totals)
                self._delete_segments()  # within a long poll, too: the ranks may need the space
            ends = [event for tail in self._active.values() for event in tail.end()]
            self._upsert("events", ends)
            self._store_states()
            self._drop_finished()
            # What was stored may decide where the waiting processes belong.
            if not self._waiting or not self._find_processes():
                break
        problems, self._problems = tuple(self._problems), []
        return TailProgress(
            num_cuts=totals["cuts"],
            num_spans=totals["spans"],
            num_steps=totals["steps"],
            num_torn=totals["torn"],
            num_bad=totals["bad"],
            num_processes=self._num_processes,
            num_running=sum(tail.state == RUNNING for tail in self._active.values()),
            num_later=self._num_later,
            has_more_lines=any(tail.has_more_lines for tail in self._active.values()),
            num_unreadable=len(self._unreadable),
            problems=problems,
        )

    @property
    def stored(self) -> tuple[Path, ...]:
        """Folders of ended processes of which everything is stored."""
        return tuple(self._stored)

    @property
    def runs(self) -> tuple[str, ...]:
        """Names under which the runs of this spool are stored, in the order of their begin."""
        return tuple(dict.fromkeys(run_id for run_id, _ in self._epochs))

    @property
    def unfinished(self) -> dict[Path, str]:
        """Folders of processes that are not read, by the file that each still lacks."""
        done = self._done | self._active.keys()
        return {folder: name for folder, name in self._unfinished.items() if folder not in done}

    @property
    def running(self) -> tuple[ProcessFiles, ...]:
        """Files of the processes that have not ended, in no order."""
        return tuple(tail.files for tail in self._active.values() if tail.state == RUNNING)

    def placed_heartbeats(self, rows: Sequence[Row]) -> list[Row]:
        """Return heartbeats with the run and epoch as stored, without those of waiting processes.

        A heartbeat names its process by the run and epoch that it declares, and by rank and pid.
        """
        kept = []
        for row in rows:
            declared = (row["run_id"], row["epoch"])
            stored = self._moved.get((*declared, row["rank"], row["pid"]), declared)
            if stored is not None:
                kept.append({**row, "run_id": stored[0], "epoch": stored[1]})
        return kept

    def close(self) -> None:
        """Close the spool's files; the sink stays open."""
        for tail in self._active.values():
            tail.close()
        self._active.clear()
        self._deaths.close()

    def _find_processes(self) -> bool:
        """Start to follow new process folders, run by run; return whether there were any.

        Runs that were not tried before come first, of them the newest: to place one takes some
        50 ms, and a job that runs must not wait for hundreds that have ended.
        """
        new: dict[Path, list[Path]] = {}
        for folder in self._process_folders():
            if folder not in self._active and folder not in self._done:
                new.setdefault(folder.parent, []).append(folder)
        until_ns = self._monotonic_ns() + FIND_NS
        num_placed = 0
        for run in sorted(new, key=lambda run: self._urgency(run, new[run]), reverse=True):
            num_placed += self._find_in_run(new.pop(run))
            if self._monotonic_ns() >= until_ns:
                break
        self._num_later = sum(len(self._untried(folders)) for folders in new.values())
        clocks, self._new_clocks = self._new_clocks, []
        self._upsert("clock", clocks)
        self._store_manifests()
        return bool(num_placed)

    def _urgency(self, run: Path, folders: list[Path]) -> tuple[bool, int]:
        try:
            changed_ns = run.lstat().st_mtime_ns
        except OSError:
            changed_ns = 0
        return bool(self._untried(folders)), changed_ns

    def _untried(self, folders: list[Path]) -> list[Path]:
        tried = self._waiting | self._unfinished.keys()
        return [folder for folder in folders if folder not in tried]

    def _find_in_run(self, folders: list[Path]) -> int:
        """Follow the processes of one run; return how many there are."""
        new: list[ProcessFiles] = []
        for folder in folders:
            try:
                new.append(ProcessFiles(folder))
            except FileNotFoundError as error:  # not written yet
                self._unfinished[folder] = Path(str(error.filename or PROCESS_FILE)).name
                continue
            except Exception as error:  # noqa: BLE001  # one process, whatever it wrote
                self._skip(folder, error)
        placed = self._place(new)
        for files in placed:
            try:
                self._follow(files)
                self._new_manifests.append(manifest_row(files.run_id, files.manifest))
            except (SpoolFolderError, OSError) as error:
                self._skip(files.folder, error)
        return len(placed)

    def _skip(self, folder: Path, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in TEMPORARY:
            return
        is_expected = isinstance(error, OSError | SpoolFolderError)
        self._problems.append(str(error) if is_expected else _defect(folder, error))
        self._done.add(folder)
        self._unreadable.add(folder)

    def _place(self, new: list[ProcessFiles]) -> list[ProcessFiles]:
        """Return the processes whose run and epoch are decided, and set these.

        A process waits if its run's name is another job's: its first step, or its end, shows
        whether it continues that job. Its files keep what it records.
        """
        if not new:
            return []
        placements = self._sink.place([files.facts() for files in new])
        rest = [files for files, known in zip(new, placements, strict=True) if known is None]
        # Only for these it is worth to look at what they recorded.
        facts = [
            files.facts(first_step=read_first_step(files.folder), has_ended=files.has_ended())
            for files in rest
        ]
        later = self._sink.place(facts) if facts else []
        decided = dict(zip((files.folder for files in rest), later, strict=True))
        placed = []
        for files, known in zip(new, placements, strict=True):
            placement = known or decided[files.folder]
            moved = None if placement is None else (placement.run_id, placement.epoch)
            identity = files.identity
            if moved != (identity.run_id, identity.epoch):
                key = (identity.run_id, identity.epoch, identity.rank, identity.pid)
                self._moved[key] = moved
            if placement is None:
                if files.folder not in self._waiting:
                    self._waiting.add(files.folder)
                    self._problems.append(
                        f"{files.folder} waits for its first step: run {files.run_id} is the name"
                        " of another job, too"
                    )
                continue
            self._waiting.discard(files.folder)
            files.place(placement.run_id, placement.epoch)
            if placement.note and placement.note not in self._notes:
                self._notes.add(placement.note)
                self._problems.append(placement.note)
            placed.append(files)
        return placed

    def _process_folders(self) -> Iterator[Path]:
        try:
            only = self._only_run
            runs = run_folders(self._spool_dir) if only is None else [self._spool_dir / only]
        except FileNotFoundError:
            return
        for run in runs:
            try:
                yield from process_folders(run)
            except FileNotFoundError:
                continue
            except OSError as error:
                if run not in self._unreadable:
                    self._problems.append(f"{run} can't be read: {error.strerror}")
                    self._unreadable.add(run)

    def _store_manifests(self) -> None:
        """Store the new manifests; most ranks share one."""
        rows, self._new_manifests = self._new_manifests, []
        new = {(row["run_id"], row["manifest_hash"]): row for row in rows}
        for key in self._manifests & new.keys():
            del new[key]
        self._manifests.update(new)
        self._upsert("manifests", list(new.values()))

    def _follow(self, files: ProcessFiles) -> None:
        run_id = files.run_id
        if run_id not in self._resumes:
            self._resumes[run_id] = self._sink.resume(run_id)
        resume = self._resumes[run_id]
        if resume.source_format not in {None, "rankscope"}:
            raise SpoolFolderError(
                f"{files.folder} belongs to run {run_id!r}, and the store holds an import of"
                f" format {resume.source_format} under that name: use another store or run name"
            )
        if self._clocks is None:
            self._clocks = AnchorClocks(self._sink.clocks(), self._new_clocks.append)
        tail = ProcessTail(
            files,
            clock=self._clocks.clock_map(
                files.identity, declared_error_ns=files.declared_clock_error_ns
            ),
            resume=resume,
            grace_ns=self._grace_ns,
            deaths=self._deaths,
            chunk_rows=self._batch_rows // CHUNKS_PER_BATCH,
        )
        self._active[files.folder] = tail
        self._epochs.setdefault((run_id, files.epoch), _Epoch()).processes.append(tail)
        self._num_processes += 1

    def _poll_processes(self, now_ns: int) -> None:
        rows: dict[str, list[Row]] = {"groups": [], "events": [], "kernels": []}
        budget = LineBudget()
        for folder, tail in list(self._active.items()):
            try:
                new = tail.poll(now_ns=now_ns, budget=budget)
            except Exception as error:  # noqa: BLE001  # one process, whatever it wrote
                self._abandon(tail, error)
                continue
            if tail.has_more_lines and budget.left_bytes > 0:  # it had its share: others are first
                self._active[folder] = self._active.pop(folder)
            for table, of_process in new.items():
                rows[table] += of_process
            self._unreadable |= tail.unreadable
            self._problems += tail.problems
            tail.problems.clear()
        for epoch in self._epochs.values():
            rows["events"] += _stalled_events(epoch)
        for table, of_table in rows.items():
            self._upsert(table, of_table)

    def _batches(self) -> Iterator[list[tuple[ProcessTail, Cut]]]:
        """Yield batches of cuts until all segments have few new rows.

        The ranks go on writing meanwhile. Their few new rows wait for the next poll, because
        each would be one more small insert.
        """
        has_more, num_cuts = True, 0
        while has_more and num_cuts < CUTS_PER_POLL:
            has_more = False
            batch: list[RawCut] = []
            num_rows = 0
            for raw in self._cuts():
                batch.append(raw)
                num_cuts += 1
                num_rows += raw.num_rows
                tail = raw.tail
                has_more |= tail.has_ended or raw.num_rows >= FEW_ROWS or tail.has_waiting_segments
                if num_rows >= self._batch_rows:
                    yield self._decoded(batch)
                    batch, num_rows = [], 0
            if batch:
                yield self._decoded(batch)

    def _cuts(self) -> Iterator[RawCut]:
        for tail in list(self._active.values()):
            with self._abandoning(tail):
                yield from tail.cuts(now_ns=self._monotonic_ns())

    def _decoded(self, batch: list[RawCut]) -> list[tuple[ProcessTail, Cut]]:
        """Return the cuts of a batch, without those of processes that can't be read any more."""
        now_ns = self._monotonic_ns()
        for raw in batch:
            with self._abandoning(raw.tail):
                raw.extend(now_ns=now_ns)
        try:
            return [(raw.tail, cut) for raw, cut in zip(batch, decode_cuts(batch), strict=True)]
        except Exception:  # noqa: BLE001  # of one process, which is found by decoding each alone
            cuts: list[tuple[ProcessTail, Cut]] = []
            for raw in batch:
                with self._abandoning(raw.tail):
                    cuts += [(raw.tail, cut) for cut in decode_cuts([raw])]
            return cuts

    @contextmanager
    def _abandoning(self, tail: ProcessTail) -> Iterator[None]:
        """Abandon a process after an error, whatever it wrote: the others go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # see above
            self._abandon(tail, error)

    def _abandon(self, tail: ProcessTail, error: Exception) -> None:
        """Stop following a folder that was removed or can't be read any more."""
        if isinstance(error, OSError) and error.errno in TEMPORARY:
            return
        folder = tail.files.folder
        if folder not in self._active:
            return
        self._problems.append(
            f"{folder} can't be read any more ({error.strerror}): what was read of it is kept"
            if isinstance(error, OSError)
            else _defect(folder, error)
        )
        tail.close()
        tail.state = LOST
        row = tail.changed_row()
        self._upsert("ranks", [row] if row is not None else [])
        del self._active[folder]
        self._done.add(folder)

    def _send_cuts(self, totals: Counter[str]) -> None:
        if not self._pending_cuts:
            return
        self._sink.ingest([cut for _, cut in self._pending_cuts])
        for tail, cut in self._pending_cuts:
            tail.advance(cut)
            totals.update(
                cuts=1,
                spans=cut.rows.spans.num_rows,
                steps=cut.rows.steps.num_rows,
                torn=cut.num_torn,
                bad=cut.rows.bad_rows.num_rows,
            )
        self._pending_cuts = []

    def _store_states(self) -> None:
        ranks = [tail.changed_row() for tail in self._active.values()]
        self._upsert("ranks", [row for row in ranks if row is not None])
        self._upsert("runs", [row for epoch in self._epochs.values() for row in _changed(epoch)])

    def _upsert(self, table: str, rows: list[Row]) -> None:
        if not rows:
            return
        if table in {"ranks", "runs"}:
            revision = time.time_ns()
            rows = [{**row, "revision": revision} for row in rows]
        self._pending_rows.append((table, rows))
        self._flush_rows()

    def _flush_rows(self) -> None:
        """Store descriptions in order; those that fail stay for the next poll."""
        while self._pending_rows:
            table, rows = self._pending_rows[0]
            self._sink.upsert(table, rows)
            del self._pending_rows[0]

    def _delete_segments(self) -> None:
        if self._segment_policy is SegmentPolicy.DELETE:
            for tail in self._active.values():
                tail.delete_segments()

    def _drop_finished(self) -> None:
        self._delete_segments()
        for folder, tail in list(self._active.items()):
            if tail.is_finished:
                self._problems += tail.problems
                tail.close()
                del self._active[folder]
                self._done.add(folder)
                if not tail.unreadable:  # else the folder holds rows that were never read
                    self._stored.append(folder)


def _defect(folder: Path, error: Exception) -> str:
    """Return what to report of an error that no file of a process should cause."""
    return f"{folder} is read no further: {describe_defect(error)}; what was read of it is kept"


def _stalled_events(epoch: _Epoch) -> list[Row]:
    """Return the events of stalled processes, of all that are silent once one has been for long.

    One alone would look like the only one that is blocked, and the others as if they were not.
    """
    events = [row for tail in epoch.processes for row in tail.stalled_event()]
    if events:
        for tail in epoch.processes:
            events += tail.stalled_event(least_ns=STALL_NS // 2)
    return events


def _changed(epoch: _Epoch) -> list[Row]:
    """Return the epoch's row of table ``runs`` if it changed since the last call."""
    lowest = min(epoch.processes, key=lambda tail: tail.files.identity.rank)
    states = [tail.state for tail in epoch.processes]
    ends = [tail.exit_ns for tail in epoch.processes if tail.exit_ns is not None]
    ended_ns = max(ends, default=None) if run_state(states) != RUNNING else None
    current = (lowest.files.process, run_state(states), ended_ns, lowest.files.derived)
    if current == epoch.stored:
        return []
    epoch.stored = current
    started_ns = lowest.files.identity.anchor_unix_ns
    return [run_row(lowest.files, states=states, created_ns=started_ns, ended_ns=ended_ns)]
