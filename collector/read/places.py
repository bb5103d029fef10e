"""Where the ranks stood that findings name: host and position, over all runs.

Ranks whose position nobody told are left out: they stand nowhere, not at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

MOST_RANKS = 512
"""A finding of more ranks is the job's, not a place's."""

SELECT_TOLD_PLACES = """
SELECT DISTINCT run_id, epoch, rank, host, dp, pp, tp FROM ranks FINAL
WHERE (run_id, epoch, rank) IN (
    SELECT run_id, epoch, arrayJoin(ranks) FROM findings FINAL
    WHERE length(ranks) <= {most_ranks:UInt32}
) AND dp >= 0 AND pp >= 0 AND tp >= 0
"""

SELECT_TOLD_JOBS = """
SELECT run_id, epoch, layout FROM runs FINAL
WHERE (run_id, epoch) IN (SELECT run_id, epoch FROM findings FINAL)
"""

SELECT_TOLD_HOSTS = """
SELECT run_id, epoch, uniqExact(host) AS num_hosts FROM ranks FINAL
WHERE (run_id, epoch) IN (SELECT run_id, epoch FROM findings FINAL)
GROUP BY run_id, epoch
"""

SELECT_PLACES = """
SELECT DISTINCT run_id, epoch, rank, host, dp, pp, tp FROM ranks FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND dp >= 0 AND pp >= 0 AND tp >= 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlace:
    """Where one rank stood in one epoch of a run."""

    run_id: str
    epoch: int
    rank: int
    host: str
    """"" where it is unknown."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """One epoch of a run of which something was found."""

    run_id: str
    epoch: int
    layout: dict[str, int]
    num_hosts: int


def read_told_places(store: Store) -> tuple[StoredPlace, ...]:
    """Return the places of all ranks that any stored finding names, `MOST_RANKS` a finding."""
    rows = store.rows(SELECT_TOLD_PLACES, {"most_ranks": MOST_RANKS})
    return tuple(map(_place, rows))


def read_told_jobs(store: Store) -> tuple[StoredJob, ...]:
    """Return the epochs that any stored finding is of."""
    counted = store.rows(SELECT_TOLD_HOSTS)
    num_hosts = {(row["run_id"], row["epoch"]): row["num_hosts"] for row in counted}
    return tuple(
        StoredJob(
            run_id=row["run_id"],
            epoch=row["epoch"],
            layout=dict(row["layout"]),
            num_hosts=num_hosts.get((row["run_id"], row["epoch"]), 0),
        )
        for row in store.rows(SELECT_TOLD_JOBS)
    )


def read_places(store: Store, run_id: str, epoch: int) -> tuple[StoredPlace, ...]:
    """Return where each rank of one epoch stood."""
    return tuple(map(_place, store.rows(SELECT_PLACES, {"run_id": run_id, "epoch": epoch})))


def _place(row: Row) -> StoredPlace:
    return StoredPlace(
        run_id=row["run_id"],
        epoch=row["epoch"],
        rank=row["rank"],
        host=row["host"],
        dp=row["dp"],
        pp=row["pp"],
        tp=row["tp"],
    )
