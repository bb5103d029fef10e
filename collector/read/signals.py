"""Signals of live runs for the alert rules: losses, newest steps, traffic of the hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

SELECT_STEP_ENDS = """
SELECT step, max(end_ns) AS ended_ns, uniqExact(rank) AS num_ranks,
    avgIf(loss, isFinite(loss)) AS mean_loss, uniqExactIf(rank, isFinite(loss)) AS num_finite,
    uniqExactIf(rank, isNaN(loss) OR isInfinite(loss)) AS num_bad,
    uniqExactIf(rank, isInfinite(loss)) AS num_infinite
FROM steps
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND end_ns > 0
    AND epoch = (SELECT max(epoch) FROM runs WHERE run_id = {run_id:String})
GROUP BY step ORDER BY step
"""

SELECT_HEARTBEAT_STEP = """
SELECT min(newest) AS step FROM (
    SELECT rank, max(step) AS newest FROM heartbeats
    WHERE run_id = {run_id:String} AND at_ns >= {since_ns:Int64} GROUP BY rank
)
"""

# The counter grows from the start of its sampler: a new one counts from zero.
SELECT_TRAFFIC = """
SELECT host, intDiv(at_ns - {first_ns:Int64}, {bucket_ns:Int64}) AS bucket,
    argMax(value, at_ns) - argMin(value, at_ns) AS num_bytes, max(at_ns) - min(at_ns) AS span_ns
FROM samples
WHERE run_id = '' AND name = 'rdma-sent-bytes' AND device = -1
    AND at_ns >= {first_ns:Int64} AND at_ns < {end_ns:Int64}
    AND host IN (SELECT DISTINCT host FROM ranks WHERE run_id = {run_id:String})
GROUP BY host, bucket ORDER BY host, bucket
"""


def read_step_ends(store: Store, run_id: str, *, first: int) -> list[Row]:
    """Return end, ranks and loss of each step of the newest epoch from ``first`` on, ascending."""
    return store.rows(SELECT_STEP_ENDS, {"run_id": run_id, "first": max(first, 0)})


def read_heartbeat_step(store: Store, run_id: str, *, since_ns: int) -> int | None:
    """Return the newest step of which all ranks with a heartbeat since then recorded something."""
    (row,) = store.rows(SELECT_HEARTBEAT_STEP, {"run_id": run_id, "since_ns": since_ns})
    step = row["step"]
    return step if step is not None and step > 0 else None


def read_traffic(
    store: Store, run_id: str, *, first_ns: int, num_buckets: int, bucket_ns: int
) -> list[Row]:
    """Return the bytes that each host of a run has sent by RDMA, in buckets of ``bucket_ns``."""
    bound = {
        "run_id": run_id,
        "first_ns": first_ns,
        "end_ns": first_ns + num_buckets * bucket_ns,
        "bucket_ns": bucket_ns,
    }
    return store.rows(SELECT_TRAFFIC, bound)
