"""Tell an agent what is held of a run, a page of segments at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..store.writer import SELECT_FORMAT

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

PAGE_SEGMENTS = 300
"""So that a page stays below the 64 KiB that an agent reads."""

PAGE_UNANSWERED = 200

SELECT_SEGMENTS = """
SELECT segment, any(epoch) AS of_epoch, any(rank) AS of_rank, any(process) AS of_process,
    groupArray((first_row, end_row, state)) AS ranges
FROM ledger FINAL
WHERE run_id = {run_id:String} AND segment > {after:UInt64} AND first_row < end_row
    AND (empty({ranks:Array(Int32)}) OR rank IN {ranks:Array(Int32)})
GROUP BY segment ORDER BY segment LIMIT {most:UInt32}
"""


def resume_page(store: Store, run_id: str, *, after: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return the document of `GET /v1/resume`.

    ``end_rows`` has the first row that is not stored, by segment; ``unanswered`` the cuts that
    were sent and never confirmed, to be sent again exactly so; ``next`` the segment after which
    the next page begins, null on the last one.

    Args:
        store: An open store.
        run_id: Which run.
        after: Segments up to this one were told by an earlier page.
        ranks: Which ranks; empty for all.
    """
    bound = {"run_id": run_id, "after": after, "ranks": list(ranks), "most": PAGE_SEGMENTS + 1}
    rows = store.rows(SELECT_SEGMENTS, bound)
    end_rows: dict[str, int] = {}
    unanswered: list[Row] = []
    told: list[int] = []
    for row in rows[:PAGE_SEGMENTS]:
        end_row, open_cuts = _state_of(row)
        if told and len(unanswered) + len(open_cuts) > PAGE_UNANSWERED:
            break
        told.append(row["segment"])
        unanswered += open_cuts[:PAGE_UNANSWERED]
        if end_row:
            end_rows[str(row["segment"])] = end_row
    found = store.rows(SELECT_FORMAT, {"run_id": run_id})[0]
    return {
        "schema": 1,
        "end_rows": end_rows,
        "unanswered": unanswered,
        "source_format": found["source_format"] if found["num_runs"] else None,
        "next": told[-1] if len(told) < len(rows) else None,
    }


def _state_of(row: Row) -> tuple[int, list[Row]]:
    """Return how far a segment is stored without a gap, and its cuts that nobody confirmed."""
    end_row = 0
    ranges = sorted((first, end, state) for first, end, state in row["ranges"])
    for first, end, state in ranges:
        if state != "sent" and first <= end_row:
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
        if state == "sent" and end > end_row
    ]
