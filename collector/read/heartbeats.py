"""What the store knows of ranks that said a moment ago that they live."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

SELECT_NEWEST = """
SELECT rank, host, max(at_ns) AS newest_ns, argMax(epoch, (at_ns, pid)) AS epoch,
    argMax(address, (at_ns, pid)) AS address, argMax(pod, (at_ns, pid)) AS pod,
    argMax(hardware, (at_ns, pid)) AS hardware, argMax(state, (at_ns, pid)) AS state,
    argMax(step, (at_ns, pid)) AS step
FROM heartbeats WHERE run_id = {run_id:String} GROUP BY rank, host ORDER BY rank, host
"""

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


def longest_unheard(
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


def newest_heartbeats(store: Store, run_id: str) -> list[Row]:
    """Return the last heartbeat of each rank on each host, by rank.

    A rank that was moved comes once a host. ``newest_ns`` is Unix time by the collector's clock.
    """
    return store.rows(SELECT_NEWEST, {"run_id": run_id})
