"""Marks of hosts: excluded from training, golden (a reference for tests), spare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from .findings import MAX_FINDING_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..store.store import Store

SELECT_CHANGES = """
SELECT host, mark, at_ns, is_set, until_ns, reason, set_by FROM host_changes FINAL
ORDER BY at_ns, host, mark
"""

SELECT_SEEN = """
SELECT host, run_id, groupUniqArray(rank) AS seen_ranks
FROM ranks FINAL WHERE host IN {hosts:Array(String)}
GROUP BY host, run_id ORDER BY max(started_ns) DESC, run_id
"""

SELECT_EPOCH_STARTS = """
SELECT epoch, min(started_ns) AS begun_ns FROM ranks FINAL
WHERE run_id = {run_id:String} AND started_ns IS NOT NULL GROUP BY epoch
"""


SELECT_RUNNING = """
SELECT run_id, groupUniqArray(host) AS hosts FROM ranks FINAL
WHERE host != '' AND (run_id, epoch) IN (
    SELECT run_id, max(epoch) FROM ranks FINAL
    WHERE run_id IN (SELECT run_id FROM runs FINAL WHERE state = 'running') GROUP BY run_id
)
GROUP BY run_id ORDER BY run_id
"""

COUNT_FINDINGS = "SELECT count() AS num, max(analysed_ns) AS newest_ns FROM findings"

SELECT_NAMED = """
WITH grave AS (
    SELECT run_id, epoch, position, cause, analysed_ns, ranks FROM findings FINAL
    WHERE analysed_ns >= {since_ns:Int64} AND severity IN ('critical', 'warning')
        AND length(ranks) BETWEEN 1 AND {most_ranks:UInt32}
), placed AS (
    SELECT DISTINCT run_id, epoch, rank, host FROM ranks FINAL
    WHERE (run_id, epoch) IN (SELECT run_id, epoch FROM grave) AND host != ''
)
SELECT run_id, cause, analysed_ns AS opened_ns, arraySort(groupUniqArray(host)) AS hosts,
    any(num_hosts) AS num_hosts
FROM (
    SELECT run_id, epoch, position, cause, analysed_ns, arrayJoin(ranks) AS rank FROM grave
) AS named
INNER JOIN placed USING (run_id, epoch, rank)
INNER JOIN (
    SELECT run_id, epoch, uniqExact(host) AS num_hosts FROM placed GROUP BY run_id, epoch
) AS counted USING (run_id, epoch)
GROUP BY run_id, position, cause, analysed_ns ORDER BY opened_ns, run_id, position
"""


class HostMark(StrEnum):
    """Mark of a host."""

    EXCLUDED = "excluded"
    """No job should start on it."""

    GOLDEN = "golden"
    """Known to be good: others are tested against it."""

    SPARE = "spare"
    """Kept free, to replace an excluded host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChange:
    """A mark that a host got, or lost."""

    host: str
    mark: HostMark
    at_ns: int
    is_set: bool
    until_ns: int | None = None
    """Time at which it expires; None: never."""

    reason: str = ""
    set_by: str = ""

    def is_in_force(self, now_ns: int) -> bool:
        """Return whether the host has the mark, if this is its newest change."""
        return self.is_set and (self.until_ns is None or now_ns < self.until_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenHost:
    """A run that trained on a host."""

    host: str
    run_id: str
    seen_ranks: tuple[int, ...]


def is_same_host(one: str, other: str) -> bool:
    """Return whether two names are of one host, one of which may lack the domain."""
    if one == other:
        return True
    (name, _, domain), (other_name, _, other_domain) = one.partition("."), other.partition(".")
    return name == other_name and not (domain and other_domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedHosts:
    """The hosts of the ranks that a finding names."""

    run_id: str
    cause: str
    opened_ns: int
    hosts: tuple[str, ...]
    num_hosts: int
    """Hosts of the job."""


def write_host_changes(store: Store, changes: Iterable[HostChange]) -> None:
    """Store changes. Returns when they are on disk."""
    store.insert_rows("host_changes", [asdict(change) for change in changes])


def read_host_changes(store: Store) -> tuple[HostChange, ...]:
    """Return all changes in order of time."""
    return tuple(
        HostChange(
            **{**row, "mark": HostMark(row["mark"]), "is_set": bool(row["is_set"])},
        )
        for row in store.rows(SELECT_CHANGES)
        if row["mark"] in set(HostMark)
    )


def marks_in_force(changes: Iterable[HostChange], now_ns: int) -> tuple[HostChange, ...]:
    """Return the changes whose marks hosts have now, in order of time.

    Args:
        changes: All changes, in order of time.
        now_ns: Unix time.
    """
    newest = {(change.host, change.mark): change for change in changes}
    kept = (change for change in newest.values() if change.is_in_force(now_ns))
    return tuple(sorted(kept, key=lambda change: change.at_ns))


def read_seen_hosts(store: Store, hosts: Iterable[str]) -> tuple[SeenHost, ...]:
    """Return the runs that trained on some hosts, the newest first."""
    rows = store.rows(SELECT_SEEN, {"hosts": list(hosts)})
    return tuple(
        SeenHost(**{**row, "seen_ranks": tuple(sorted(row["seen_ranks"]))}) for row in rows
    )


def count_findings(store: Store) -> tuple[int, int]:
    """Return a number that changes with each new finding: rows, and the newest time of opening."""
    (row,) = store.rows(COUNT_FINDINGS)
    return row["num"], row["newest_ns"]


def read_named_hosts(store: Store, *, since_ns: int) -> tuple[NamedHosts, ...]:
    """Return the hosts that findings of severity warning or critical name, the oldest first."""
    bound = {"since_ns": since_ns, "most_ranks": MAX_FINDING_RANKS}
    rows = store.rows(SELECT_NAMED, bound)
    return tuple(NamedHosts(**{**row, "hosts": tuple(row["hosts"])}) for row in rows)


def read_epoch_starts(store: Store, run_id: str) -> dict[int, int]:
    """Return the start of the first process of each epoch of a run, Unix ns."""
    rows = store.rows(SELECT_EPOCH_STARTS, {"run_id": run_id})
    return {row["epoch"]: row["begun_ns"] for row in rows}


def read_excluded(store: Store, now_ns: int) -> tuple[HostChange, ...]:
    """Return the exclusions in force, in order of time."""
    marks = marks_in_force(read_host_changes(store), now_ns)
    return tuple(mark for mark in marks if mark.mark is HostMark.EXCLUDED)


def read_runs_of_hosts(store: Store, hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return those of some hosts on which the newest epoch of a running job is, by run."""
    wanted = tuple(hosts)
    if not wanted:
        return {}
    found = {}
    for row in store.rows(SELECT_RUNNING):
        used = [host for host in wanted if any(is_same_host(host, name) for name in row["hosts"])]
        if used:
            found[row["run_id"]] = tuple(sorted(used))
    return found
