"""Spans outside steps, before the first step of an epoch, by rank and name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store.deduplicated_reads import read_deduplicated

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

STARTED = """
WITH before AS (
    SELECT rank, name, argMax(spans.kind, duration_ns) AS kind, sum(duration_ns) AS part_ns,
        min(start_ns) AS begin_ns, max(start_ns + duration_ns) AS end_ns, count() AS num_spans
    FROM spans FINAL
    WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step < 0 AND depth = 0
        AND start_ns < {before_ns:Int64}
    GROUP BY rank, name
)
"""
"""Operations of each rank that lie in no other one, by name; their kind is that of the longest."""

SELECT_EPOCH = """
SELECT epoch, minIf(start_ns, step >= 0) AS first_ns, countIf(step >= 0) AS num_steps FROM steps
WHERE run_id = {run_id:String} GROUP BY epoch ORDER BY epoch DESC LIMIT 1
"""

SELECT_PARTS = (
    STARTED
    + """
SELECT name, argMax(kind, part_ns) AS kind, count() AS num_ranks,
    toInt64(quantileExact(0.5)(part_ns)) AS median_ns, max(part_ns) AS longest_ns,
    max(num_spans) AS num_calls, argMax(rank, part_ns) AS slowest_rank
FROM before GROUP BY name ORDER BY longest_ns DESC LIMIT {most:UInt32}
"""
)

SELECT_TOTALS = (
    STARTED  # noqa: S608  # constants
    + """
SELECT rank, total_ns, count() OVER () AS num_ranks,
    toInt64(quantileExact(0.5)(total_ns) OVER ()) AS median_ns
FROM (SELECT rank, max(end_ns) - min(begin_ns) AS total_ns FROM before GROUP BY rank)
ORDER BY total_ns DESC, rank LIMIT {most:UInt32}
"""
)

SELECT_LONGEST = """
SELECT rank, name, start_ns, duration_ns
FROM spans FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step < 0 AND depth = 0
    AND start_ns < {before_ns:Int64} AND rank IN {ranks:Array(Int32)}
ORDER BY rank, duration_ns DESC LIMIT {most:UInt32} BY rank
"""

SELECT_HOSTS = """
SELECT rank, any(host) AS host FROM ranks FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND rank IN {ranks:Array(Int32)}
GROUP BY rank
"""

END_OF_TIME = (1 << 63) - 1

MAX_SPANS = 100
"""Spans of one rank that are drawn: hundreds of short ones would take a line of pixels each."""


def read_startup_rows(
    store: Store, run_id: str, *, max_parts: int, max_ranks: int
) -> tuple[int, list[Row], list[Row], list[Row], dict[int, str]] | None:
    """Return the start-up of a run's newest epoch; None if there are no such spans.

    Returns:
        The epoch; the longest parts; the ranks whose start-up took longest; of these, the longest
        spans; and their hosts.
    """
    newest = store.rows(SELECT_EPOCH, {"run_id": run_id})
    epoch = newest[0]["epoch"] if newest else 0
    before_ns = newest[0]["first_ns"] if newest and newest[0]["num_steps"] else END_OF_TIME
    bound = {"run_id": run_id, "epoch": epoch, "before_ns": before_ns}
    parts = read_deduplicated(store, store.rows, SELECT_PARTS, bound | {"most": max_parts})
    if not parts:
        return None
    totals = read_deduplicated(store, store.rows, SELECT_TOTALS, bound | {"most": max_ranks})
    ranks = [row["rank"] for row in totals]
    of_ranks = bound | {"ranks": ranks, "most": MAX_SPANS}
    spans = read_deduplicated(store, store.rows, SELECT_LONGEST, of_ranks)
    hosts = store.rows(SELECT_HOSTS, {"run_id": run_id, "epoch": epoch, "ranks": ranks})
    return epoch, parts, totals, spans, {row["rank"]: row["host"] for row in hosts}
