"""Resume of a run: the rows that the store holds, after which a spool is read on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..spool.cut import CutKey, Resume
from .ledger import SENT

if TYPE_CHECKING:
    from ..identity import Row
    from .store import Store

SELECT_STORED = """
SELECT
    segment,
    if(countIf(first_row > before) > 0, minIf(before, first_row > before), max(end_row)) AS end_row
FROM (
    SELECT segment, first_row, end_row, max(end_row) OVER (
        PARTITION BY segment ORDER BY first_row, end_row
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS before
    FROM ledger FINAL
    WHERE run_id = {run_id:String} AND state != 'sent' AND first_row < end_row
) GROUP BY segment
"""

SELECT_UNANSWERED = """
SELECT epoch, rank, process, segment, first_row, end_row FROM ledger FINAL
WHERE run_id = {run_id:String} AND state = 'sent' ORDER BY epoch, rank, segment, first_row
"""

SELECT_SEGMENTS = """
SELECT segment, any(epoch) AS of_epoch, any(rank) AS of_rank, any(process) AS of_process,
    groupArray((first_row, end_row, state)) AS ranges
FROM ledger FINAL
WHERE run_id = {run_id:String} AND segment > {after:UInt64} AND first_row < end_row
    AND (empty({ranks:Array(Int32)}) OR rank IN {ranks:Array(Int32)})
GROUP BY segment ORDER BY segment LIMIT {most:UInt32}
"""

SELECT_FORMAT = """
SELECT argMax(source_format, revision) AS source_format, count() AS num_runs FROM runs
WHERE run_id = {run_id:String}
"""

PAGE_SEGMENTS = 300
"""Keeps a page of `resume_page` below the 64 KiB that an agent reads."""

PAGE_UNANSWERED = 200


def read_resume(store: Store, run_id: str) -> Resume:
    """Return what the store holds of a run, so that a spool is read from there on."""
    bound = {"run_id": run_id}
    stored = {row["segment"]: row["end_row"] for row in store.rows(SELECT_STORED, bound)}
    unanswered = tuple(
        CutKey(run_id=run_id, **row)
        for row in store.rows(SELECT_UNANSWERED, bound)
        if row["end_row"] > stored.get(row["segment"], 0)
    )
    return Resume(
        end_rows=stored, unanswered=unanswered, source_format=_source_format(store, run_id)
    )


def resume_page(store: Store, run_id: str, *, after: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return the document of `GET /v1/resume`: a page of what the store holds of a run.

    ``end_rows`` is the first row that is not stored, by segment. ``unanswered`` are the cuts that
    were sent and never confirmed, to be sent again unchanged. ``next`` is the segment after which
    the next page begins, null on the last page.

    Args:
        store: An open store.
        after: Last segment of the previous page; 0 for the first page.
        ranks: The ranks asked for; empty for all.
    """
    bound = {"run_id": run_id, "after": after, "ranks": list(ranks), "most": PAGE_SEGMENTS + 1}
    rows = store.rows(SELECT_SEGMENTS, bound)
    end_rows: dict[str, int] = {}
    unanswered: list[Row] = []
    listed: list[int] = []
    for row in rows[:PAGE_SEGMENTS]:
        end_row, open_cuts = _segment_progress(row)
        if listed and len(unanswered) + len(open_cuts) > PAGE_UNANSWERED:
            break
        listed.append(row["segment"])
        unanswered += open_cuts[:PAGE_UNANSWERED]
        if end_row:
            end_rows[str(row["segment"])] = end_row
    return {
        "schema": 1,
        "end_rows": end_rows,
        "unanswered": unanswered,
        "source_format": _source_format(store, run_id),
        "next": listed[-1] if len(listed) < len(rows) else None,
    }


def _source_format(store: Store, run_id: str) -> str | None:
    (found,) = store.rows(SELECT_FORMAT, {"run_id": run_id})
    return found["source_format"] if found["num_runs"] else None


def _segment_progress(row: Row) -> tuple[int, list[Row]]:
    """Return the end of a segment's stored rows without a gap, and its unconfirmed cuts."""
    end_row = 0
    ranges = sorted((first, end, state) for first, end, state in row["ranges"])
    for first, end, state in ranges:
        if state != SENT and first <= end_row:
            end_row = max(end_row, end)
    return end_row, [
        {
            "epoch": row["of_epoch"],
            "rank": row["of_rank"],
            "process": row["of_process"],
            "segment": row["segment"],
            "first_row": first,
            "end_row": end,
        }
        for first, end, state in ranges
        if state == SENT and end > end_row
    ]
