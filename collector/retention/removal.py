"""Removal of rows: they disappear from queries first, and from the disk later.

A statement that waits for its own mutation takes up to a second of the engine's background pool.
So the statements for all tables are sent first, and then waited for together.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import StoreQueryError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..store.store import Store

TIMEOUT_S = 600.0
POLL_S = 0.02

SELECT_IN_PROGRESS = """
SELECT table, any(latest_fail_reason) AS reason FROM system.mutations
WHERE database = currentDatabase() AND NOT is_done AND table IN {tables:Array(String)}
    AND position(command, '_row_exists') > 0
GROUP BY table ORDER BY table
"""

APPLY_DELETED_MASK = "ALTER TABLE {table:Identifier} APPLY DELETED MASK SETTINGS mutations_sync = 0"

MIN_HIDDEN_RATIO = 0.1
"""Share of hidden rows from which on a table's parts are rewritten."""

COUNT_HIDDEN = """
SELECT
    (SELECT sum(rows) FROM system.parts
     WHERE active AND database = currentDatabase() AND table = {table:String}) AS num_written,
    (SELECT count() FROM {table:Identifier}) AS num_shown
SETTINGS final = 0
"""
"""Without FINAL: duplicate rows are not hidden, and rewriting a part keeps them."""


def wait_for_removals(store: Store, tables: Iterable[str], *, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until queries no longer see the rows that were removed from these tables.

    Raises:
        StoreQueryError: It took longer than ``timeout_s``; the engine goes on with the removal.
    """
    bound = {"tables": list(tables)}
    end_s = time.monotonic() + timeout_s
    while in_progress := store.rows(SELECT_IN_PROGRESS, bound):
        if time.monotonic() > end_s:
            slow = in_progress[0]
            raise StoreQueryError(
                f"rows of table {slow['table']} are still being removed after {timeout_s:.0f} s"
                f" ({slow['reason'] or 'the engine is busy'}): try again later"
            )
        time.sleep(POLL_S)


def apply_deleted_masks(store: Store, tables: Iterable[str]) -> None:
    """Make the engine rewrite these tables' parts without the removed rows, in the background."""
    for table in tables:
        store.command(APPLY_DELETED_MASK, {"table": table})


def apply_large_deleted_masks(store: Store, tables: Iterable[str]) -> None:
    """Call `apply_deleted_masks` for tables of which more than a tenth is hidden.

    After each removal, the engine would rewrite gigabytes for a few rows. On a cluster, the
    connected server's share represents the whole table.
    """
    crowded = []
    for table in tables:
        (counts,) = store.rows(COUNT_HIDDEN, {"table": store.local_table(table)})
        if counts["num_written"] - counts["num_shown"] > MIN_HIDDEN_RATIO * counts["num_written"]:
            crowded.append(table)
    apply_deleted_masks(store, crowded)
