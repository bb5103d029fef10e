"""Merging of the ledger: the cuts of a past day become one line for each segment.

A rank that is read once a second writes 86,400 lines a day, as many bytes as its spans. What
reads need of them afterwards is which rows of a segment are stored, and how many of each table.
The merged lines replace the day's partition at once, and then move to the partition of all past
days: moved lines have equal keys, so a line that is in both counts once. An interrupted merge is
made again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .span_days import DAY_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..store.store import Store

PAST = -1
"""Day of the merged lines."""

SELECT_DAYS = """
SELECT day FROM ledger WHERE day >= 0 AND day < {today:Int32} GROUP BY day ORDER BY day
"""

MERGE_DAY = """
INSERT INTO merged_ledger
SELECT run_id, epoch, rank, process, segment, lines[1].1 AS first_row, lines[-1].2 AS end_row,
    if(length(lines) = 1, lines[1].3, '') AS sha256,
    arraySum(line -> line.4, lines), arraySum(line -> line.5, lines),
    arraySum(line -> line.6, lines), arraySum(line -> line.7, lines),
    arraySum(line -> line.8, lines),
    lines[1].9 AS state, arrayMax(line -> line.10, lines), lines[1].11 AS revision, {day:Int32}
FROM (
    SELECT run_id, epoch, rank, segment, any(of_day.process) AS process,
        arraySort(groupArray((
            first_row, end_row, sha256, num_spans, num_steps, num_microbatches, num_torn, num_bad,
            toString(state), at_ns, revision
        ))) AS cuts,
        arraySplit(
            (cut, place) -> place = 1 OR cut.9 = 'sent' OR cuts[place - 1].2 != cut.1
                OR cuts[place - 1].9 != cut.9 OR cuts[place - 1].11 != cut.11,
            cuts, arrayEnumerate(cuts)
        ) AS parts
    FROM (SELECT * FROM ledger FINAL WHERE day = {day:Int32} AND run_id = {run_id:String}) AS of_day
    GROUP BY run_id, epoch, rank, segment
) ARRAY JOIN parts AS lines
SETTINGS optimize_aggregation_in_order = 1
"""
"""Neighbouring cuts of one state. Cuts that are only ``sent`` stay alone, to be sent again as they
are. In the order of the table, because the cuts of a day do not fit in memory."""

SELECT_RUNS = "SELECT DISTINCT run_id FROM ledger WHERE day = {day:Int32} ORDER BY run_id"

MOVE_DAY = """
INSERT INTO ledger SELECT * REPLACE(toInt32(-1) AS day) FROM ledger AS ledger
WHERE ledger.day = {day:Int32}
"""
"""The table's name before the column: without it, the condition would be on the new value."""

REPLACE_DAY = "ALTER TABLE ledger REPLACE PARTITION {day:Int32} FROM merged_ledger"

DROP_DAY = "ALTER TABLE ledger DROP PARTITION {day:Int32}"


class LedgerMerges:
    """Merges the days of the ledger that are over."""

    def __init__(self, store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._unix_ns = unix_ns

    def turn(self) -> int:
        """Merge the days before yesterday; return their number.

        Raises:
            StoreError: The store failed; the next call goes on.
        """
        store, today = self._store, self._unix_ns() // DAY_NS
        days = [row["day"] for row in store.rows(SELECT_DAYS, {"today": today - 1})]
        for day in days:
            store.command("TRUNCATE TABLE merged_ledger")
            for row in store.rows(SELECT_RUNS, {"day": day}):
                store.command(MERGE_DAY, {"day": day, "run_id": row["run_id"]})
            for statement in (REPLACE_DAY, MOVE_DAY, DROP_DAY):
                store.command(statement, {"day": day})
            store.command("TRUNCATE TABLE merged_ledger")
        return len(days)
