"""Rows that did not come although later ones of their segment did."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

PATIENCE_NS = 60_000_000_000
"""How long rows of a run that trains may be behind later ones: they may be on another way."""

END_OF_TIME = (1 << 63) - 1

SELECT_GAPS = """
SELECT
    epoch, rank, segment, held_end AS gap_first, begin - 1 AS gap_last, count() OVER () AS num_gaps
FROM (
    SELECT
        epoch, rank, segment, at_ns, first_row AS begin,
        max(end_row) OVER (
            PARTITION BY epoch, rank, segment ORDER BY first_row
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS held_end
    FROM ledger FINAL
    WHERE run_id = {run_id:String} AND end_row > first_row AND (epoch, rank, segment) IN (
        SELECT epoch, rank, segment FROM ledger FINAL WHERE run_id = {run_id:String}
        GROUP BY epoch, rank, segment
        HAVING sum(end_row - first_row) != maxIf(end_row, end_row > first_row)
    )
) AS held
WHERE begin > held_end AND at_ns < {before_ns:Int64}
ORDER BY epoch, rank, segment, begin LIMIT 8
"""
"""The inner query leaves out whole segments without a line too few, which is nearly all of them."""


def read_gaps(store: Store, run_id: str, *, is_running: bool, now_ns: int) -> list[Row]:
    """Return the first gaps: ``epoch, rank, segment, gap_first, gap_last``, and ``num_gaps``.

    Rows that were sent and never confirmed count as there. What is missing at the end of a
    segment, or a whole segment, can't be told from what was never written.

    Args:
        store: Where the ledger is.
        run_id: The run.
        is_running: Whether it trains: then later rows must be there for a minute.
        now_ns: Unix time.
    """
    before_ns = now_ns - PATIENCE_NS if is_running else END_OF_TIME
    return store.rows(SELECT_GAPS, {"run_id": run_id, "before_ns": before_ns})
