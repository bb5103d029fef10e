"""Findings of runs, from onset to end, and the places of the ranks that they name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from ..bounds import find_layout_problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..identity import Row
    from ..store.store import Store

SELECT_FINDINGS = """
SELECT * EXCEPT card FROM findings FINAL
WHERE run_id = {run_id:String} ORDER BY position, analysed_ns
"""

SELECT_ALL_FINDINGS = """
SELECT * EXCEPT card FROM findings FINAL ORDER BY analysed_ns DESC, run_id, position DESC
"""

SELECT_CARD = """
SELECT card FROM findings FINAL WHERE run_id = {run_id:String} AND position = {number:Int32}
"""


MAX_FINDING_RANKS = 512
"""A finding of more ranks concerns the job, not single hosts or positions."""

SELECT_FINDING_PLACES = """
SELECT DISTINCT run_id, epoch, rank, host, local_rank, dp, pp, tp FROM ranks FINAL
WHERE (run_id, epoch, rank) IN (
    SELECT run_id, epoch, arrayJoin(ranks) FROM findings FINAL
    WHERE length(ranks) <= {most_ranks:UInt32}
) AND dp >= 0 AND pp >= 0 AND tp >= 0
"""

SELECT_FINDING_JOBS = """
SELECT run_id, epoch, layout FROM runs FINAL
WHERE (run_id, epoch) IN (SELECT run_id, epoch FROM findings FINAL)
"""

COUNT_FINDING_HOSTS = """
SELECT run_id, epoch, uniqExact(host) AS num_hosts FROM ranks FINAL
WHERE (run_id, epoch) IN (SELECT run_id, epoch FROM findings FINAL)
GROUP BY run_id, epoch
"""

SELECT_PLACES = """
SELECT DISTINCT run_id, epoch, rank, host, local_rank, dp, pp, tp FROM ranks FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND dp >= 0 AND pp >= 0 AND tp >= 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFinding:
    """A finding of a run."""

    run_id: str
    number: int
    """Number among the run's findings, from 0 in the order in which they opened."""

    epoch: int
    cause: str
    ranks: tuple[int, ...]
    onset_step: int | None
    """First step that showed it; None if no step does."""

    last_step: int | None
    checked_step: int
    """Last step of the analysis."""

    slowdown: float | None
    recoverable_ratio: float | None
    confidence: float
    evidence: str
    severity: str = ""
    """"" if unknown."""

    saved_s: float | None = None
    """What fixing it would save in each of its steps, seconds; None if it has no price."""

    opened_ns: int
    """Unix ns, as all times here."""

    updated_ns: int
    closed_ns: int | None
    """None if it is open, or was open at the run's end."""

    card: str = ""
    """JSON of its proof, written when it closes: a live run's reports no longer have it then.
    `read_card` reads it."""


def write_findings(store: Store, findings: Iterable[StoredFinding]) -> None:
    """Store findings; a row replaces the earlier row of the same finding."""
    rows = []
    for finding in findings:
        row = {_COLUMNS.get(name, name): value for name, value in asdict(finding).items()}
        rows.append(row | {"ranks": list(finding.ranks)})
    store.insert_rows("findings", rows)


def read_findings(store: Store, run_id: str | None = None) -> tuple[StoredFinding, ...]:
    """Return a run's findings in the order in which they opened; without a run, those of all runs,
    newest first.
    """
    if run_id is None:
        return tuple(_finding(row) for row in store.rows(SELECT_ALL_FINDINGS))
    return tuple(_finding(row) for row in store.rows(SELECT_FINDINGS, {"run_id": run_id}))


_COLUMNS = {"number": "position", "onset_step": "first_step", "opened_ns": "analysed_ns"}
"""Columns that are named otherwise than the field."""


def read_card(store: Store, run_id: str, number: int) -> str:
    """Return the JSON of the proof of a closed finding; "" if none is stored."""
    rows = store.rows(SELECT_CARD, {"run_id": run_id, "number": number})
    return str(rows[0]["card"]) if rows else ""


def _finding(row: Row) -> StoredFinding:
    values = {
        field.name: row[_COLUMNS.get(field.name, field.name)]
        for field in fields(StoredFinding)
        if field.name != "card"
    }
    return StoredFinding(**values | {"ranks": tuple(row["ranks"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlace:
    """Host and position of a rank in an epoch of a run."""

    run_id: str
    epoch: int
    rank: int
    host: str
    """"" if unknown."""

    local_rank: int
    """-1 if unknown."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """An epoch of a run with findings."""

    run_id: str
    epoch: int
    layout: dict[str, int]
    num_hosts: int


def read_finding_places(store: Store) -> tuple[StoredPlace, ...]:
    """Return the places of the ranks of all findings of up to `MAX_FINDING_RANKS` ranks.

    Ranks with an unknown position are left out.
    """
    rows = store.rows(SELECT_FINDING_PLACES, {"most_ranks": MAX_FINDING_RANKS})
    return tuple(StoredPlace(**row) for row in rows)


def read_finding_jobs(store: Store) -> tuple[StoredJob, ...]:
    """Return the epochs of all findings, without layouts that are out of bounds."""
    counted = store.rows(COUNT_FINDING_HOSTS)
    num_hosts = {(row["run_id"], row["epoch"]): row["num_hosts"] for row in counted}
    return tuple(
        StoredJob(
            run_id=row["run_id"],
            epoch=row["epoch"],
            layout={} if find_layout_problem(row["layout"]) else row["layout"],
            num_hosts=num_hosts.get((row["run_id"], row["epoch"]), 0),
        )
        for row in store.rows(SELECT_FINDING_JOBS)
    )


def read_places(store: Store, run_id: str, epoch: int) -> tuple[StoredPlace, ...]:
    """Return the places of an epoch's ranks. Ranks with an unknown position are left out."""
    rows = store.rows(SELECT_PLACES, {"run_id": run_id, "epoch": epoch})
    return tuple(StoredPlace(**row) for row in rows)
