"""Deletion of runs: a tombstone first, then the run's rows, then rows that still arrive.

The tombstone hides the run from every list at once, and outlives it: a batch that arrives late, or
a spool that is read again, belongs to a deleted run and is refused. Rows that were in progress
when the tombstone was written are removed by a later sweep.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

from ..errors import RunDeletedError
from ..identity import check_run_name
from .removal import apply_deleted_masks, wait_for_removals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..identity import Row
    from ..spool.cut import Cut, Placement, ProcessFacts, Resume, Sink
    from ..store.store import Store

REFRESH_NS = NS_PER_S
"""Age from which on the cached tombstones are read again; rows that arrive before are swept."""

REQUESTED, EXPIRED = "asked", "expired"
"""Reasons of a deletion, as stored: requested by a user, or the end of the run's retention."""

TOMBSTONES = "deletions"

SELECT_TABLES = """
SELECT table FROM system.columns
WHERE database = currentDatabase() AND name = 'run_id' AND table != {tombstones:String}
    AND table IN (
        SELECT name FROM system.tables
        WHERE database = currentDatabase() AND (
            engine = 'Distributed' OR engine LIKE '%MergeTree' AND name NOT LIKE '%\\_local'
        )
    )
ORDER BY table
"""

SELECT_TOMBSTONES = "SELECT run_id, at_ns, reason, done_ns FROM deletions FINAL"

COUNT_TOMBSTONES = "SELECT count() AS n FROM deletions WHERE run_id = {run_id:String}"

COUNT_RUN = """
SELECT replaceRegexpOne(_table, '_local$', '') AS table, count() AS num_rows
FROM merge(currentDatabase(), {tables:String})
WHERE run_id = {run_id:String} GROUP BY table ORDER BY table = 'runs', table
"""

SELECT_LATE = """
SELECT DISTINCT run_id FROM merge(currentDatabase(), {tables:String})
WHERE run_id IN (SELECT run_id FROM deletions) ORDER BY run_id
"""

HIDE_RUN = (
    "DELETE FROM {table:Identifier} WHERE run_id = {run_id:String}"
    " SETTINGS lightweight_deletes_sync = 0"
)


def was_deleted(store: Store, run_id: str) -> bool:
    """Return whether the run has a tombstone, with a query of its own."""
    return bool(store.rows(COUNT_TOMBSTONES, {"run_id": run_id})[0]["n"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Result of a deletion."""

    run_id: str
    at_ns: int
    """Unix time at which the run was first deleted."""

    num_rows: dict[str, int]
    """Number of removed rows by table; tables without any are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tombstone:
    at_ns: int
    reason: str
    done_ns: int | None = None


class Deletions:
    """The tombstones of one store, cached. Threads may share it.

    Args:
        unix_ns: Clock of the tombstones.
        monotonic_ns: Clock of the cache's age.
    """

    def __init__(
        self,
        store: Store,
        *,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._known: dict[str, _Tombstone] = {}
        self._read_ns: int | None = None

    def is_deleted(self, run_id: str) -> bool:
        """Return whether the run has a tombstone; another process's one counts within a second.

        Raises:
            StoreError: The tombstones could not be read.
        """
        return self.deleted_ns(run_id) is not None

    def deleted_ns(self, run_id: str) -> int | None:
        """Return the Unix time of the run's deletion; None if it was not deleted."""
        now_ns = self._monotonic_ns()
        if self._read_ns is None or now_ns - self._read_ns >= REFRESH_NS:
            self._refresh()
        tombstone = self._known.get(run_id)
        return None if tombstone is None else tombstone.at_ns

    def has_rows(self, run_id: str) -> bool:
        """Return whether any table has rows of the run, even if the run has no description."""
        bound = {"tables": self._tables(), "run_id": run_id}
        return bool(self._store.rows(COUNT_RUN, bound))

    def check(self, run_id: str) -> None:
        """Check that a run may be written.

        Raises:
            RunDeletedError: It was deleted.
        """
        at_ns = self.deleted_ns(run_id)
        if at_ns is not None:
            raise RunDeletedError(run_id, at_ns=at_ns)

    def delete(self, run_id: str, *, reason: str = REQUESTED) -> Deletion:
        """Delete a run. May be repeated.

        No query sees its rows when this returns; the engine frees their bytes in the background.
        An interrupted deletion is completed by the next `sweep`.

        Raises:
            StoreQueryError: The engine took too long; the tombstone is in place.
            RunNameError: No run can have this name.
        """
        check_run_name(run_id)
        self._refresh()
        tombstone = self._known.get(run_id)
        if tombstone is None:
            tombstone = _Tombstone(at_ns=self._unix_ns(), reason=reason)
            self._write(run_id, tombstone)
        bound = {"tables": self._tables(), "run_id": run_id}
        removed = {row["table"]: row["num_rows"] for row in self._store.rows(COUNT_RUN, bound)}
        for table in removed:
            self._store.command(HIDE_RUN, {"table": table, "run_id": run_id})
        wait_for_removals(self._store, removed)
        apply_deleted_masks(self._store, removed)
        self._write(run_id, replace(tombstone, done_ns=self._unix_ns()))
        return Deletion(run_id=run_id, at_ns=tombstone.at_ns, num_rows=removed)

    def sweep(self) -> tuple[str, ...]:
        """Remove rows that arrived after a tombstone; return the runs that had any."""
        self._refresh()
        rows = self._store.rows(SELECT_LATE, {"tables": self._tables()})
        late = tuple(row["run_id"] for row in rows)
        unfinished = {run_id for run_id, stone in self._known.items() if stone.done_ns is None}
        for run_id in sorted(unfinished.union(late)):
            self.delete(run_id)
        return late

    def _tables(self) -> str:
        """Return a pattern of all tables with rows of runs, those of later migrations included."""
        rows = self._store.rows(SELECT_TABLES, {"tombstones": TOMBSTONES})
        return f"^({'|'.join(row['table'] for row in rows)})$"

    def _write(self, run_id: str, tombstone: _Tombstone) -> None:
        row = {
            "run_id": run_id,
            **asdict(tombstone),
            "revision": 1 if tombstone.done_ns is None else 2,
        }
        self._store.insert_rows(TOMBSTONES, [row])
        with self._lock:
            self._known = {**self._known, run_id: tombstone}

    def _refresh(self) -> None:
        began_ns = self._monotonic_ns()
        tombstones = {
            row.pop("run_id"): _Tombstone(**row) for row in self._store.rows(SELECT_TOMBSTONES)
        }
        with self._lock:
            # Merged, not replaced: a tombstone may have been written here during the query.
            self._known = {**self._known, **tombstones}
            self._read_ns = began_ns


class DeletedRunFilter:
    """A sink that drops rows of deleted runs and passes on all others.

    Dropped cuts count as taken, so the tail of a spool goes on behind them and frees their
    segments.
    """

    def __init__(self, sink: Sink, deletions: Deletions) -> None:
        self._sink = sink
        self._deletions = deletions

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        """Return where the sink behind stores each process."""
        return self._sink.place(processes)

    def resume(self, run_id: str) -> Resume:
        """Return what the sink behind holds of a run."""
        return self._sink.resume(run_id)

    def clocks(self) -> list[Row]:
        """Return the host clocks that the sink behind knows."""
        return self._sink.clocks()

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions of runs that are not deleted."""
        kept = [row for row in rows if not self._deletions.is_deleted(row.get("run_id", ""))]
        if kept:
            self._sink.upsert(table, kept)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of cuts whose runs are not deleted."""
        kept = [cut for cut in cuts if not self._deletions.is_deleted(cut.key.run_id)]
        if kept:
            self._sink.ingest(kept)
