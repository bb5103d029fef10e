"""Keep the findings of an analysis beside the run that they speak of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from collector.store import Row, Store

SELECT_LATEST = """
SELECT * FROM findings FINAL
WHERE run_id = {run_id:String} AND analysed_ns = (
    SELECT max(analysed_ns) FROM findings WHERE run_id = {run_id:String}
)
ORDER BY position
"""


def write_findings(
    store: Store,
    run_id: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    analysed_ns: int | None = None,
) -> None:
    """Store the findings of one analysis, which from now on are the run's latest.

    Args:
        store: Where to.
        run_id: The run.
        rows: In order of weight, with the keys ``cause, ranks, steps, slowdown,
            recoverable_ratio, confidence, evidence``; ``steps`` is (first, last) or None.
        analysed_ns: When the analysis was made, Unix ns; None: now.
    """
    at_ns = time.time_ns() if analysed_ns is None else analysed_ns
    store.insert_rows(
        "findings",
        [_stored(row, run_id, at_ns, position) for position, row in enumerate(rows)],
    )


def read_findings(store: Store, run_id: str) -> list[Row]:
    """Return the findings of the run's latest analysis, in the form that was written."""
    return [
        {
            "cause": row["cause"],
            "ranks": row["ranks"],
            "steps": None if row["first_step"] is None else (row["first_step"], row["last_step"]),
            "slowdown": row["slowdown"],
            "recoverable_ratio": row["recoverable_ratio"],
            "confidence": row["confidence"],
            "evidence": row["evidence"],
        }
        for row in store.rows(SELECT_LATEST, {"run_id": run_id})
    ]


def _stored(row: Mapping[str, Any], run_id: str, at_ns: int, position: int) -> Row:
    steps = row["steps"]
    return {
        "run_id": run_id,
        "analysed_ns": at_ns,
        "position": position,
        "cause": row["cause"],
        "ranks": list(row["ranks"]),
        "first_step": None if steps is None else steps[0],
        "last_step": None if steps is None else steps[1],
        "slowdown": row["slowdown"],
        "recoverable_ratio": row["recoverable_ratio"],
        "confidence": row["confidence"],
        "evidence": row["evidence"],
    }
