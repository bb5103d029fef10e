"""Expiry: the rows that are no longer kept, and their removal.

Spans expire by days of their own time, of live runs as of ended ones (`span_days`). A run expires
as a whole, like a deleted one, a year after its end. A run is live while it is running, or if rows
or heartbeats of it came in the last `SILENCE_NS`. A running run, or a run without a description,
that is silent for that long by this process's own clock is lost: its end is the time of its last
row or heartbeat. Imported traces stay until they are deleted.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

from ..read.heartbeats import OWN_FORMAT, SILENCE_NS, SilenceWatch
from ..read.steps import read_step_bounds
from ..spool.descriptions import LOST, RUNNING
from .deletion import EXPIRED
from .removal import apply_large_deleted_masks, wait_for_removals
from .span_days import DAY_NS, MICROBATCHES, PICTURES, SpanDays, merge_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..store.store import Store
    from .deletion import Deletions

HOUR_NS = 3_600 * NS_PER_S

SAMPLE_MARGIN_NS = 60 * NS_PER_S
"""Time around kept steps whose samples are kept: they may explain the steps."""

MAX_DRIFT_NS = HOUR_NS
"""Time by which the wall clock may run ahead of the monotonic one of this process. If it jumps
further, ages are measured with the monotonic clock: what is dropped does not come back."""

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
    FROM run_totals
    WHERE run_id NOT IN (SELECT run_id FROM deletions) AND run_id NOT IN (SELECT run_id FROM runs)
    GROUP BY run_id HAVING min(first_rank) >= 0
) AS known
LEFT JOIN (
    SELECT run_id, max(run_totals.wrote_ns) AS wrote_ns FROM run_totals GROUP BY run_id
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

SELECT_LATE_RUNS = """
SELECT run_id, started_ns, ended_ns FROM runs FINAL
WHERE (source_format != {own:String} OR created_ns >= {before_ns:Int64})
    AND started_ns IS NOT NULL AND ended_ns IS NOT NULL AND started_ns < {before_ns:Int64}
"""
"""Runs whose samples may be older than their arrival: imported and simulated ones."""

SELECT_KEPT_STEPS = """
SELECT run_id, kept.1 AS first, kept.2 AS last
FROM expired FINAL ARRAY JOIN arrayZip(kept_first, kept_last) AS kept
WHERE kept.1 >= 0
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
    """Ages at which rows expire, ns; None: never."""

    spans_ns: int | None = 2 * DAY_NS
    """For spans, by their own time: a day is dropped when all of it is older."""

    findings_ns: int | None = 30 * DAY_NS
    """For spans of the steps around findings and pictures of steps; at least ``spans_ns``."""

    runs_ns: int | None = 365 * DAY_NS
    """For everything else, since the end of the run: steps, rollups, findings, the run's name in
    the list. Checks of hosts are kept as long, by their own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run, as far as it is known."""

    run_id: str
    state: str
    source_format: str
    closed_ns: int
    """Unix time of its end, or of its last row or heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """Rows that were removed."""

    num_spans: dict[str, int] = field(default_factory=dict)
    """Number of removed spans by run."""

    runs: tuple[str, ...] = ()
    """Runs removed whole."""


def due_runs(ends: Iterable[RunEnd], policy: RetentionPolicy, *, now_ns: int) -> tuple[str, ...]:
    """Return the runs that expire now as a whole; never a live or an imported one."""
    if policy.runs_ns is None:
        return ()
    return tuple(
        end.run_id
        for end in ends
        if end.source_format == OWN_FORMAT
        and end.state != RUNNING
        and now_ns - end.closed_ns > max(policy.runs_ns, SILENCE_NS)
    )


class Retention:
    """Removes expired rows.

    Args:
        deletions: Its tombstones: a run that expires whole gets one.
        unix_ns: Clock that measures ages.
        monotonic_ns: Clock that measures the silence of runs, and limits jumps of the other.
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
        self._monotonic_ns = monotonic_ns
        self._begun_ns = unix_ns() - monotonic_ns()
        self._samples_day: int | None = None

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
        whole = due_runs(ends, self._policy, now_ns=now_ns)
        for run_id in whole:
            self._deletions.delete(run_id, reason=EXPIRED)
        num_spans = self._expire_days(now_ns)
        if self._policy.runs_ns is not None:
            expire_host_checks(self._store, before_ns=now_ns - self._policy.runs_ns)
        apply_large_deleted_masks(self._store, (MICROBATCHES, PICTURES, "samples", "host_checks"))
        return Expired(num_spans=dict(num_spans), runs=whole)

    def _expire_days(self, now_ns: int) -> Counter[str]:
        """Drop the days of spans, and the samples around them; return their numbers by run."""
        elapsed_ns = self._begun_ns + self._monotonic_ns()
        age_ns = min(now_ns, elapsed_ns + MAX_DRIFT_NS)
        days, num_spans = SpanDays(self._store), Counter[str]()
        if self._policy.spans_ns is not None:
            first_day = (age_ns - self._policy.spans_ns) // DAY_NS
            num_spans += days.expire(first_day=first_day, now_ns=now_ns)
            if first_day != self._samples_day:  # once a day: it reads the times of all samples
                expire_samples(self._store, before_ns=first_day * DAY_NS)
                self._samples_day = first_day
        if self._policy.findings_ns is not None:
            first_day = (age_ns - self._policy.findings_ns) // DAY_NS
            num_spans += days.expire_kept(first_day=first_day, now_ns=now_ns)
            days.expire_pictures(first_day=first_day)
        return num_spans


def expire_samples(store: Store, *, before_ns: int) -> int:
    """Remove samples older than a Unix time, except those around kept spans.

    Returns:
        Number of removed samples.
    """
    late = store.rows(SELECT_LATE_RUNS, {"own": OWN_FORMAT, "before_ns": before_ns})
    kept = [(row["started_ns"], row["ended_ns"]) for row in late]
    for row in store.rows(SELECT_KEPT_STEPS):
        bounds = read_step_bounds(store, row["run_id"], first=row["first"], last=row["last"])
        kept += [] if bounds is None else [bounds]
    windows = merge_ranges(
        (begin - SAMPLE_MARGIN_NS, end + SAMPLE_MARGIN_NS) for begin, end in kept
    )
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
