"""Steps of a run: their rows, times and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..store.deduplicated_reads import read_deduplicated

if TYPE_CHECKING:
    import pyarrow as pa

    from ..identity import Row
    from ..store.store import Store

SELECT_STEP_TIMES = """
SELECT
    epoch, step, num_ranks, end_ns AS last_ns,
    if(step = before + 1 AND end_ns > before_ns, greatest(begin_ns, before_ns), begin_ns)
        AS first_ns
FROM (
    SELECT *,
        lagInFrame(step, 1, step) OVER by_step AS before,
        lagInFrame(end_ns, 1, begin_ns) OVER by_step AS before_ns
    FROM (
        SELECT
            epoch, step, min(start_ns) AS begin_ns, max(end_ns) AS end_ns, uniq(rank) AS num_ranks
        FROM steps
        WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
        GROUP BY epoch, step
        ORDER BY epoch DESC, step DESC
        LIMIT {most:UInt32}
    )
    WINDOW by_step AS (PARTITION BY epoch ORDER BY step)
)
ORDER BY epoch, step
"""
"""As `analysis.readers.tracer.device_steps.measure_steps`, of the hosts' times."""


SELECT_STEP_MARKS = """
SELECT epoch, step, min(start_ns) AS begin_ns, max(end_ns) AS end_ns,
    avgOrNullIf(loss, isFinite(loss)) AS loss
FROM steps
WHERE run_id = {run_id:String} AND step >= 0
GROUP BY epoch, step
ORDER BY epoch DESC, step DESC
LIMIT {most:UInt32}
"""

SELECT_STEPS = """
SELECT
    epoch, step, rank, start_ns, end_ns, num_tokens, ifNull(loss, nan) AS loss, peak_memory_bytes,
    peak_reserved_bytes, num_alloc_retries, left_out
FROM steps
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, segment, row
"""

SELECT_STEPS_FINAL = SELECT_STEPS.replace("FROM steps", "FROM steps FINAL")

SELECT_MICROBATCHES = """
SELECT
    epoch, step, rank, microbatch, num_tokens, sum_squared_lengths, sum_windowed_lengths,
    num_elements
FROM microbatches FINAL
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, microbatch
"""

SELECT_STEP_BOUNDS = """
SELECT min(start_ns) AS first_ns, max(end_ns) AS last_ns, count() AS num_rows FROM steps
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
"""

SELECT_LAST_STEPS = """
SELECT rank, max(step) AS newest FROM spans
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step >= 0 AND step + 8 >= (
    SELECT max(step) FROM steps WHERE run_id = {run_id:String} AND epoch = {epoch:Int32}
)
GROUP BY rank
"""

MAX_STEP = (1 << 31) - 1


def read_step_times(
    store: Store, run_id: str, *, most: int, first: int | None = None, last: int | None = None
) -> list[Row]:
    """Return begin and end over all ranks of the newest steps, by (epoch, step).

    A step that follows another one begins at its end at the earliest: what two steps share is time
    of the earlier one, as in the report.

    Args:
        store: The store. Duplicate rows do not change the result.
        first: Only steps from this one on; None: from the first.
        last: Only steps up to this one; None: to the newest.
    """
    return store.rows(SELECT_STEP_TIMES, {**step_range(run_id, first, last), "most": most})


def read_step_marks(store: Store, run_id: str, *, most: int) -> list[Row]:
    """Return begin, end and mean loss over all ranks of the newest steps, newest first.

    ``loss`` is null if no rank reported one.
    """
    return store.rows(SELECT_STEP_MARKS, {"run_id": run_id, "most": most})


def read_steps(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> pa.Table:
    """Return the step rows with ``first <= step <= last``, each once, by (epoch, step, rank).

    An unknown loss is NaN, as in the arrays of the analysis.
    """
    bound = step_range(run_id, first, last)
    return read_deduplicated(store, store.arrow, SELECT_STEPS, bound, final=SELECT_STEPS_FINAL)


def read_microbatches(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> pa.Table:
    """Return the micro-batch rows of these steps, by (epoch, step, rank, microbatch)."""
    return store.arrow(SELECT_MICROBATCHES, step_range(run_id, first, last))


def read_step_bounds(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> tuple[int, int] | None:
    """Return begin and end of these steps, Unix ns; None if there are none."""
    (bounds,) = store.rows(SELECT_STEP_BOUNDS, step_range(run_id, first, last))
    return (bounds["first_ns"], bounds["last_ns"]) if bounds["num_rows"] else None


def read_last_steps(store: Store, run_id: str, epoch: int) -> dict[int, int]:
    """Return the last step of an epoch in which each rank recorded a span.

    A rank that is more than 8 steps behind the others is left out.
    """
    bound = {"run_id": run_id, "epoch": epoch}
    rows = read_deduplicated(store, store.rows, SELECT_LAST_STEPS, bound)
    return {row["rank"]: row["newest"] for row in rows}


def step_range(run_id: str, first: int | None, last: int | None) -> dict[str, Any]:
    """Return the bound parameters of a statement for the steps from ``first`` to ``last``."""
    return {
        "run_id": run_id,
        "first": max(first, 0) if first is not None else 0,
        "last": min(last, MAX_STEP) if last is not None else MAX_STEP,
    }
