"""Follow a spool folder: everything that traced processes write there goes to a sink, once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from ..clock.map import AnchorClocks
from .descriptions import LOST, RUNNING, manifest_row, run_row, run_state
from .process import ProcessFiles, SpoolFolderError
from .process_tail import ProcessTail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..clock.map import Clocks
    from ..identity import Row
    from .cut import Cut, Resume, Sink

GRACE_NS = 2_000_000_000
"""How long a claimed row may stay uncommitted before it counts as torn."""

FEW_ROWS = 4096
"""Rows of one segment that are not worth another round of the same look."""

BATCH_ROWS = 262_144
"""Rows of one insert: large enough to be quick, small enough to hold in memory."""

CHUNKS_A_BATCH = 4
"""So that the last reading of a batch makes it a quarter larger at most."""


class SegmentPolicy(Enum):
    """What becomes of a segment once all its rows are stored."""

    KEEP = "keep"
    DELETE = "delete"
    """Delete it, so that a long job never fills its spool."""

    DELETE_WHILE_RUNNING = "delete while running"
    """Delete it as long as its process runs; what an ended one left stays to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailProgress:
    """What one look at the spool brought."""

    num_cuts: int
    num_spans: int
    num_steps: int
    num_torn: int
    num_bad: int
    num_processes: int
    """Processes seen so far."""

    num_running: int
    """Of these, the ones that have not ended."""

    num_refused: int
    """Segments and folders so far that can't be read, of a newer version say, and are left."""

    problems: tuple[str, ...]
    """What can't be read and is left as it is, one plain line each, told once."""


@dataclass(slots=True)
class _Totals:
    num_cuts: int = 0
    num_spans: int = 0
    num_steps: int = 0
    num_torn: int = 0
    num_bad: int = 0

    def add(self, cut: Cut) -> None:
        self.num_cuts += 1
        self.num_spans += cut.rows.spans.num_rows
        self.num_steps += cut.rows.steps.num_rows
        self.num_torn += cut.num_torn
        self.num_bad += cut.rows.bad_rows.num_rows


@dataclass(slots=True)
class _Epoch:
    """The processes of one epoch of a run, and what the sink was told of it."""

    processes: list[ProcessTail] = field(default_factory=list)
    told: tuple[object, ...] = ()


class SpoolTail:
    """A cursor over a spool folder. One thread polls it.

    A restarted tail goes on where the sink's ledger ends, and a cut whose
    storing failed is sent again as it was.
    """

    def __init__(  # noqa: PLR0913  # the effects that it has come in here
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
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Prepare to follow ``spool_dir``, which need not exist yet.

        Args:
            spool_dir: Folder that holds one folder a run.
            sink: Takes the cuts, a `StoreWriter` for instance.
            segment_policy: What becomes of segments whose rows are all stored.
            only_run: Name of the one folder of a run to follow; None: all of them.
            clocks: Map the hosts' clocks; None: each host by the first anchor that came.
            batch_rows: Rows that are held in memory and given to the sink at once.
            grace_ns: How long a claimed row may stay uncommitted.
            monotonic_ns: Clock for the grace time.
            unix_ns: Clock for when rows were written.
        """
        self._spool_dir = Path(spool_dir)
        self._sink = sink
        self._only_run = only_run
        self._segment_fate = segment_policy
        self._batch_rows = batch_rows
        self._grace_ns = grace_ns
        self._monotonic_ns = monotonic_ns
        self._unix_ns = unix_ns
        self._clocks = clocks
        self._resumes: dict[str, Resume] = {}
        self._epochs: dict[tuple[str, int], _Epoch] = {}
        self._active: dict[Path, ProcessTail] = {}
        self._settled: set[Path] = set()
        self._shipped: list[Path] = []
        self._pending: list[tuple[ProcessTail, Cut]] = []
        self._untold: list[tuple[str, list[Row]]] = []
        self._manifests: set[tuple[str, str]] = set()
        self._new_manifests: list[Row] = []
        self._num_processes = 0
        self._refused: set[Path] = set()
        self._problems: list[str] = []

    def poll(self) -> TailProgress:
        """Bring everything new to the sink; return once it is stored.

        Raises:
            StoreError: The sink failed. Nothing is lost: the next poll sends the same again.
        """
        now_ns = self._monotonic_ns()
        totals = _Totals()
        self._flush()
        self._send(totals)
        self._discover()
        self._look(now_ns)
        self._tell_states()
        for batch in self._batches(now_ns):
            self._pending = batch
            self._send(totals)
            self._free()  # after an outage a look is long, and the ranks need the room
        self._conclude()
        self._tell_states()
        self._settle()
        problems, self._problems = tuple(self._problems), []
        return TailProgress(
            num_cuts=totals.num_cuts,
            num_spans=totals.num_spans,
            num_steps=totals.num_steps,
            num_torn=totals.num_torn,
            num_bad=totals.num_bad,
            num_processes=self._num_processes,
            num_running=sum(tail.state == RUNNING for tail in self._active.values()),
            num_refused=len(self._refused),
            problems=problems,
        )

    @property
    def settled(self) -> tuple[Path, ...]:
        """Folders of processes that have ended and of which every word is stored."""
        return tuple(self._shipped)

    @property
    def running(self) -> tuple[ProcessFiles, ...]:
        """The files of the processes that have not ended, in no order."""
        return tuple(tail.files for tail in self._active.values() if tail.state == RUNNING)

    def close(self) -> None:
        """Let go of the spool's files; the sink is left open."""
        for tail in self._active.values():
            tail.close()
        self._active.clear()

    def _discover(self) -> None:
        """Start to follow process folders that are new."""
        for folder in _process_folders(self._spool_dir, self._only_run):
            if folder in self._active or folder in self._settled:
                continue
            try:
                files = ProcessFiles(folder)
                self._follow(files)
                self._new_manifests.append(manifest_row(files.run_id, files.manifest))
            except FileNotFoundError:
                continue  # not written yet
            except (SpoolFolderError, OSError) as error:
                self._problems.append(str(error))
                self._settled.add(folder)
                self._refused.add(folder)
        self._tell_manifests()

    def _tell_manifests(self) -> None:
        """Store what is new of the configuration; most ranks share one."""
        rows, self._new_manifests = self._new_manifests, []
        fresh = {(row["run_id"], row["manifest_hash"]): row for row in rows}
        for key in self._manifests & fresh.keys():
            del fresh[key]
        self._manifests.update(fresh)
        self._upsert("manifests", list(fresh.values()))

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
            self._clocks = AnchorClocks(self._sink)
        tail = ProcessTail(
            files,
            clock=self._clocks.clock_map(files.identity),
            resume=resume,
            grace_ns=self._grace_ns,
            chunk_rows=self._batch_rows // CHUNKS_A_BATCH,
        )
        self._active[files.folder] = tail
        self._epochs.setdefault((run_id, files.identity.epoch), _Epoch()).processes.append(tail)
        self._num_processes += 1

    def _look(self, now_ns: int) -> None:
        groups: list[Row] = []
        events: list[Row] = []
        for tail in list(self._active.values()):
            try:
                words = tail.look(now_ns=now_ns)
            except OSError as error:
                self._let_go(tail, error)
                continue
            groups += words.groups
            events += words.events
            self._refused |= tail.refused
            self._problems += tail.problems
            tail.problems.clear()
        self._upsert("groups", groups)
        self._upsert("events", events)

    def _batches(self, now_ns: int) -> Iterator[list[tuple[ProcessTail, Cut]]]:
        """Yield cuts, a bounded number of rows at a time, until there is little news.

        Ranks write while we read: what came meanwhile, a few rows, would each
        time be a small insert more. It waits for the next look.
        """
        has_more = True
        while has_more:
            has_more = False
            batch: list[tuple[ProcessTail, Cut]] = []
            num_rows = 0
            for tail, cut in self._cuts(now_ns):
                batch.append((tail, cut))
                cut_rows = cut.key.end_row - cut.key.first_row
                num_rows += cut_rows
                has_more |= tail.is_over or cut_rows >= FEW_ROWS
                if num_rows >= self._batch_rows:
                    yield batch
                    batch, num_rows = [], 0
            if batch:
                yield batch

    def _cuts(self, now_ns: int) -> Iterator[tuple[ProcessTail, Cut]]:
        """Yield at most one cut for each segment of each process."""
        for tail in list(self._active.values()):
            try:
                for cut in tail.cuts(now_ns=now_ns):
                    yield tail, cut
            except OSError as error:
                self._let_go(tail, error)

    def _let_go(self, tail: ProcessTail, error: OSError) -> None:
        """Follow a folder no longer that was taken away or can't be read."""
        folder = tail.files.folder
        self._problems.append(
            f"{folder} can't be read any more ({error.strerror}): what was read of it is kept"
        )
        tail.close()
        tail.state = LOST
        row = tail.changed_row()
        self._upsert("ranks", [row] if row is not None else [])
        del self._active[folder]
        self._settled.add(folder)

    def _send(self, totals: _Totals) -> None:
        if not self._pending:
            return
        self._sink.ingest([cut for _, cut in self._pending])
        for tail, cut in self._pending:
            tail.advance(cut)
            totals.add(cut)
        self._pending = []

    def _conclude(self) -> None:
        events: list[Row] = []
        for tail in self._active.values():
            events += tail.conclude()
        self._upsert("events", events)

    def _tell_states(self) -> None:
        """Store the rows of ranks and runs that changed."""
        ranks = [tail.changed_row() for tail in self._active.values()]
        self._upsert("ranks", [row for row in ranks if row is not None])
        self._upsert("runs", [row for epoch in self._epochs.values() for row in _news(epoch)])

    def _upsert(self, table: str, rows: list[Row]) -> None:
        if not rows:
            return
        if table in {"ranks", "runs"}:
            revision = self._unix_ns()
            rows = [{**row, "revision": revision} for row in rows]
        self._untold.append((table, rows))
        self._flush()

    def _flush(self) -> None:
        """Send descriptions in order; what the sink did not take stays for the next poll."""
        while self._untold:
            table, rows = self._untold[0]
            self._sink.upsert(table, rows)
            del self._untold[0]

    def _free(self) -> None:
        """Delete segments that are stored, if that is wanted."""
        for tail in self._active.values():
            if self._segment_fate is SegmentPolicy.DELETE or (
                self._segment_fate is SegmentPolicy.DELETE_WHILE_RUNNING and not tail.is_over
            ):
                tail.free_segments()

    def _settle(self) -> None:
        """Stop following what has ended and is stored."""
        self._free()
        for folder, tail in list(self._active.items()):
            if tail.is_finished:
                self._problems += tail.problems
                tail.close()
                del self._active[folder]
                self._settled.add(folder)
                if not tail.refused:  # else it holds what was never read
                    self._shipped.append(folder)


def _news(epoch: _Epoch) -> list[Row]:
    """Return the epoch's row of table ``runs`` if it changed since the last call."""
    speaker = min(epoch.processes, key=lambda tail: tail.files.identity.rank)
    states = [tail.state for tail in epoch.processes]
    ends = [tail.exit_ns for tail in epoch.processes if tail.exit_ns is not None]
    ended_ns = max(ends, default=None) if run_state(states) != RUNNING else None
    told = (speaker.files.process, run_state(states), ended_ns, speaker.files.derived)
    if told == epoch.told:
        return []
    epoch.told = told
    started_ns = speaker.files.identity.anchor_unix_ns
    return [run_row(speaker.files, states=states, created_ns=started_ns, ended_ns=ended_ns)]


def _process_folders(spool_dir: Path, only_run: str | None) -> list[Path]:
    try:
        runs = run_folders(spool_dir) if only_run is None else [spool_dir / only_run]
        return sorted(folder for run in runs for folder in run.iterdir() if folder.is_dir())
    except FileNotFoundError:
        return []


def run_folders(spool_dir: Path) -> list[Path]:
    """Return the folders of the runs; what begins with a dot is the readers' own.

    Raises:
        FileNotFoundError: There is no spool yet.
    """
    return sorted(entry for entry in spool_dir.iterdir() if entry.is_dir() and entry.name[0] != ".")
