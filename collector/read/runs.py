"""Read runs, steps and spans back, each row once.

Small results are dicts, large ones Arrow columns named as in the tables. Rows
may lie in the store twice where the ledger says that a cut was sent again;
there, and only there, a read pays for removing duplicates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..spool.descriptions import RUNNING
from .gaps import read_gaps
from .silence import with_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from ..identity import Row
    from ..store.store import Store

Found = TypeVar("Found")

MAX_STEP = (1 << 31) - 1

SELECT_RUNS = """
SELECT
    run_id, source_format, state, world_size, layout, started_ns, num_spans, num_steps, num_rows,
    greatest(created_ns, wrote_ns) AS heard_ns
FROM (
    SELECT
        run_id,
        argMax(source_format, epoch) AS source_format,
        argMax(state, epoch) AS state,
        argMax(world_size, epoch) AS world_size,
        argMax(layout, epoch) AS layout,
        min(started_ns) AS started_ns,
        max(created_ns) AS created_ns
    FROM runs FINAL WHERE run_id NOT IN (SELECT run_id FROM deletions) GROUP BY run_id
) AS known
LEFT JOIN (
    SELECT
        run_id,
        sumIf(ledger.num_spans, state != 'sent') AS num_spans,
        sumIf(ledger.num_spans + num_steps + num_microbatches, state != 'sent') AS num_rows,
        max(at_ns) AS wrote_ns
    FROM ledger FINAL GROUP BY run_id
) AS counted USING run_id
LEFT JOIN (
    SELECT run_id, uniqExact(epoch, step) AS num_steps FROM steps WHERE step >= 0 GROUP BY run_id
) AS stepped USING run_id
ORDER BY created_ns DESC, run_id
"""
"""Spans of a cut that is ``sent`` may be there or not, and come without another word: who looked
at all that is counted must find more of it afterwards, or never looks again."""

SELECT_RUN_NAMES = """
SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM deletions)
GROUP BY run_id ORDER BY max(created_ns) DESC, run_id
"""

SELECT_EPOCHS = """
SELECT * FROM runs FINAL
WHERE run_id = {run_id:String} AND run_id NOT IN (SELECT run_id FROM deletions)
ORDER BY epoch
"""

SELECT_RANKS = """
SELECT * FROM ranks FINAL WHERE run_id = {run_id:String}
ORDER BY epoch, rank, started_ns, process
"""

SELECT_GROUPS = """
SELECT * FROM groups FINAL WHERE run_id = {run_id:String} ORDER BY epoch, group_id
"""

SELECT_ACCOUNT = """
SELECT
    epoch, rank,
    sum(num_spans) AS num_spans,
    sum(num_steps) AS num_steps,
    sum(num_microbatches) AS num_microbatches,
    sum(num_torn) AS num_torn,
    sum(num_bad) AS num_bad,
    countIf(state != 'stored') AS num_doubtful
FROM ledger FINAL WHERE run_id = {run_id:String} AND state != 'sent'
GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_BAD = """
SELECT reason, count() AS num_rows FROM bad_rows FINAL
WHERE run_id = {run_id:String} GROUP BY reason ORDER BY reason
"""

SELECT_PACE = """
SELECT epoch, rank, argMax(data, at_ns) AS data FROM events
WHERE run_id = {run_id:String} AND kind = 'pace' GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_CLOCKS = """
SELECT host, boot_id, argMax(clock_error_ns, at_ns) AS clock_error_ns FROM clock FINAL
WHERE (host, boot_id) IN (SELECT host, boot_id FROM ranks WHERE run_id = {run_id:String})
GROUP BY host, boot_id ORDER BY host, boot_id
"""

SELECT_EXPIRED = """
SELECT epoch, last_step, kept_first, kept_last FROM expired FINAL
WHERE run_id = {run_id:String} ORDER BY epoch
"""

SELECT_EVENTS = """
SELECT epoch, rank, at_ns, kind, text, data FROM events FINAL
WHERE run_id = {run_id:String} ORDER BY at_ns, epoch, rank, line
"""

COUNT_DOUBTFUL = """
SELECT count() AS num_doubtful FROM ledger
WHERE run_id = {run_id:String} AND state = 'repeated'
"""

SELECT_STEPS = """
SELECT
    epoch, step, rank, start_ns, end_ns, num_tokens, loss, peak_memory_bytes, left_out
FROM steps
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, segment, row
"""

SELECT_STEPS_ONCE = """
SELECT
    epoch, step, rank, start_ns, end_ns, num_tokens, loss, peak_memory_bytes, left_out
FROM steps FINAL
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, segment, row
"""

SELECT_SPANS = """
SELECT
    epoch, step, rank, kind, name, track, start_ns, duration_ns, launch_ns, group_id, seq,
    src_rank, dst_rank, microbatch, chunk, num_bytes, interval_id, flags, depth
FROM spans
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, start_ns, segment, row
"""

SELECT_SPANS_ONCE = """
SELECT
    epoch, step, rank, kind, name, track, start_ns, duration_ns, launch_ns, group_id, seq,
    src_rank, dst_rank, microbatch, chunk, num_bytes, interval_id, flags, depth
FROM spans FINAL
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, start_ns, segment, row
"""

COUNT_SPANS = """
SELECT count() AS num_spans FROM spans
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
"""

SELECT_MICROBATCHES = """
SELECT epoch, step, rank, microbatch, num_tokens, sum_squared_lengths FROM microbatches FINAL
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
ORDER BY epoch, step, rank, microbatch
"""

SELECT_STEP_BOUNDS = """
SELECT min(start_ns) AS first_ns, max(end_ns) AS last_ns, count() AS num_rows FROM steps
WHERE run_id = {run_id:String} AND step >= {first:Int32} AND step <= {last:Int32}
"""

SELECT_EXITS = """
SELECT epoch, rank, exit_state, exit_ns, told.data AS data FROM (
    SELECT epoch, rank, process, exit_state, exit_ns FROM ranks FINAL
    WHERE run_id = {run_id:String} AND exit_state != ''
) AS ended
LEFT JOIN (
    SELECT epoch, rank, process, argMax(data, at_ns) AS data FROM events
    WHERE run_id = {run_id:String} AND kind IN ('exit', 'lost') GROUP BY epoch, rank, process
) AS told USING (epoch, rank, process)
ORDER BY epoch, rank, process
"""

SELECT_LAST_STEPS = """
SELECT rank, max(step) AS newest FROM spans
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step >= 0 AND step + 8 >= (
    SELECT max(step) FROM steps WHERE run_id = {run_id:String} AND epoch = {epoch:Int32}
)
GROUP BY rank
"""

SELECT_MANIFESTS = """
SELECT manifest_hash, settings FROM manifests FINAL WHERE run_id = {run_id:String}
"""

SELECT_RANK_MANIFESTS = """
SELECT epoch, rank, argMax(manifest_hash, (started_ns, process)) AS newest_hash
FROM ranks FINAL WHERE run_id = {run_id:String} AND manifest_hash != ''
GROUP BY epoch, rank ORDER BY epoch, rank
"""

SELECT_PREVIOUS = """
WITH now AS (
    SELECT
        argMax(JSONExtractString(model, 'name'), epoch) AS model_name,
        argMax(world_size, epoch) AS world_size,
        min(created_ns) AS created_ns
    FROM runs FINAL WHERE run_id = {run_id:String}
)
SELECT
    run_id,
    argMax(JSONExtractString(model, 'name'), epoch) AS model_name,
    argMax(world_size, epoch) AS size,
    min(created_ns) AS began_ns
FROM runs FINAL
WHERE run_id != {run_id:String} AND source_format = 'rankscope'
GROUP BY run_id
HAVING model_name != ''
    AND model_name = (SELECT model_name FROM now)
    AND size = (SELECT world_size FROM now)
    AND began_ns < (SELECT created_ns FROM now)
ORDER BY began_ns DESC, run_id LIMIT 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """All small rows that describe one run; `epochs` is empty where the run is unknown."""

    epochs: list[Row]
    ranks: list[Row]
    """One a process, so a rank that was restarted within an epoch comes more than once."""

    groups: list[Row]
    account: list[Row]
    """Per (epoch, rank): records stored, torn and set aside."""

    bad: list[Row]
    """Rows set aside, by reason."""

    pace: list[Row]
    """Latest ``pace`` event of each (epoch, rank)."""

    clocks: list[Row]
    """Latest error bound of each host's clock, -1 where nobody measured it."""

    expired: list[Row] = field(default_factory=list)
    """Per epoch whose spans are kept no longer: up to which step, and which steps' are."""

    gaps: list[Row] = field(default_factory=list)
    """The first ranges of rows that did not come though later ones did: see `read_gaps`."""


def list_runs(store: Store, *, unix_ns: Callable[[], int] = time.time_ns) -> list[Row]:
    """Return one row a run, the newest first.

    One that is said to be running and of which nothing was heard for long is ``lost``.

    Args:
        store: Where from.
        unix_ns: Clock that the silence is measured by.
    """
    return with_lost(store, store.rows(SELECT_RUNS), unix_ns=unix_ns)


def run_names(store: Store) -> tuple[str, ...]:
    """Return the names of all runs, the newest first."""
    return tuple(row["run_id"] for row in store.rows(SELECT_RUN_NAMES))


def read_run(store: Store, run_id: str, *, unix_ns: Callable[[], int] = time.time_ns) -> RunRows:
    """Return what is known of a run besides its spans.

    Args:
        store: Where from.
        run_id: The run.
        unix_ns: Clock that the age of a gap is measured by.
    """
    bound = {"run_id": run_id}
    epochs = store.rows(SELECT_EPOCHS, bound)
    if not epochs:
        return RunRows(epochs=[], ranks=[], groups=[], account=[], bad=[], pace=[], clocks=[])
    account = store.rows(SELECT_ACCOUNT, bound)
    has_bad = any(row["num_bad"] for row in account)
    has_pace = any(row["paced"] for row in epochs)
    return RunRows(
        epochs=epochs,
        ranks=store.rows(SELECT_RANKS, bound),
        groups=store.rows(SELECT_GROUPS, bound),
        account=account,
        bad=store.rows(SELECT_BAD, bound) if has_bad else [],
        pace=store.rows(SELECT_PACE, bound) if has_pace else [],
        clocks=store.rows(SELECT_CLOCKS, bound),
        expired=store.rows(SELECT_EXPIRED, bound),
        gaps=read_gaps(store, run_id, is_running=epochs[-1]["state"] == RUNNING, now_ns=unix_ns()),
    )


def read_steps(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> pa.Table:
    """Return the step rows with ``first <= step <= last``, by (epoch, step, rank)."""
    bound = _range(run_id, first, last)
    return each_once(
        store,
        run_id,
        lambda sql: store.arrow(sql, bound),
        plain=SELECT_STEPS,
        once=SELECT_STEPS_ONCE,
    )


def read_spans(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> pa.Table:
    """Return the spans of these steps, by (epoch, step, rank, start_ns).

    Spans outside any step are left out.
    """
    bound = _range(run_id, first, last)
    return each_once(
        store,
        run_id,
        lambda sql: _read_spans(store, sql, bound),
        plain=SELECT_SPANS,
        once=SELECT_SPANS_ONCE,
    )


def read_spans_once(store: Store, run_id: str, *, first: int, last: int) -> pa.Table:
    """Return what `read_spans` does, free of duplicates that the ledger does not tell of yet.

    Between the second storing of a cut and the note about it, rows stand there twice.
    """
    return store.arrow(SELECT_SPANS_ONCE, _range(run_id, first, last))


def _read_spans(store: Store, sql: str, bound: dict[str, Any]) -> pa.Table:
    (counted,) = store.rows(COUNT_SPANS, bound)
    return store.long_arrow(sql, bound, num_rows=counted["num_spans"])


def read_microbatches(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> pa.Table:
    """Return the micro-batch rows of these steps, by (epoch, step, rank, microbatch)."""
    return store.arrow(SELECT_MICROBATCHES, _range(run_id, first, last))


def read_events(store: Store, run_id: str) -> list[Row]:
    """Return the run's events in order of time."""
    return store.rows(SELECT_EVENTS, {"run_id": run_id})


def read_step_bounds(
    store: Store, run_id: str, *, first: int | None = None, last: int | None = None
) -> tuple[int, int] | None:
    """Return when these steps began and ended, Unix ns; None where there is none."""
    (found,) = store.rows(SELECT_STEP_BOUNDS, _range(run_id, first, last))
    return (found["first_ns"], found["last_ns"]) if found["num_rows"] else None


def read_exits(store: Store, run_id: str) -> list[Row]:
    """Return how each process of the run ended: ``epoch, rank, exit_state, exit_ns, data``.

    ``data`` is the document of its exit or lost event, "" where it left none.
    """
    return store.rows(SELECT_EXITS, {"run_id": run_id})


def read_last_steps(store: Store, run_id: str, epoch: int) -> dict[int, int]:
    """Return the last step of an epoch in which each rank recorded anything.

    A rank that was more than 8 steps behind the others by then is left out.
    """
    rows = store.rows(SELECT_LAST_STEPS, {"run_id": run_id, "epoch": epoch})
    return {row["rank"]: row["newest"] for row in rows}


def may_repeat(store: Store, run_id: str) -> bool:
    """Return whether the ledger knows of a cut of this run that may be stored twice."""
    return bool(store.rows(COUNT_DOUBTFUL, {"run_id": run_id})[0]["num_doubtful"])


def each_once(
    store: Store,
    run_id: str,
    ask: Callable[[str], Found],
    *,
    plain: str,
    once: str,
) -> Found:
    """Return what ``plain`` selects if no row of the run can be there twice, else ``once``.

    A repetition is noted before it goes in, so one that came while ``plain`` was read is
    known afterwards.

    Args:
        store: The store.
        run_id: The run that is asked about.
        ask: Runs a statement.
        plain: Reads rows as they lie there.
        once: Reads the same without duplicates, which takes longer.
    """
    if not may_repeat(store, run_id):
        found = ask(plain)
        if not may_repeat(store, run_id):
            return found
    return ask(once)


def _range(run_id: str, first: int | None, last: int | None) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "first": max(first, 0) if first is not None else 0,
        "last": min(last, MAX_STEP) if last is not None else MAX_STEP,
    }


def read_manifests(store: Store, run_id: str) -> list[tuple[int, int, Mapping[str, str]]]:
    """Return (epoch, rank, settings) of each rank that told its own; equal ones share a mapping."""
    bound = {"run_id": run_id}
    settings = {
        row["manifest_hash"]: row["settings"] for row in store.rows(SELECT_MANIFESTS, bound)
    }
    return [
        (row["epoch"], row["rank"], settings[row["newest_hash"]])
        for row in (store.rows(SELECT_RANK_MANIFESTS, bound) if settings else [])
        if row["newest_hash"] in settings
    ]


def previous_run(store: Store, run_id: str) -> str | None:
    """Return the run of the same model and world size that began last before this one.

    None where there is none, or where the job did not name its model.
    """
    found = store.rows(SELECT_PREVIOUS, {"run_id": run_id})
    return found[0]["run_id"] if found else None
