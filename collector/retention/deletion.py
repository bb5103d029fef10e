"""Delete a run for good: a tombstone first, then its rows, then whatever still comes.

The tombstone hides the run from every list at once and outlives it: a batch that
comes late, or a spool that is read again, finds the run deleted and is refused. Rows
that were on their way as the tombstone was written are swept up afterwards.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ..errors import RunDeletedError
from ..identity import check_run_name
from .removal import await_removals, free_hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..identity import Row
    from ..spool.cut import Cut, Resume, Sink
    from ..store.store import Store

REFRESH_NS = 1_000_000_000
"""How long a tombstone of another collector may stay unknown here; what slips in is swept up."""

ASKED, EXPIRED = "asked", "expired"
"""Why a run was deleted: somebody asked for it, or it was kept for long enough."""

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

COUNT_RUN = """
SELECT replaceRegexpOne(_table, '_local$', '') AS table, count() AS num_rows
FROM merge(currentDatabase(), {tables:String})
WHERE run_id = {run_id:String} GROUP BY table ORDER BY table = 'runs', table
"""

SELECT_LEFT = """
SELECT DISTINCT run_id FROM merge(currentDatabase(), {tables:String})
WHERE run_id IN (SELECT run_id FROM deletions) ORDER BY run_id
"""

HIDE_RUN = (
    "DELETE FROM {table:Identifier} WHERE run_id = {run_id:String}"
    " SETTINGS lightweight_deletes_sync = 0"
)


COUNT_TOMBSTONES = "SELECT count() AS n FROM deletions WHERE run_id = {run_id:String}"


def was_deleted(store: Store, run_id: str) -> bool:
    """Return whether the run has a tombstone, asking the store anew."""
    return bool(store.rows(COUNT_TOMBSTONES, {"run_id": run_id})[0]["n"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What a deletion removed."""

    run_id: str
    at_ns: int
    """When the run was first deleted, Unix time."""

    num_rows: dict[str, int]
    """By table; a table that held nothing of the run is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tombstone:
    at_ns: int
    reason: str
    done_ns: int | None = None


class Deletions:
    """The tombstones of one store. Threads share it.

    Args:
        store: The store.
        unix_ns: Clock of the tombstones.
        monotonic_ns: Clock for how old the known tombstones are.
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
        """Return whether the run has a tombstone; one of another process counts within a second.

        Raises:
            StoreError: The tombstones could not be read.
        """
        return self.deleted_ns(run_id) is not None

    def deleted_ns(self, run_id: str) -> int | None:
        """Return when the run was deleted, Unix time; None where it was not."""
        found = self._tombstones().get(run_id)
        return None if found is None else found.at_ns

    def holds(self, run_id: str) -> bool:
        """Return whether any table has rows of the run, whatever else is told of it."""
        bound = {"tables": self._tables(), "run_id": run_id}
        return bool(self._store.rows(COUNT_RUN, bound))

    def check(self, run_id: str) -> None:
        """Do nothing for a run that may take in rows.

        Raises:
            RunDeletedError: It has a tombstone.
        """
        at_ns = self.deleted_ns(run_id)
        if at_ns is not None:
            raise RunDeletedError(run_id, at_ns=at_ns)

    def delete(self, run_id: str, *, reason: str = ASKED) -> Deletion:
        """Delete a run; to do it again does no harm.

        No query sees its rows when this returns; the engine frees their bytes in the
        background. Cut short, it is finished by the next `sweep`.

        Raises:
            StoreQueryError: The engine took too long; the tombstone stands.
            RunNameError: No run can have this name.
        """
        check_run_name(run_id)
        self._refresh()
        tombstone = self._known.get(run_id)
        if tombstone is None:
            tombstone = _Tombstone(at_ns=self._unix_ns(), reason=reason)
            self._write(run_id, tombstone)
        removed = self._remove(run_id)
        free_hidden(self._store, removed)
        self._write(run_id, replace(tombstone, done_ns=self._unix_ns()))
        return Deletion(run_id=run_id, at_ns=tombstone.at_ns, num_rows=removed)

    def sweep(self) -> tuple[str, ...]:
        """Remove rows that came in behind a tombstone; return the runs that had any."""
        self._refresh()
        rows = self._store.rows(SELECT_LEFT, {"tables": self._tables()})
        left = tuple(row["run_id"] for row in rows)
        unfinished = {run_id for run_id, stone in self._known.items() if stone.done_ns is None}
        for run_id in sorted(unfinished.union(left)):
            self.delete(run_id)
        return left

    def _remove(self, run_id: str) -> dict[str, int]:
        bound = {"tables": self._tables(), "run_id": run_id}
        removed = {row["table"]: row["num_rows"] for row in self._store.rows(COUNT_RUN, bound)}
        for table in removed:
            self._store.command(HIDE_RUN, {"table": table, "run_id": run_id})
        await_removals(self._store, removed)
        return removed

    def _tables(self) -> str:
        """Return a pattern of every table with rows of runs, those of later migrations too."""
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

    def _tombstones(self) -> Mapping[str, _Tombstone]:
        now_ns = self._monotonic_ns()
        if self._read_ns is None or now_ns - self._read_ns >= REFRESH_NS:
            self._refresh()
        return self._known

    def _refresh(self) -> None:
        begun_ns = self._monotonic_ns()
        found = {
            row.pop("run_id"): _Tombstone(**row) for row in self._store.rows(SELECT_TOMBSTONES)
        }
        with self._lock:
            # One that was written here meanwhile may be younger than this reading.
            self._known = {**self._known, **found}
            self._read_ns = begun_ns


class UndeletedSink:
    """A sink that passes on what is of no deleted run; the rest counts as taken.

    A spool's tail goes on behind such cuts and frees their segments: nobody wants them.

    Args:
        sink: Where to.
        deletions: The tombstones.
    """

    def __init__(self, sink: Sink, deletions: Deletions) -> None:
        self._sink = sink
        self._deletions = deletions
        self.num_refused_rows = 0
        """Rows of cuts that were kept out."""

    def resume(self, run_id: str) -> Resume:
        """Return what the sink behind holds of a run."""
        return self._sink.resume(run_id)

    def clocks(self) -> list[Row]:
        """Return the host clocks that the sink behind knows."""
        return self._sink.clocks()

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions of runs that are not deleted."""
        kept = [row for row in rows if not self._is_deleted(row.get("run_id", ""))]
        if kept:
            self._sink.upsert(table, kept)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of cuts whose runs are not deleted."""
        kept = [cut for cut in cuts if not self._is_deleted(cut.key.run_id)]
        if kept:
            self._sink.ingest(kept)
        offered = sum(cut.key.end_row - cut.key.first_row for cut in cuts)
        stored = sum(cut.key.end_row - cut.key.first_row for cut in kept)
        self.num_refused_rows += offered - stored

    def _is_deleted(self, run_id: str) -> bool:
        return self._deletions.is_deleted(run_id)
