"""Remove rows: they vanish from every query first, and from the disk some time after.

A statement that waits for its own mutation takes up to a second of the engine's
background pool, table by table; so all are asked for first and waited for together.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import StoreQueryError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..store.store import Store

PATIENCE_S = 600.0
POLL_S = 0.02

SELECT_UNDER_WAY = """
SELECT table, any(latest_fail_reason) AS reason FROM system.mutations
WHERE database = currentDatabase() AND NOT is_done AND table IN {tables:Array(String)}
    AND position(command, '_row_exists') > 0
GROUP BY table ORDER BY table
"""

FREE_HIDDEN = "ALTER TABLE {table:Identifier} APPLY DELETED MASK SETTINGS mutations_sync = 0"

MANY = 0.1
"""Share of hidden rows from which on their parts are worth writing anew."""

COUNT_HIDDEN = """
SELECT
    (SELECT sum(rows) FROM system.parts
     WHERE active AND database = currentDatabase() AND table = {table:String}) AS num_written,
    (SELECT count() FROM {table:Identifier}) AS num_shown
SETTINGS final = 0
"""
"""Rows that are there twice are not hidden: writing a part anew keeps them."""


def await_removals(store: Store, tables: Iterable[str], *, patience_s: float = PATIENCE_S) -> None:
    """Wait until no query sees a row any more that was removed from these tables.

    Raises:
        StoreQueryError: It took longer than ``patience_s``; the engine goes on trying.
    """
    bound = {"tables": list(tables)}
    give_up_s = time.monotonic() + patience_s
    while under_way := store.rows(SELECT_UNDER_WAY, bound):
        if time.monotonic() > give_up_s:
            slow = under_way[0]
            raise StoreQueryError(
                f"rows of table {slow['table']} are still being removed after {patience_s:.0f} s"
                f" ({slow['reason'] or 'the engine is busy'}): try again later"
            )
        time.sleep(POLL_S)


def free_hidden(store: Store, tables: Iterable[str]) -> None:
    """Have the engine write the parts of these tables anew without the removed rows.

    It does so in the background, after a restart too.
    """
    for table in tables:
        store.command(FREE_HIDDEN, {"table": table})


def free_where_many_hidden(store: Store, tables: Iterable[str]) -> None:
    """Do `free_hidden` for the tables of which a tenth or more is hidden.

    Each removal alone would have the engine write gigabytes anew for a few rows. On a cluster
    the share of the server that is asked stands for all.
    """
    crowded = []
    for table in tables:
        (found,) = store.rows(COUNT_HIDDEN, {"table": store.local_table(table)})
        if found["num_written"] - found["num_shown"] > MANY * found["num_written"]:
            crowded.append(table)
    free_hidden(store, crowded)
