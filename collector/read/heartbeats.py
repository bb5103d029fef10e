"""What the store knows of ranks that said a moment ago that they live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..spool.descriptions import LOST, RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..identity import Row
    from ..store.store import Store


SELECT_UNHEARD = """
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

# Of a few ranks alone: by two keys, of every rank of millions of rows, it takes seconds.
SELECT_LAST_WORDS = """
SELECT rank, argMax(host, (at_ns, pid)) AS host, argMax(state, (at_ns, pid)) AS state,
    argMax(step, (at_ns, pid)) AS step
FROM heartbeats
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND rank IN {ranks:Array(Int32)}
GROUP BY rank
"""


SILENCE_NS = 15 * 60 * 1_000_000_000
"""Of every rank's spans and heartbeats. Heartbeats come once a second while one process of the run
lives, whatever it does; agents that can't reach a collector bring them later, and the longest
outage that is planned for is 10 minutes (fault C1)."""

OWN_FORMAT = "rankscope"

SELECT_HEARD = """
SELECT run_id, max(at_ns) AS heard_ns FROM heartbeats
WHERE run_id IN {run_ids:Array(String)} GROUP BY run_id
"""


def read_oldest_heartbeats(
    store: Store, run_id: str, *, recent_ns: int, silent_ns: int, most: int
) -> list[Row]:
    """Return the ranks of a run's newest epoch whose last heartbeats are oldest, those first.

    Ranks that ended well are left out. Each row bears how many ranks there are, and how many
    of them were last heard of since ``recent_ns`` and before ``silent_ns``.

    Args:
        store: The store.
        run_id: The run.
        recent_ns: Unix time by the collector's clock.
        silent_ns: Likewise, earlier.
        most: Rows returned.
    """
    limits = {"recent_ns": recent_ns, "silent_ns": silent_ns, "most": most}
    rows = store.rows(SELECT_UNHEARD, {"run_id": run_id, **limits})
    if not rows:
        return []
    ranks = [row["rank"] for row in rows]
    incarnation = {"run_id": run_id, "epoch": rows[0]["epoch"]}
    told = store.rows(SELECT_LAST_WORDS, {**incarnation, "ranks": ranks})
    words = {row["rank"]: row for row in told}
    return [{**row, **words[row["rank"]]} for row in rows]


def mark_lost_runs(
    store: Store, rows: Iterable[Row], *, unix_ns: Callable[[], int] = time.time_ns
) -> list[Row]:
    """Return rows of runs, the state of silent ones changed to ``lost``.

    Args:
        store: Where the heartbeats are; asked only for runs whose spans are silent.
        rows: With ``run_id, source_format, state``, and ``heard_ns``: Unix time of the last that
            the collector stored of the run, taken out of what is returned.
        unix_ns: Clock that silence is measured by.
    """
    found = [dict(row) for row in rows]
    before_ns = unix_ns() - SILENCE_NS
    heard = {row["run_id"]: row.pop("heard_ns") or 0 for row in found}
    silent = [
        row
        for row in found
        if row["state"] == RUNNING
        and row["source_format"] == OWN_FORMAT
        and heard[row["run_id"]] <= before_ns
    ]
    if silent:
        asked = {"run_ids": [row["run_id"] for row in silent]}
        beats = {row["run_id"]: row["heard_ns"] for row in store.rows(SELECT_HEARD, asked)}
        for row in silent:
            if beats.get(row["run_id"], 0) <= before_ns:
                row["state"] = LOST
    return found


class SilenceWatch:
    """Tells for how long this process has heard nothing of a run, whatever the wall clock did.

    Retention trusts no wall clock with a run that may live: one that jumps by 40 days would
    make every run look silent.

    Args:
        monotonic_ns: Clock of this process.
    """

    def __init__(self, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._heard: dict[str, tuple[int, int]] = {}

    def is_silent(self, run_id: str, heard_ns: int) -> bool:
        """Return whether ``heard_ns`` has stayed the same for `SILENCE_NS` of this process' time.

        Args:
            run_id: The run.
            heard_ns: Unix time of the last that was heard of it, as the store has it now.
        """
        now_ns = self._monotonic_ns()
        last_ns, since_ns = self._heard.get(run_id, (None, now_ns))
        if last_ns != heard_ns:
            since_ns = now_ns
        self._heard[run_id] = (heard_ns, since_ns)
        return now_ns - since_ns >= SILENCE_NS
