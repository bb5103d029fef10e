"""Write cuts into the store so that each row shows once, whatever dies in between."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pyarrow as pa

from collector.cut import CutKey, Resume

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from collector.cut import Cut
    from collector.store import Row, Store

TABLES = ("spans", "steps", "microbatches", "bad_rows")

SELECT_STORED = """
SELECT segment, max(end_row) AS end_row FROM ledger FINAL
WHERE run_id = {run_id:String} AND state != 'sent' GROUP BY segment
"""

SELECT_UNANSWERED = """
SELECT epoch, rank, process, segment, first_row, end_row FROM ledger FINAL
WHERE run_id = {run_id:String} AND state = 'sent' ORDER BY epoch, rank, segment, first_row
"""

SELECT_FORMAT = """
SELECT argMax(source_format, revision) AS source_format, count() AS num_runs FROM runs
WHERE run_id = {run_id:String}
"""

SELECT_CLOCKS = """
SELECT host, boot_id, argMin(offset_ns, at_ns) AS offset_ns FROM clock GROUP BY host, boot_id
"""


class StoreWriter:
    """The sink that writes into a store of this process.

    A cut is noted in the ledger as ``sent`` before its rows go in and as
    ``stored`` after. One that is found ``sent`` may or may not have arrived: it
    is written again and noted as ``repeated``, and reads of that run remove
    duplicates from then on.
    """

    def __init__(self, store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._sent: set[CutKey] = set()

    def resume(self, run_id: str) -> Resume:
        """Return what the store holds of a run."""
        bound = {"run_id": run_id}
        stored = self._store.rows(SELECT_STORED, bound)
        unanswered = tuple(
            CutKey(run_id=run_id, **row) for row in self._store.rows(SELECT_UNANSWERED, bound)
        )
        self._sent.update(unanswered)
        found = self._store.rows(SELECT_FORMAT, bound)[0]
        return Resume(
            end_rows={row["segment"]: row["end_row"] for row in stored},
            unanswered=unanswered,
            source_format=found["source_format"] if found["num_runs"] else None,
        )

    def clocks(self) -> list[Row]:
        """Return the host clocks that the store knows."""
        return self._store.rows(SELECT_CLOCKS)

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions; a row replaces the one with the same identity."""
        self._store.insert_rows(table, rows)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of these cuts in one insert a table."""
        if not cuts:
            return
        fresh = [cut for cut in cuts if cut.key not in self._sent]
        self._note(fresh, state="sent", revision=1)
        again = self._sent.copy()
        self._sent.update(cut.key for cut in fresh)
        for table in TABLES:
            parts = [getattr(cut.rows, table) for cut in cuts]
            whole = pa.concat_tables([part for part in parts if part.num_rows] or parts[:1])
            if whole.num_rows:
                self._store.insert_arrow(table, whole.unify_dictionaries())
        self._note([cut for cut in cuts if cut.key not in again], state="stored", revision=2)
        self._note([cut for cut in cuts if cut.key in again], state="repeated", revision=3)
        self._sent.difference_update(cut.key for cut in cuts)

    def _note(self, cuts: Sequence[Cut], *, state: str, revision: int) -> None:
        at_ns = self._unix_ns()
        self._store.insert_rows(
            "ledger",
            [
                {
                    "run_id": cut.key.run_id,
                    "epoch": cut.key.epoch,
                    "rank": cut.key.rank,
                    "process": cut.key.process,
                    "segment": cut.key.segment,
                    "first_row": cut.key.first_row,
                    "end_row": cut.key.end_row,
                    "sha256": cut.sha256,
                    "num_spans": cut.rows.spans.num_rows,
                    "num_steps": cut.rows.steps.num_rows,
                    "num_microbatches": cut.rows.microbatches.num_rows,
                    "num_torn": cut.num_torn,
                    "num_bad": cut.rows.bad_rows.num_rows,
                    "state": state,
                    "at_ns": at_ns,
                    "revision": revision,
                }
                for cut in cuts
            ],
        )
