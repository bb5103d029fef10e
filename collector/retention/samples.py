"""Remove readings of hosts and devices that belong to no span that is still kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..read.runs import read_step_bounds
from .removal import await_removals

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

MARGIN_NS = 60_000_000_000
"""Around the steps: what happened just before and after them explains them too."""

SELECT_EPOCHS = """
SELECT
    run_id, epoch, first_ns,
    if(state = 'running', {end_of_time:Int64}, end_ns) AS last_ns,
    kept_first, kept_last, expired_ns > 0 AS is_expired
FROM (
    SELECT run_id, epoch, min(start_ns) AS first_ns, max(end_ns) AS end_ns FROM steps
    WHERE step >= 0 GROUP BY run_id, epoch
) AS stepped
LEFT JOIN (SELECT run_id, epoch, state FROM runs FINAL) AS known USING (run_id, epoch)
LEFT JOIN (
    SELECT run_id, epoch, kept_first, kept_last, at_ns AS expired_ns FROM expired FINAL
) AS went USING (run_id, epoch)
ORDER BY first_ns
"""

COUNT_OLD = """
SELECT count() AS n FROM samples
WHERE at_ns < {before_ns:Int64} AND NOT arrayExists((a, b) -> at_ns >= a AND at_ns <= b,
    {first:Array(Int64)}, {last:Array(Int64)})
"""

HIDE_OLD = """
DELETE FROM samples
WHERE at_ns < {before_ns:Int64} AND NOT arrayExists((a, b) -> at_ns >= a AND at_ns <= b,
    {first:Array(Int64)}, {last:Array(Int64)}) SETTINGS lightweight_deletes_sync = 0
"""

END_OF_TIME = (1 << 63) - 1


def expire_samples(store: Store, *, before_ns: int) -> int:
    """Remove the readings of before a time, but those beside steps whose spans are kept.

    Returns:
        How many went.
    """
    windows = _windows(store)
    old = {
        "before_ns": before_ns,
        "first": [first for first, _ in windows],
        "last": [last for _, last in windows],
    }
    num_old = int(store.rows(COUNT_OLD, old)[0]["n"])
    if num_old:
        store.command(HIDE_OLD, old)
        await_removals(store, ["samples"])
    return num_old


def _windows(store: Store) -> list[tuple[int, int]]:
    """Return the times, Unix ns, of all steps whose spans are kept, ascending and apart."""
    found: list[tuple[int, int]] = []
    for row in store.rows(SELECT_EPOCHS, {"end_of_time": END_OF_TIME}):
        found += _kept_bounds(store, row) if row["is_expired"] else [_padded(row)]
    joined: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def _kept_bounds(store: Store, row: Row) -> list[tuple[int, int]]:
    bounds = [
        read_step_bounds(store, row["run_id"], first=first, last=last)
        for first, last in zip(row["kept_first"], row["kept_last"], strict=True)
    ]
    return [(found[0] - MARGIN_NS, found[1] + MARGIN_NS) for found in bounds if found is not None]


def _padded(row: Row) -> tuple[int, int]:
    return (row["first_ns"] - MARGIN_NS, min(row["last_ns"], END_OF_TIME - MARGIN_NS) + MARGIN_NS)
