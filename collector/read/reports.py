"""Finished reports of ended runs, as the store has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

SELECT_BODY = """
SELECT version, num_spans, num_steps, num_rows, state, body FROM reports FINAL
WHERE run_id = {run_id:String}
"""

SELECT_LINES = """
SELECT run_id, cause, severity, ranks, verdict, step_s, mfu, loss, duration_ns, num_dropped,
    num_spans, num_steps, num_rows, state, version
FROM reports FINAL
"""

SELECT_LAST_LOSS = """
SELECT avg(loss) AS last_loss FROM steps
WHERE run_id = {run_id:String} AND loss IS NOT NULL AND (epoch, step) = (
    SELECT max((epoch, step)) FROM steps WHERE run_id = {run_id:String} AND loss IS NOT NULL
)
"""


def read_report_body(store: Store, run_id: str) -> Row | None:
    """Return the stored report of a run, with the version and the data that it is of."""
    rows = store.rows(SELECT_BODY, {"run_id": run_id})
    return rows[0] if rows else None


def read_report_lines(store: Store) -> dict[str, Row]:
    """Return what a list of runs shows of each stored report, by run."""
    return {row["run_id"]: row for row in store.rows(SELECT_LINES)}


def read_last_loss(store: Store, run_id: str) -> float | None:
    """Return the mean loss of the ranks in the last step that has one; None if none has."""
    found: float | None = store.rows(SELECT_LAST_LOSS, {"run_id": run_id})[0]["last_loss"]
    return found
