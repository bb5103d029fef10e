"""Finished reports of ended runs, as the store has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

HAS_EXPIRED = "run_id IN (SELECT run_id FROM expired WHERE last_step != 2147483647) AS has_expired"
"""Whether spans of the run are gone; imported traces keep all of theirs."""

SELECT_BODY = f"""
SELECT version, num_spans, num_steps, num_rows, state, {HAS_EXPIRED}, body FROM reports FINAL
WHERE run_id = {{run_id:String}}
"""  # noqa: S608  # constants

SELECT_HEAD = SELECT_BODY.replace(", body ", ", notEmpty(body) AS has_body ")

SELECT_LINES = f"""
SELECT run_id, cause, severity, ranks, verdict, step_s, mfu, loss, duration_ns, num_dropped,
    num_spans, num_steps, num_rows, state, version, {HAS_EXPIRED}
FROM reports FINAL
"""  # noqa: S608  # constants

SELECT_COMPARABLE_MFU = """
WITH counted AS (
    SELECT run_id, argMax(flops_convention, epoch) AS convention FROM runs FINAL
    WHERE run_id IN ({run_id:String}, {other_id:String}) GROUP BY run_id
), devices AS (
    SELECT run_id, arraySort(groupUniqArray((device_name, dtype))) AS names FROM ranks FINAL
    WHERE run_id IN ({run_id:String}, {other_id:String}) GROUP BY run_id
)
SELECT mfu FROM reports FINAL
WHERE run_id = {other_id:String} AND mfu IS NOT NULL
    AND (SELECT uniqExact(convention) = 1 FROM counted)
    AND (SELECT uniqExact(names) = 1 FROM devices)
"""

SELECT_LAST_LOSS = """
SELECT avg(loss) AS last_loss FROM steps
WHERE run_id = {run_id:String} AND loss IS NOT NULL AND (epoch, step) = (
    SELECT max((epoch, step)) FROM steps
    WHERE run_id = {run_id:String} AND loss IS NOT NULL AND step >= {first:Int32}
)
"""


def read_report_body(store: Store, run_id: str) -> Row | None:
    """Return the stored report of a run, with the version and the data that it is of."""
    rows = store.rows(SELECT_BODY, {"run_id": run_id})
    return rows[0] if rows else None


def read_report_head(store: Store, run_id: str) -> Row | None:
    """Return the same with ``has_body`` in place of the report, which may have megabytes."""
    rows = store.rows(SELECT_HEAD, {"run_id": run_id})
    return rows[0] if rows else None


def read_comparable_mfu(store: Store, run_id: str, other_id: str) -> float | None:
    """Return the mean MFU of another run; None if it is unknown, or not comparable.

    It compares if FLOPs were counted alike and the devices and their number types are the same.
    """
    rows = store.rows(SELECT_COMPARABLE_MFU, {"run_id": run_id, "other_id": other_id})
    return rows[0]["mfu"] if rows else None


def read_report_lines(store: Store) -> dict[str, Row]:
    """Return what a list of runs shows of each stored report, by run."""
    return {row["run_id"]: row for row in store.rows(SELECT_LINES)}


def read_last_loss(store: Store, run_id: str, *, first: int = 0) -> float | None:
    """Return the mean loss of the ranks in the last step that has one; None if none has.

    Args:
        first: Step from which on it is looked for.
    """
    (row,) = store.rows(SELECT_LAST_LOSS, {"run_id": run_id, "first": first})
    loss: float | None = row["last_loss"]
    return loss
