"""Results of the checks of hosts: newest examinations, repeat offenders, hosts to be examined."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE, NS_PER_S

from ..errors import StoreError
from ..names import escape_invisible, storable_name
from .findings import MAX_FINDING_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..identity import Row
    from ..store.store import Store

TABLE = "host_checks"
HEALTHY, WARNING, ERROR, NOT_APPLICABLE = "healthy", "warning", "error", "not applicable"
"""States, as stored."""

COMMAND, BEFORE_JOB, AGENT_START = "command", "before-job", "agent-start"
JOB_START, RESTART, HEARTBEAT, FINDING, ACTIVE = (
    "job-start", "restart", "heartbeat", "finding", "active",
)  # fmt: skip
"""Occasions, as stored."""

MAX_TEXT = 1000
"""Letters of a reason or a remedy."""

RECENT_NS = 600 * NS_PER_S
"""Age of a finding up to which its hosts are examined."""

REFRESH_NS = 5 * NS_PER_S
"""All agents share an answer for so long."""

SELECT_NEWEST = """
SELECT * FROM host_checks FINAL WHERE at_ns >= {since_ns:Int64}
    AND (empty({state:String}) OR state = {state:String}) AND (host, at_ns) IN (
        SELECT host, max(at_ns) FROM host_checks WHERE at_ns >= {since_ns:Int64}
        GROUP BY host, occasion = 'active'
    )
ORDER BY host, at_ns, section, name, part
"""

SELECT_OF_HOSTS = """
SELECT * FROM host_checks FINAL
WHERE host IN {hosts:Array(String)} AND at_ns >= {first_ns:Int64} AND at_ns <= {last_ns:Int64}
ORDER BY host, at_ns, section, name, part
"""

SELECT_OFFENDERS = """
SELECT
    host, name, uniqExact(at_ns) AS num_examinations, uniqExactIf(run_id, run_id != '') AS num_runs,
    min(at_ns) AS first_ns, max(at_ns) AS last_ns, argMax(reason, at_ns) AS reason,
    has(groupArray(state), 'error') AS is_error
FROM host_checks FINAL
WHERE at_ns >= {since_ns:Int64} AND state IN ('error', 'warning')
GROUP BY host, name HAVING num_examinations > 1
ORDER BY is_error DESC, num_runs DESC, num_examinations DESC, host, name LIMIT {most:UInt32}
"""

SELECT_WANTED = """
SELECT DISTINCT host FROM (
    SELECT host, max(opened_ns) AS opened_ns FROM (
        SELECT run_id, epoch AS finding_epoch, arrayJoin(ranks) AS rank, analysed_ns AS opened_ns
        FROM findings FINAL
        WHERE analysed_ns >= {since_ns:Int64} AND closed_ns IS NULL
            AND length(ranks) <= {most_ranks:UInt32}
            AND cause NOT IN ('healthy', 'insufficient-evidence')
    ) AS named INNER JOIN (
        SELECT run_id, epoch, rank, host FROM ranks FINAL
    ) AS placed USING (run_id, rank)
    WHERE finding_epoch < 0 OR finding_epoch = epoch
    GROUP BY host
) AS suspects LEFT JOIN (
    SELECT host, max(at_ns) AS checked_ns FROM host_checks
    WHERE at_ns >= {since_ns:Int64} AND occasion != 'active' GROUP BY host
) AS checked USING host
WHERE checked_ns < opened_ns ORDER BY host
"""

SELECT_RANK_PLACES = """
SELECT epoch, rank, argMax(host, revision) AS host, argMax(device_uuid, revision) AS device_uuid
FROM (SELECT * FROM ranks FINAL WHERE run_id = {run_id:String} AND host != '')
GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_RUN_TIMES = """
SELECT false AS is_end, step, min(start_ns) AS at_ns FROM steps
WHERE run_id = {run_id:String} AND step IN {steps:Array(Int32)} GROUP BY step
UNION ALL
SELECT true AS is_end, -1 AS step, max(end_ns) AS at_ns FROM steps
WHERE run_id = {run_id:String} HAVING count() > 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheck:
    """The result of one check of a host, or of a part of it that deviates."""

    host: str
    at_ns: int
    """Unix time of the examination."""

    occasion: str
    run_id: str = ""
    epoch: int = NONE
    section: str
    name: str
    part: str = ""
    device: str = ""
    state: str
    reason: str
    remedy: str = ""
    value: str = ""

    @property
    def is_deviation(self) -> bool:
        """True if something is wrong."""
        return self.state in {ERROR, WARNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offender:
    """A host with a check that deviated in several examinations."""

    host: str
    name: str
    num_examinations: int
    num_runs: int
    first_ns: int
    last_ns: int
    reason: str
    """The newest one."""

    is_error: bool
    """True if it was an error in any of them."""


def check_row(check: StoredCheck) -> Row:
    """Return a result as a row of the table, with texts that can be stored."""
    row = asdict(check)
    names = ("host", "occasion", "section", "name", "part", "device", "state")
    texts = ("reason", "remedy", "value")
    return (
        row
        | {name: storable_name(row[name]) for name in names}
        | {name: escape_invisible(row[name])[:MAX_TEXT] for name in texts}
    )


def read_newest_checks(store: Store, *, since_ns: int, state: str = "") -> tuple[StoredCheck, ...]:
    """Return the newest examination of each host, and its newest active tests.

    Args:
        since_ns: Oldest Unix time.
        state: Only results with this state; "": all.
    """
    rows = store.rows(SELECT_NEWEST, {"since_ns": since_ns, "state": state})
    return tuple(StoredCheck(**row) for row in rows)


def read_checks_of_hosts(
    store: Store, hosts: Iterable[str], *, first_ns: int, last_ns: int
) -> tuple[StoredCheck, ...]:
    """Return all results of some hosts in a range of Unix times, both included."""
    bound = {"hosts": sorted(set(hosts)), "first_ns": first_ns, "last_ns": last_ns}
    return tuple(StoredCheck(**row) for row in store.rows(SELECT_OF_HOSTS, bound))


def read_offenders(store: Store, *, since_ns: int, most: int) -> tuple[Offender, ...]:
    """Return hosts whose checks deviated in several examinations: errors first, then most runs."""
    rows = store.rows(SELECT_OFFENDERS, {"since_ns": since_ns, "most": most})
    return tuple(Offender(**{**row, "is_error": bool(row["is_error"])}) for row in rows)


class ExaminationRequests:
    """Hosts that an open finding names, and that were not examined since it opened.

    Threads may share it. The store is asked every `REFRESH_NS`, for all hosts together.

    Args:
        unix_ns: Clock of the findings' age.
        monotonic_ns: Clock of the answer's age.
    """

    def __init__(
        self,
        store: Store,
        *,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._wanted: frozenset[str] = frozenset()
        self._read_ns: int | None = None

    def wanted(self, hosts: Iterable[str]) -> Sequence[str]:
        """Return those of some hosts that are to be examined, by name.

        If the store does not answer, the former answer holds until the next reading.
        """
        with self._lock:
            now_ns = self._monotonic_ns()
            if self._read_ns is None or now_ns - self._read_ns >= REFRESH_NS:
                self._read_ns = now_ns
                bound = {
                    "since_ns": self._unix_ns() - RECENT_NS,
                    "most_ranks": MAX_FINDING_RANKS,
                }
                with suppress(StoreError):
                    rows = self._store.rows(SELECT_WANTED, bound)
                    self._wanted = frozenset(row["host"] for row in rows)
            return sorted(self._wanted.intersection(hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Host and device of a rank in an epoch of a run."""

    epoch: int
    rank: int
    host: str
    device_uuid: str
    """"" if unknown."""


def read_rank_places(store: Store, run_id: str) -> tuple[RankPlace, ...]:
    """Return the host and device of each rank of a run, in each epoch."""
    rows = store.rows(SELECT_RANK_PLACES, {"run_id": run_id})
    return tuple(RankPlace(**row) for row in rows)


def read_run_times(store: Store, run_id: str, steps: Iterable[int]) -> dict[int | None, int]:
    """Return the begin of some steps of a run, Unix ns, and the last end of any under None."""
    rows = store.rows(SELECT_RUN_TIMES, {"run_id": run_id, "steps": sorted(set(steps))})
    return {None if row["is_end"] else row["step"]: row["at_ns"] for row in rows}
