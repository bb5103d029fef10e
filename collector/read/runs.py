"""Read runs, steps and spans back, each row once.

Small results are dicts, large ones Arrow columns named as in the tables. Rows
may lie in the store twice where the ledger says that a cut was sent again;
there, and only there, a read pays for removing duplicates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..spool.descriptions import RUNNING
from .heartbeats import mark_lost_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..identity import Row
    from ..store.store import Store


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


GAP_TIMEOUT_NS = 60_000_000_000
"""How long rows of a run that trains may be behind later ones: they may be on another way."""

END_OF_TIME = (1 << 63) - 1

SELECT_GAPS = """
SELECT
    epoch, rank, segment, held_end AS gap_first, begin - 1 AS gap_last, count() OVER () AS num_gaps
FROM (
    SELECT
        epoch, rank, segment, at_ns, first_row AS begin,
        max(end_row) OVER (
            PARTITION BY epoch, rank, segment ORDER BY first_row
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS held_end
    FROM ledger FINAL
    WHERE run_id = {run_id:String} AND end_row > first_row AND (epoch, rank, segment) IN (
        SELECT epoch, rank, segment FROM ledger FINAL WHERE run_id = {run_id:String}
        GROUP BY epoch, rank, segment
        HAVING sum(end_row - first_row) != maxIf(end_row, end_row > first_row)
    )
) AS held
WHERE begin > held_end AND at_ns < {before_ns:Int64}
ORDER BY epoch, rank, segment, begin LIMIT 8
"""
"""The inner query leaves out whole segments without a line too few, which is nearly all of them."""

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
    return mark_lost_runs(store, store.rows(SELECT_RUNS), unix_ns=unix_ns)


def read_run_names(store: Store) -> tuple[str, ...]:
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


def read_events(store: Store, run_id: str) -> list[Row]:
    """Return the run's events in order of time."""
    return store.rows(SELECT_EVENTS, {"run_id": run_id})


def read_exits(store: Store, run_id: str) -> list[Row]:
    """Return how each process of the run ended: ``epoch, rank, exit_state, exit_ns, data``.

    ``data`` is the document of its exit or lost event, "" where it left none.
    """
    return store.rows(SELECT_EXITS, {"run_id": run_id})


def read_gaps(store: Store, run_id: str, *, is_running: bool, now_ns: int) -> list[Row]:
    """Return the first gaps: ``epoch, rank, segment, gap_first, gap_last``, and ``num_gaps``.

    Rows that were sent and never confirmed count as there. What is missing at the end of a
    segment, or a whole segment, can't be told from what was never written.

    Args:
        store: Where the ledger is.
        run_id: The run.
        is_running: Whether it trains: then later rows must be there for a minute.
        now_ns: Unix time.
    """
    before_ns = now_ns - GAP_TIMEOUT_NS if is_running else END_OF_TIME
    return store.rows(SELECT_GAPS, {"run_id": run_id, "before_ns": before_ns})


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


def read_previous_run(store: Store, run_id: str) -> str | None:
    """Return the run of the same model and world size that began last before this one.

    None where there is none, or where the job did not name its model.
    """
    found = store.rows(SELECT_PREVIOUS, {"run_id": run_id})
    return found[0]["run_id"] if found else None
