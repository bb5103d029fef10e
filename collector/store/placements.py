"""Placements: the run and the epoch under which each traced process is stored.

Two jobs may declare one run name. A process of another launch than those stored is the next epoch
of the run if it continues its steps, and a run of its own if it does not (decision 74).
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import StoreError
from ..identity import MAX_INT32
from ..spool.cut import Placement
from ..spool.descriptions import RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..identity import Row
    from ..spool.cut import ProcessFacts
    from .store import Store

SELECT_PLACED = """
SELECT
    stored_run, stored_epoch, declared_epoch, rank, process, job, world_size, layout, started_ns,
    at_ns, note
FROM placements FINAL WHERE declared_run = {run_id:String} OR stored_run = {run_id:String}
ORDER BY at_ns, process
"""

SELECT_UNPLACED = """
SELECT
    run_id AS stored_run, epoch AS stored_epoch, epoch AS declared_epoch, rank, process, '' AS job,
    0 AS world_size, '' AS layout, ifNull(started_ns, 0) AS started_ns, 0 AS at_ns, '' AS note
FROM ranks FINAL WHERE run_id = {run_id:String}
"""
"""Ranks that were stored without a placement, by an older version or another sender."""

SELECT_RANKS = """
SELECT process, exit_state, ifNull(exit_ns, 0) AS ended_ns FROM ranks FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32}
"""

SELECT_STEPS = """
SELECT count() AS num_rows, min(step) AS first_step, max(end_ns) AS last_end_ns FROM steps
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step >= 0
"""

SELECT_SPAN_STEPS = """
SELECT count() AS num_rows, min(step) AS first_step, max(start_ns + duration_ns) AS last_end_ns
FROM spans WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step >= 0
"""

SELECT_USED = """
SELECT run_id FROM runs WHERE run_id = {run_id:String} UNION ALL
SELECT run_id FROM ranks WHERE run_id = {run_id:String} UNION ALL
SELECT run_id FROM ledger WHERE run_id = {run_id:String} UNION ALL
SELECT run_id FROM owners WHERE run_id = {run_id:String} UNION ALL
SELECT run_id FROM deletions WHERE run_id = {run_id:String} UNION ALL
SELECT stored_run FROM placements WHERE stored_run = {run_id:String}
LIMIT 1
"""

SELECT_DELETED = "SELECT run_id FROM deletions WHERE run_id = {run_id:String} LIMIT 1"

SELECT_NOTES = """
SELECT stored_run AS run_id, argMax(note, at_ns) AS newest FROM placements FINAL
WHERE note != '' GROUP BY stored_run
"""

WAIT_NS = 600_000_000_000
"""Longest wait for the first step of a process whose name is another job's: torch's default timeout
of a collective. A start that takes longer hangs, and must be shown."""

KNOWN_AGE_NS = 1_000_000_000
KNOWN_AGE_FACTOR = 10
"""What was read of a name is used for a second, and for this many times the time that reading took:
all hosts of a job ask at once when it starts."""

MAX_KNOWN = 16
MAX_WAITING = 100_000
MAX_RUN_LETTERS = 120
"""Leaves space for a number after the name."""

Incarnation = tuple[str, int]
"""Run and epoch, as stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A process that has a placement."""

    stored_run: str
    stored_epoch: int
    declared_epoch: int
    rank: int
    process: str
    job: str
    world_size: int
    layout: str
    started_ns: int
    at_ns: int
    note: str

    @property
    def incarnation(self) -> Incarnation:
        """Run and epoch, as stored."""
        return self.stored_run, self.stored_epoch

    def is_like(self, new: ProcessFacts) -> bool:
        """Return whether size and layout do not differ, as far as they are known."""
        return (not self.world_size or self.world_size == new.world_size) and (
            not self.layout or not new.layout or self.layout == new.layout
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Stored state of an incarnation."""

    ended_ns: dict[str, int | None]
    """End of each process, by process; None while it runs."""

    first_step: int | None
    last_end_ns: int
    """End of its last step; 0 without any."""

    @property
    def num_running(self) -> int:
        """Number of processes that have not ended."""
        return sum(end is None for end in self.ended_ns.values())

    @property
    def has_ended(self) -> bool:
        """True if its processes are known and all have ended."""
        return bool(self.ended_ns) and not self.num_running


WAIT, OTHER_RUN = "wait", "other run"
Decision = Incarnation | str
"""An incarnation, `WAIT` or `OTHER_RUN`."""


def decide(
    new: ProcessFacts,
    placed: Sequence[Placed],
    progress_of: Callable[[Incarnation], Progress],
    *,
    has_waited: bool,
) -> Decision:
    """Return where a process belongs among those of the same run name.

    Args:
        new: The process; it has no placement.
        placed: Processes of the name, oldest placement first; at least one.
        progress_of: Returns what is stored of an incarnation.
        has_waited: Whether its first step was waited for long enough.
    """
    launched = [other for other in placed if new.job and other.job == new.job]
    if launched:
        return _within_job(new, launched, placed)
    if not new.job:
        incarnation = _as_late_rank(new, placed, progress_of)
        if incarnation is not None:
            return incarnation
    newest = {other.stored_run: other for other in placed}  # of each run, the newest placement
    for other in reversed(newest.values()):
        if new.epoch > max(p.declared_epoch for p in placed if p.stored_run == other.stored_run):
            return _next_epoch(other.stored_run, new, placed)  # a declared restart
    is_unclear = new.first_step is None and not new.has_ended
    decisions = [
        _after(new, other, placed, progress_of(other.incarnation), is_unclear=is_unclear)
        for other in reversed(newest.values())
    ]
    for decision in decisions:
        if decision not in {WAIT, OTHER_RUN}:
            return decision
    return WAIT if WAIT in decisions and not has_waited else OTHER_RUN


def _within_job(
    new: ProcessFacts, launched: Sequence[Placed], placed: Sequence[Placed]
) -> Decision:
    """Return the place in the process's own launch: a second process of a rank is a restart."""
    incarnations: dict[Incarnation, list[Placed]] = {}
    for other in launched:
        if other.declared_epoch == new.epoch:
            incarnations.setdefault(other.incarnation, []).append(other)
    for incarnation, members in incarnations.items():
        if members[0].is_like(new) and all(other.rank != new.rank for other in members):
            return incarnation
    return _next_epoch(launched[0].stored_run, new, placed)


def _as_late_rank(
    new: ProcessFacts,
    placed: Sequence[Placed],
    progress_of: Callable[[Incarnation], Progress],
) -> Decision | None:
    """Return the incarnation that lacks this rank; of several, the one that began closest to it."""
    incarnations: dict[Incarnation, list[Placed]] = {}
    for other in placed:
        if not other.job and other.declared_epoch == new.epoch:
            incarnations.setdefault(other.incarnation, []).append(other)
    fitting = []
    for incarnation, members in incarnations.items():
        if any(other.rank == new.rank or not other.is_like(new) for other in members):
            continue
        progress = progress_of(incarnation)
        ends = [end for end in progress.ended_ns.values() if end is not None]
        if progress.has_ended and max(ends) and max(ends) < new.started_ns:
            continue  # that job was over before this process began
        distance_ns = min(abs(other.started_ns - new.started_ns) for other in members)
        fitting.append((distance_ns, incarnation))
    return min(fitting)[1] if fitting else None


def _after(
    new: ProcessFacts,
    last: Placed,
    placed: Sequence[Placed],
    progress: Progress,
    *,
    is_unclear: bool,
) -> Decision:
    """Return whether a process of an unknown launch continues an incarnation."""
    members = [other for other in placed if other.incarnation == last.incarnation]
    if not progress.ended_ns:
        return WAIT  # nothing of it is stored yet
    goes_on = (
        new.first_step is not None
        and progress.first_step is not None
        and new.first_step > progress.first_step
        and last.is_like(new)
    )
    same_rank = [other.process for other in members if other.rank == new.rank]
    is_replaced = not new.job and not last.job and bool(same_rank) and progress.num_running > 0
    if is_replaced and all(progress.ended_ns.get(other) is not None for other in same_rank):
        # One rank was restarted while the others run, by a launcher that declares nothing.
        if is_unclear:
            return WAIT
        return last.incarnation if goes_on else OTHER_RUN
    runs_at_once = progress.last_end_ns > new.started_ns
    if is_unclear and not runs_at_once:
        return WAIT
    # A job that ended before its first step took nothing that could be continued.
    has_no_steps = progress.first_step is None or (new.first_step is None and new.has_ended)
    is_retry = has_no_steps and progress.has_ended and last.is_like(new)
    if not runs_at_once and (goes_on or is_retry):
        return _next_epoch(last.stored_run, new, placed)
    return OTHER_RUN


def _next_epoch(run_id: str, new: ProcessFacts, placed: Sequence[Placed]) -> Incarnation:
    highest = max(other.stored_epoch for other in placed if other.stored_run == run_id)
    return run_id, min(max(new.epoch, highest + 1), MAX_INT32)


class _Known:
    """The placements of one declared run name, with an index of those with a launch key."""

    def __init__(self, placed: Iterable[Placed]) -> None:
        self.by_process: dict[str, Placed] = {}
        self.stored_runs: set[str] = set()
        self._launches: dict[tuple[str, int], dict[Incarnation, tuple[Placed, set[int]]]] = {}
        for other in placed:
            self.add(other)

    def add(self, process: Placed) -> None:
        """Add the placement of a process that has none."""
        self.by_process[process.process] = process
        self.stored_runs.add(process.stored_run)
        if process.job:
            launch = self._launches.setdefault((process.job, process.declared_epoch), {})
            launch.setdefault(process.incarnation, (process, set()))[1].add(process.rank)

    def find_vacancy(self, new: ProcessFacts) -> Placed | None:
        """Return a process of the same launch, whose incarnation lacks the rank of a new one.

        The same as `decide` finds among all processes, at a cost that does not grow with them:
        12,288 ranks begin at once.
        """
        launch = self._launches.get((new.job, new.epoch), {})
        return next(
            (
                first
                for first, ranks in launch.values()
                if first.is_like(new) and new.rank not in ranks
            ),
            None,
        )


class Placements:
    """Placements of the processes of a store. Threads may share it."""

    def __init__(self, store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._asked_ns: dict[str, int] = {}
        self._known: OrderedDict[str, tuple[int, _Known]] = OrderedDict()
        """By declared run: until when what was read of it is used, monotonic."""

        self._lock = threading.Lock()

    def place(
        self,
        processes: Sequence[ProcessFacts],
        may_write: Callable[[str], bool],
    ) -> list[Placement | None]:
        """Return where each process is stored; None while that cannot be decided.

        Args:
            processes: The processes. What was decided for one before is not changed.
            may_write: Returns whether the sender may write to a run; it becomes the owner of a run
                that has none. To another owner's run nothing is added.

        Raises:
            StoreError: The placements cannot be read or written.
        """
        placements: dict[str, Placement | None] = {}
        # Read once for all ranks of a job that come together.
        progress_of = functools.cache(self._read_progress)
        with self._lock:
            for run_id in {process.run_id for process in processes}:
                known = self._read(run_id)
                is_deleted = bool(self._store.rows(SELECT_DELETED, {"run_id": run_id}))
                new_rows: list[Row] = []
                for process in sorted(processes, key=lambda process: process.started_ns):
                    if process.run_id != run_id or process.process in placements:
                        continue
                    if is_deleted and process.process not in known.by_process:
                        # Refused there, as it should be.
                        placements[process.process] = Placement(run_id=run_id, epoch=process.epoch)
                        continue
                    placements[process.process] = self._place_one(
                        process, known, new_rows, may_write, progress_of
                    )
                try:
                    self._store.insert_rows("placements", new_rows)
                except StoreError:
                    self._known.pop(run_id, None)
                    raise
        return [placements[process.process] for process in processes]

    def _read(self, run_id: str) -> _Known:
        """Return what is known of a name; what others have written since is up to a second old."""
        until_ns, known = self._known.pop(run_id, (0, None))
        begun_ns = time.monotonic_ns()
        if known is None or begun_ns >= until_ns:
            rows = self._store.rows(SELECT_UNPLACED, {"run_id": run_id})
            rows += self._store.rows(SELECT_PLACED, {"run_id": run_id})
            placed: dict[str, Placed] = {}
            for row in rows:
                placed.pop(row["process"], None)  # a placement replaces what a rank's row made
                placed[row["process"]] = Placed(**row)
            known = _Known(placed.values())
            now_ns = time.monotonic_ns()
            until_ns = now_ns + max(KNOWN_AGE_NS, KNOWN_AGE_FACTOR * (now_ns - begun_ns))
        self._known[run_id] = (until_ns, known)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _place_one(
        self,
        new: ProcessFacts,
        known: _Known,
        new_rows: list[Row],
        may_write: Callable[[str], bool],
        progress_of: Callable[[Incarnation], Progress],
    ) -> Placement | None:
        same = known.by_process.get(new.process)
        if same is not None:
            return Placement(run_id=same.stored_run, epoch=same.stored_epoch, note=same.note)
        mate = known.find_vacancy(new) if new.job else None
        if mate is not None and may_write(mate.stored_run):
            placement = Placement(run_id=mate.stored_run, epoch=mate.stored_epoch, note=mate.note)
        else:
            decided = self._decide(new, known, may_write, progress_of)
            if decided is None:
                return None
            placement = decided
        self._asked_ns.pop(new.process, None)
        row = _row(new, placement, at_ns=self._unix_ns())
        new_rows.append(row)
        known.add(Placed(**{name: row[name] for name in Placed.__slots__}))
        return placement

    def _decide(
        self,
        new: ProcessFacts,
        known: _Known,
        may_write: Callable[[str], bool],
        progress_of: Callable[[Incarnation], Progress],
    ) -> Placement | None:
        """Compare a process with all of the name; return None if it must wait."""
        allowed = {run: may_write(run) for run in known.stored_runs}
        placed = [other for other in known.by_process.values() if allowed[other.stored_run]]
        decision: Decision = OTHER_RUN
        if placed:
            decision = decide(new, placed, progress_of, has_waited=self._has_waited(new))
        if decision == WAIT:
            return None
        if isinstance(decision, str):
            is_first = not known.by_process
            decision = (self._free_run(new.run_id, may_write, is_first=is_first), new.epoch)
        run_id, epoch = decision
        note = _note(new, decision, known.by_process)
        return Placement(run_id=run_id, epoch=epoch, note=note)

    def _read_progress(self, incarnation: Incarnation) -> Progress:
        bound = {"run_id": incarnation[0], "epoch": incarnation[1]}
        ranks = self._store.rows(SELECT_RANKS, bound)
        steps = self._store.rows(SELECT_STEPS, bound)[0]
        if not steps["num_rows"]:
            steps = self._store.rows(SELECT_SPAN_STEPS, bound)[0]
        has_steps = bool(steps["num_rows"])
        return Progress(
            ended_ns={
                row["process"]: None if row["exit_state"] in {"", RUNNING} else row["ended_ns"]
                for row in ranks
            },
            first_step=steps["first_step"] if has_steps else None,
            last_end_ns=steps["last_end_ns"] if has_steps else 0,
        )

    def _has_waited(self, new: ProcessFacts) -> bool:
        now_ns = time.monotonic_ns()
        while len(self._asked_ns) >= MAX_WAITING:
            del self._asked_ns[next(iter(self._asked_ns))]
        return now_ns - self._asked_ns.setdefault(new.process, now_ns) >= WAIT_NS

    def _free_run(self, run_id: str, may_write: Callable[[str], bool], *, is_first: bool) -> str:
        """Return the declared name if no process has it, else the first free one after it."""
        if is_first and may_write(run_id):
            return run_id
        number = 2
        while True:
            name = f"{run_id[:MAX_RUN_LETTERS]}-{number}"
            if not self._store.rows(SELECT_USED, {"run_id": name}) and may_write(name):
                return name
            number += 1


def _row(new: ProcessFacts, placement: Placement, *, at_ns: int) -> Row:
    return {
        "declared_run": new.run_id,
        "declared_epoch": new.epoch,
        "stored_run": placement.run_id,
        "stored_epoch": placement.epoch,
        "rank": new.rank,
        "process": new.process,
        "job": new.job,
        "world_size": new.world_size,
        "layout": new.layout,
        "started_ns": new.started_ns,
        "at_ns": at_ns,
        "note": placement.note,
    }


def _note(new: ProcessFacts, decision: Incarnation, known: dict[str, Placed]) -> str:
    """Return why a process is stored elsewhere than it declares, the same for all its ranks."""
    run_id, epoch = decision
    mate = next((other for other in known.values() if other.incarnation == decision), None)
    if mate is not None:
        return mate.note
    if new.job and any(other.job == new.job for other in known.values()):
        if run_id not in {other.stored_run for other in known.values()}:
            return (
                f"{run_id}: other ranks of this job have another owner; give all its agents tokens"
                " of one holder, and `rankscope serve --spool-owner` that holder"
            )
    elif run_id != new.run_id and all(other.stored_run != run_id for other in known.values()):
        return (
            f"{run_id}: another job has the run name {new.run_id}; give each job a name of its own,"
            " or RANKSCOPE_EPOCH=1 to a restart"
        )
    if epoch != new.epoch:
        return f"{run_id}: a job of the same run name continues this run, as epoch {epoch}"
    return ""


def read_notes(store: Store) -> dict[str, str]:
    """Return, by run, why the newest process that is not stored as it declares is not."""
    return {row["run_id"]: row["newest"] for row in store.rows(SELECT_NOTES)}
