"""Which parts of the store's tables the engine found damaged, and put aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .store import Store

SELECT_BROKEN = """
SELECT table, count() AS num_parts, any(path) AS example FROM system.detached_parts
WHERE database = currentDatabase() AND startsWith(reason, 'broken')
GROUP BY table ORDER BY table
"""


def damage_of(store: Store) -> tuple[str, ...]:
    """Return one line for each table that lacks rows because their files are damaged.

    The engine moves such files into the table's folder ``detached`` when it opens the store,
    and goes on without them; nothing else tells that rows are missing.
    """
    return tuple(
        f"table {row['table']} lacks the rows of {row['num_parts']} damaged parts, which the engine"
        f" has put aside (as {row['example']}): restore them from a backup"
        for row in store.rows(SELECT_BROKEN)
    )
