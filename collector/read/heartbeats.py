"""Heartbeats of ranks, and runs that have become silent.

A job whose hosts all failed, or whose collector never came back, leaves no record of its end: its
last stored state is running. If no rows and no heartbeats of such a run come for `SILENCE_NS`, its
state is shown as ``lost``, as if its processes were seen to have ended, until rows or heartbeats
come again. Nothing is stored for this.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

from ..spool.descriptions import LOST, RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..identity import Row
    from ..store.store import Store

SILENCE_NS = 15 * 60 * NS_PER_S
"""Time without spans or heartbeats of any rank. Heartbeats come once a second while a process of
the run lives, whatever it does. Agents that cannot reach a collector send them later; the longest
planned outage is 10 minutes (fault C1)."""

OWN_FORMAT = "rankscope"
"""Source format of runs that are recorded by rankscope; imported runs are never lost."""

SELECT_OLDEST = """
SELECT epoch, rank, newest_ns, count() OVER () AS num_ranks,
    countIf(newest_ns >= {recent_ns:Int64}) OVER () AS num_recent,
    countIf(newest_ns < {silent_ns:Int64}) OVER () AS num_silent
FROM (
    SELECT *, max(epoch) OVER () AS newest_epoch
    FROM (
        SELECT epoch, rank, max(at_ns) AS newest_ns, maxIf(at_ns, state = 'ended') AS ended_ns
        FROM heartbeats WHERE run_id = {run_id:String} GROUP BY epoch, rank
    )
)
WHERE epoch = newest_epoch AND newest_ns != ended_ns
ORDER BY newest_ns, rank LIMIT {most:UInt32}
"""

# For a few ranks only: by two keys, for every rank of millions of rows, it takes seconds.
SELECT_LAST_STATES = """
SELECT rank, argMax(host, (at_ns, pid)) AS host, argMax(state, (at_ns, pid)) AS state,
    argMax(step, (at_ns, pid)) AS step
FROM heartbeats
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND rank IN {ranks:Array(Int32)}
GROUP BY rank
"""

SELECT_NEWEST_TIMES = """
SELECT run_id, max(at_ns) AS newest_ns FROM heartbeats
WHERE run_id IN {run_ids:Array(String)} GROUP BY run_id
"""


def read_oldest_heartbeats(
    store: Store, run_id: str, *, recent_ns: int, silent_ns: int, most: int
) -> list[Row]:
    """Return the ranks of a run's newest epoch whose last heartbeats are oldest, oldest first.

    Ranks that ended well are left out.

    Args:
        recent_ns: Unix time by the collector's clock.
        silent_ns: Likewise, earlier.

    Returns:
        Rows of ``epoch, rank, newest_ns, host, state, step``, each with ``num_ranks`` and the
        numbers of ranks with a heartbeat since ``recent_ns`` (``num_recent``) and with none since
        ``silent_ns`` (``num_silent``).
    """
    limits = {"recent_ns": recent_ns, "silent_ns": silent_ns, "most": most}
    rows = store.rows(SELECT_OLDEST, {"run_id": run_id, **limits})
    if not rows:
        return []
    ranks = [row["rank"] for row in rows]
    bound = {"run_id": run_id, "epoch": rows[0]["epoch"], "ranks": ranks}
    states = {row["rank"]: row for row in store.rows(SELECT_LAST_STATES, bound)}
    return [{**row, **states[row["rank"]]} for row in rows]


def mark_lost_runs(
    store: Store, rows: Iterable[Row], *, unix_ns: Callable[[], int] = time.time_ns
) -> list[Row]:
    """Return rows of runs, with the state of silent running runs changed to ``lost``.

    Args:
        store: The store; queried only for runs without recent rows.
        rows: Rows with ``run_id, source_format, state`` and ``reported_ns``, the Unix time of the
            last stored row of the run. The result has no ``reported_ns``.
        unix_ns: Clock that measures the silence.
    """
    latest = [dict(row) for row in rows]
    before_ns = unix_ns() - SILENCE_NS
    reported_ns = {row["run_id"]: row.pop("reported_ns") or 0 for row in latest}
    silent = [
        row
        for row in latest
        if row["state"] == RUNNING
        and row["source_format"] == OWN_FORMAT
        and reported_ns[row["run_id"]] <= before_ns
    ]
    if silent:
        bound = {"run_ids": [row["run_id"] for row in silent]}
        newest_ns = {
            row["run_id"]: row["newest_ns"] for row in store.rows(SELECT_NEWEST_TIMES, bound)
        }
        for row in silent:
            if newest_ns.get(row["run_id"], 0) <= before_ns:
                row["state"] = LOST
    return latest


class SilenceWatch:
    """Silence of runs, measured by this process's monotonic clock.

    Retention must not trust the wall clock with a run that may still live: after a jump by 40 days
    every run would look silent.
    """

    def __init__(self, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._reported: dict[str, tuple[int, int]] = {}

    def is_silent(self, run_id: str, reported_ns: int) -> bool:
        """Return whether ``reported_ns`` has not changed for `SILENCE_NS` of this process's time.

        Args:
            reported_ns: Unix time of the run's last row or heartbeat, as the store has it now.
        """
        now_ns = self._monotonic_ns()
        last_ns, since_ns = self._reported.get(run_id, (None, now_ns))
        if last_ns != reported_ns:
            since_ns = now_ns
        self._reported[run_id] = (reported_ns, since_ns)
        return now_ns - since_ns >= SILENCE_NS
