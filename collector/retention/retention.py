"""Expiry: the rows that are no longer kept, and their removal.

Spans expire by days of their own time, of live runs as of ended ones (`span_days`). A run expires
as a whole, like a deleted one, a year after its end. A run is live while it is running, or if rows
or heartbeats of it came in the last `SILENCE_NS`. A running run, or a run without a description,
that is silent for that long by this process's own clock is lost: its end is the time of its last
row or heartbeat. Imported traces stay until they are deleted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

from ..read.heartbeats import OWN_FORMAT, SILENCE_NS, SilenceWatch
from ..read.steps import read_step_bounds
from ..spool.descriptions import LOST, RUNNING
from .deletion import EXPIRED
from .removal import apply_large_deleted_masks, wait_for_removals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..identity import Row
    from ..store.store import Store
    from .deletion import Deletions

HOUR_NS = 3_600 * NS_PER_S
DAY_NS = 24 * HOUR_NS

STEPS_BEFORE, STEPS_AFTER = 8, 32
"""Steps kept around a finding's onset and its end; those between are kept if they are few."""

SAMPLE_MARGIN_NS = 60 * NS_PER_S
"""Time around kept steps whose samples are kept: they may explain the steps."""

END_OF_TIME = (1 << 63) - 1

STEP_TABLES = ("spans", "microbatches")
PICTURES = "pictures"

SELECT_ENDS = """
SELECT run_id, state, source_format, greatest(closed_ns, wrote_ns, beat_ns) AS closed_ns FROM (
    SELECT
        run_id,
        argMax(state, epoch) AS state,
        argMax(source_format, epoch) AS source_format,
        greatest(
            max(created_ns), max(ifNull(ended_ns, 0)), max(toInt64(revision))
        ) AS closed_ns
    FROM runs FINAL WHERE run_id NOT IN (SELECT run_id FROM deletions) GROUP BY run_id
    UNION ALL
    SELECT run_id, 'running' AS state, 'rankscope' AS source_format, 0 AS closed_ns
    FROM ledger
    WHERE run_id NOT IN (SELECT run_id FROM deletions) AND run_id NOT IN (SELECT run_id FROM runs)
    GROUP BY run_id HAVING min(rank) >= 0
) AS known
LEFT JOIN (
    SELECT run_id, max(at_ns) AS wrote_ns FROM ledger GROUP BY run_id
) AS wrote USING run_id
LEFT JOIN (
    SELECT run_id, max(at_ns) AS beat_ns FROM heartbeats
    WHERE at_ns > {live_ns:Int64} GROUP BY run_id
) AS beat USING run_id
ORDER BY run_id
"""
"""A run without a description has spans only, and no record of its end: it is lost once it is
silent. Ledger lines without a rank are of an interrupted import. The revision of a description is
the time at which it was written: dumps that are imported have no rows, and may be years old."""

SELECT_LAST_STEPS = """
SELECT run_id, epoch, max(step) AS last_step FROM spans
WHERE run_id IN {run_ids:Array(String)} GROUP BY run_id, epoch ORDER BY run_id, epoch
"""

SELECT_FINDINGS = """
SELECT run_id, epoch, first_step, last_step FROM findings FINAL
WHERE run_id IN {run_ids:Array(String)} AND first_step IS NOT NULL AND cause NOT IN
    ('healthy', 'insufficient-evidence')
"""

COUNT_OLD = """
SELECT count() AS n FROM {table:Identifier}
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step <= {last_step:Int32}
AND NOT arrayExists((a, b) -> step >= a AND step <= b,
    {kept_first:Array(Int32)}, {kept_last:Array(Int32)})
"""

HIDE_OLD = """
DELETE FROM {table:Identifier}
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step <= {last_step:Int32}
AND NOT arrayExists((a, b) -> step >= a AND step <= b,
    {kept_first:Array(Int32)}, {kept_last:Array(Int32)}) SETTINGS lightweight_deletes_sync = 0
"""

HIDE_FINER_PICTURES = """
DELETE FROM pictures
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step <= {last_step:Int32} AND depth > 0
AND NOT arrayExists((a, b) -> step >= a AND step <= b,
    {kept_first:Array(Int32)}, {kept_last:Array(Int32)}) SETTINGS lightweight_deletes_sync = 0
"""
"""Pictures of a part of a step expire with its spans; the picture of the whole step is kept."""

SELECT_EPOCHS = """
SELECT
    run_id, epoch, first_ns,
    if(state = 'running', {end_of_time:Int64}, end_ns) AS last_ns,
    kept_first, kept_last, expired_ns > 0 AS is_expired
FROM (
    SELECT run_id, epoch, min(start_ns) AS first_ns, max(end_ns) AS end_ns FROM steps
    WHERE step >= 0 GROUP BY run_id, epoch
) AS stepped
LEFT JOIN (SELECT run_id, epoch, state FROM runs FINAL) AS known USING (run_id, epoch)
LEFT JOIN (
    SELECT run_id, epoch, kept_first, kept_last, at_ns AS expired_ns FROM expired FINAL
) AS went USING (run_id, epoch)
ORDER BY first_ns
"""

COUNT_OLD_SAMPLES = """
SELECT count() AS n FROM samples
WHERE at_ns < {before_ns:Int64} AND NOT arrayExists((a, b) -> at_ns >= a AND at_ns <= b,
    {first:Array(Int64)}, {last:Array(Int64)})
"""

HIDE_OLD_SAMPLES = """
DELETE FROM samples
WHERE at_ns < {before_ns:Int64} AND NOT arrayExists((a, b) -> at_ns >= a AND at_ns <= b,
    {first:Array(Int64)}, {last:Array(Int64)}) SETTINGS lightweight_deletes_sync = 0
"""

COUNT_OLD_CHECKS = "SELECT count() AS n FROM host_checks WHERE at_ns < {before_ns:Int64}"

HIDE_OLD_CHECKS = (
    "DELETE FROM host_checks WHERE at_ns < {before_ns:Int64} SETTINGS lightweight_deletes_sync = 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Times after a run's end at which its rows expire, ns; None: never."""

    spans_ns: int | None = 2 * DAY_NS
    findings_ns: int | None = 30 * DAY_NS
    """For spans of the steps around findings; at least ``spans_ns``."""

    runs_ns: int | None = 365 * DAY_NS
    """For everything else: steps, rollups, findings, the run's name in the list. Checks of hosts
    are kept as long, by their own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run, as far as it is known."""

    run_id: str
    state: str
    source_format: str
    closed_ns: int
    """Unix time of its end, or of its last row or heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRuns:
    """Runs of which rows expire now."""

    whole: tuple[str, ...] = ()
    """Runs that expire whole."""

    all_spans: tuple[str, ...] = ()
    """Runs that lose all spans."""

    other_spans: tuple[str, ...] = ()
    """Runs that lose the spans of steps without a finding nearby."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """Rows that were removed."""

    num_spans: dict[str, int] = field(default_factory=dict)
    """Number of removed spans by run."""

    runs: tuple[str, ...] = ()
    """Runs removed whole."""


def due_runs(ends: Iterable[RunEnd], policy: RetentionPolicy, *, now_ns: int) -> DueRuns:
    """Return the runs of which rows expire now; never a live or an imported one."""
    whole, all_spans, other_spans = [], [], []
    for end in ends:
        age_ns = now_ns - end.closed_ns
        if end.source_format != OWN_FORMAT or end.state == RUNNING or age_ns <= SILENCE_NS:
            continue
        if policy.runs_ns is not None and age_ns > policy.runs_ns:
            whole.append(end.run_id)
        elif policy.findings_ns is not None and age_ns > policy.findings_ns:
            all_spans.append(end.run_id)
        elif policy.spans_ns is not None and age_ns > policy.spans_ns:
            other_spans.append(end.run_id)
    return DueRuns(whole=tuple(whole), all_spans=tuple(all_spans), other_spans=tuple(other_spans))


def kept_steps(findings: Iterable[tuple[int, int]], *, last_step: int) -> list[tuple[int, int]]:
    """Return the ranges of steps around findings, both ends included, ascending and disjoint.

    Args:
        findings: First and last step of each finding.
        last_step: Last step of the epoch; ranges end there.
    """
    wanted = []
    for first, last in findings:
        onset = (first - STEPS_BEFORE, first + STEPS_AFTER)
        end = (last - STEPS_BEFORE, last + STEPS_AFTER)
        wanted += [(onset[0], end[1])] if end[0] <= onset[1] + 1 else [onset, end]
    merged: list[tuple[int, int]] = []
    for first, last in sorted((max(a, 0), min(b, last_step)) for a, b in wanted):
        if last < first:
            continue
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


class Retention:
    """Removes expired rows.

    Args:
        store: The store.
        deletions: Its tombstones: a run that expires whole gets one.
        policy: Times of expiry.
        unix_ns: Clock that measures ages.
        monotonic_ns: Clock that measures the silence of runs.
    """

    def __init__(
        self,
        store: Store,
        deletions: Deletions,
        *,
        policy: RetentionPolicy | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._silence = SilenceWatch(monotonic_ns=monotonic_ns)
        self._store = store
        self._deletions = deletions
        self._policy = policy or RetentionPolicy()
        self._unix_ns = unix_ns

    def expire(self) -> Expired:
        """Remove the rows that expire now.

        Raises:
            StoreError: The store failed; the next call removes what is left.
        """
        now_ns = self._unix_ns()
        rows = self._store.rows(SELECT_ENDS, {"live_ns": now_ns - SILENCE_NS})
        ends = [
            replace(end, state=LOST)
            if end.state == RUNNING and self._silence.is_silent(end.run_id, end.closed_ns)
            else end
            for end in (RunEnd(**row) for row in rows)
        ]
        due = due_runs(ends, self._policy, now_ns=now_ns)
        for run_id in due.whole:
            self._deletions.delete(run_id, reason=EXPIRED)
        num_spans = self._expire_spans(due, now_ns)
        if self._policy.spans_ns is not None:
            expire_samples(self._store, before_ns=now_ns - self._policy.spans_ns)
        if self._policy.runs_ns is not None:
            expire_host_checks(self._store, before_ns=now_ns - self._policy.runs_ns)
        apply_large_deleted_masks(self._store, (*STEP_TABLES, PICTURES, "samples", "host_checks"))
        return Expired(num_spans=num_spans, runs=due.whole)

    def _expire_spans(self, due: DueRuns, now_ns: int) -> dict[str, int]:
        run_ids = [*due.all_spans, *due.other_spans]
        if not run_ids:
            return {}
        last_steps = self._store.rows(SELECT_LAST_STEPS, {"run_ids": run_ids})
        findings = self._store.rows(SELECT_FINDINGS, {"run_ids": list(due.other_spans)})
        removed: dict[str, int] = {}
        for row in last_steps:
            old = _expired_row(row, findings)
            num_rows = {
                table: self._store.rows(COUNT_OLD, {**old, "table": table})[0]["n"]
                for table in STEP_TABLES
            }
            if not any(num_rows.values()):
                continue
            # Stored first: a reader that finds no spans must find the reason.
            self._store.insert_rows("expired", [{**old, "at_ns": now_ns}])
            for table in STEP_TABLES:
                if num_rows[table]:
                    self._store.command(HIDE_OLD, {**old, "table": table})
            self._store.command(HIDE_FINER_PICTURES, old)
            removed[row["run_id"]] = removed.get(row["run_id"], 0) + num_rows["spans"]
        wait_for_removals(self._store, (*STEP_TABLES, PICTURES))
        return removed


def expire_samples(store: Store, *, before_ns: int) -> int:
    """Remove samples older than a Unix time, except those around steps whose spans are kept.

    Returns:
        Number of removed samples.
    """
    windows = _kept_windows(store)
    old = {
        "before_ns": before_ns,
        "first": [first for first, _ in windows],
        "last": [last for _, last in windows],
    }
    num_old = int(store.rows(COUNT_OLD_SAMPLES, old)[0]["n"])
    if num_old:
        store.command(HIDE_OLD_SAMPLES, old)
        wait_for_removals(store, ["samples"])
    return num_old


def expire_host_checks(store: Store, *, before_ns: int) -> int:
    """Remove the checks of hosts older than a Unix time; return the number of removed rows."""
    old = {"before_ns": before_ns}
    num_old = int(store.rows(COUNT_OLD_CHECKS, old)[0]["n"])
    if num_old:
        store.command(HIDE_OLD_CHECKS, old)
        wait_for_removals(store, ["host_checks"])
    return num_old


def _expired_row(row: Row, findings: Sequence[Row]) -> Row:
    """Return the row of table ``expired`` for an epoch."""
    near = [
        (finding["first_step"], finding["first_step"] if finding["last_step"] is None
         else finding["last_step"])
        for finding in findings
        if finding["run_id"] == row["run_id"] and finding["epoch"] in {row["epoch"], -1}
    ]  # fmt: skip
    kept = kept_steps(near, last_step=row["last_step"])
    return {
        "run_id": row["run_id"],
        "epoch": row["epoch"],
        "last_step": row["last_step"],
        "kept_first": [first for first, _ in kept],
        "kept_last": [last for _, last in kept],
    }


def _kept_windows(store: Store) -> list[tuple[int, int]]:
    """Return the times, Unix ns, around steps whose spans are kept, ascending and disjoint."""
    windows: list[tuple[int, int]] = []
    for row in store.rows(SELECT_EPOCHS, {"end_of_time": END_OF_TIME}):
        bounds = [(row["first_ns"], min(row["last_ns"], END_OF_TIME - SAMPLE_MARGIN_NS))]
        if row["is_expired"]:
            kept = zip(row["kept_first"], row["kept_last"], strict=True)
            read = (read_step_bounds(store, row["run_id"], first=a, last=b) for a, b in kept)
            bounds = [bound for bound in read if bound is not None]
        windows += [(begin - SAMPLE_MARGIN_NS, end + SAMPLE_MARGIN_NS) for begin, end in bounds]
    merged: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged
