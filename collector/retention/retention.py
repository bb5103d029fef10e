"""Which rows are kept no longer, and their removal.

A run is live while it runs, or while rows or heartbeats of it came in the last quarter of
an hour. One that is said to run, or that nobody described, and was not heard of for as long, by
this process' own clock, is lost: it counts as ended at the last that was heard. Nothing of a live
run ever expires, save heartbeats: their table itself keeps the last hour and each rank's newest.
Of a run that has ended, the spans go first, but those of the steps around its findings; much later
these; in the end the run itself, like one that is deleted. Imported traces stay until somebody
deletes them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..read.heartbeats import SilenceWatch
from ..read.steps import read_step_bounds
from ..spool.descriptions import LOST, RUNNING
from .deletion import EXPIRED
from .removal import await_removals, free_where_many_hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..identity import Row
    from ..store.store import Store
    from .deletion import Deletions

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
LIVE_NS = HOUR_NS // 4
OWN_FORMAT = "rankscope"

STEPS_BEFORE, STEPS_AFTER = 8, 32
"""Around a finding's onset and its end; those between are kept where they are few."""

STEP_TABLES = ("spans", "microbatches")
PICTURES = "pictures"

SELECT_ENDS = """
SELECT run_id, state, source_format, greatest(closed_ns, wrote_ns, beat_ns) AS closed_ns FROM (
    SELECT
        run_id,
        argMax(state, epoch) AS state,
        argMax(source_format, epoch) AS source_format,
        greatest(max(created_ns), max(ifNull(ended_ns, 0))) AS closed_ns
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
"""Of a run that nobody described only spans came, and nobody can tell that it ended: it is lost
once it is silent. Rows of no rank are those of an import that was cut short."""

SELECT_LAST_STEPS = """
SELECT run_id, epoch, max(step) AS last_step FROM spans
WHERE run_id IN {run_ids:Array(String)} GROUP BY run_id, epoch ORDER BY run_id, epoch
"""

SELECT_FINDINGS = """
SELECT run_id, epoch, first_step, last_step FROM findings FINAL
WHERE run_id IN {run_ids:Array(String)} AND first_step IS NOT NULL AND cause NOT IN
    ('healthy', 'insufficient-evidence')
"""


HIDE_FINER_PICTURES = """
DELETE FROM pictures
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step <= {last_step:Int32} AND depth > 0
AND NOT arrayExists((a, b) -> step >= a AND step <= b,
    {kept_first:Array(Int32)}, {kept_last:Array(Int32)}) SETTINGS lightweight_deletes_sync = 0
"""
"""What shows a part of a step goes with the spans of that part; the whole step's picture stays."""


MARGIN_NS = 60_000_000_000
"""Around the steps: what happened just before and after them explains them too."""

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

END_OF_TIME = (1 << 63) - 1

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How long after a run's end what of it is kept, ns; None: for ever."""

    spans_ns: int | None = 2 * DAY_NS
    findings_ns: int | None = 30 * DAY_NS
    """Spans of the steps around findings; at least ``spans_ns``."""

    runs_ns: int | None = 365 * DAY_NS
    """All else: steps, rollups, findings, the run's name in the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """When a run ended, as far as anybody knows."""

    run_id: str
    state: str
    source_format: str
    closed_ns: int
    """The last that was heard of it, Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is to go."""

    runs: tuple[str, ...] = ()
    """Whole runs."""

    all_spans: tuple[str, ...] = ()
    """Runs that lose every span."""

    plain_spans: tuple[str, ...] = ()
    """Runs that lose the spans of steps without a finding near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """What went."""

    num_spans: dict[str, int] = field(default_factory=dict)
    """Spans removed, by run."""

    runs: tuple[str, ...] = ()
    """Runs removed whole."""


def due_of(ends: Iterable[RunEnd], keep: Keep, *, now_ns: int) -> Due:
    """Return what of these runs is to go now; nothing of a live or an imported one."""
    runs, all_spans, plain_spans = [], [], []
    for end in ends:
        age_ns = now_ns - end.closed_ns
        if end.source_format != OWN_FORMAT or end.state == RUNNING or age_ns <= LIVE_NS:
            continue
        if keep.runs_ns is not None and age_ns > keep.runs_ns:
            runs.append(end.run_id)
        elif keep.findings_ns is not None and age_ns > keep.findings_ns:
            all_spans.append(end.run_id)
        elif keep.spans_ns is not None and age_ns > keep.spans_ns:
            plain_spans.append(end.run_id)
    return Due(runs=tuple(runs), all_spans=tuple(all_spans), plain_spans=tuple(plain_spans))


def kept_steps(findings: Iterable[tuple[int, int]], *, last_step: int) -> list[tuple[int, int]]:
    """Return the ranges of steps around findings, both ends included, ascending and apart.

    Args:
        findings: First and last step of each.
        last_step: Of the epoch; ranges end there.
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
    """Removes what is kept no longer.

    Args:
        store: The store.
        deletions: Its tombstones: a run that goes whole gets one.
        keep: How long what is kept.
        unix_ns: Clock that ages are measured by.
        monotonic_ns: Clock that the silence of a run is measured by.
    """

    def __init__(
        self,
        store: Store,
        deletions: Deletions,
        *,
        keep: Keep | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._silence = SilenceWatch(monotonic_ns=monotonic_ns)
        self._store = store
        self._deletions = deletions
        self._keep = keep or Keep()
        self._unix_ns = unix_ns

    def expire(self) -> Expired:
        """Remove what is due; return what went.

        Raises:
            StoreError: The store failed; what is due stays so.
        """
        now_ns = self._unix_ns()
        rows = self._store.rows(SELECT_ENDS, {"live_ns": now_ns - LIVE_NS})
        ends = [self._with_lost(RunEnd(**row)) for row in rows]
        due = due_of(ends, self._keep, now_ns=now_ns)
        for run_id in due.runs:
            self._deletions.delete(run_id, reason=EXPIRED)
        num_spans = self._expire_spans(due, now_ns)
        if self._keep.spans_ns is not None:
            expire_samples(self._store, before_ns=now_ns - self._keep.spans_ns)
        free_where_many_hidden(self._store, (*STEP_TABLES, PICTURES, "samples"))
        return Expired(num_spans=num_spans, runs=due.runs)

    def _with_lost(self, end: RunEnd) -> RunEnd:
        """Return a run that is said to be running, and is silent, as lost."""
        if end.state != RUNNING or not self._silence.is_silent(end.run_id, end.closed_ns):
            return end
        return replace(end, state=LOST)

    def _expire_spans(self, due: Due, now_ns: int) -> dict[str, int]:
        run_ids = [*due.all_spans, *due.plain_spans]
        if not run_ids:
            return {}
        lasts = self._store.rows(SELECT_LAST_STEPS, {"run_ids": run_ids})
        findings = self._store.rows(SELECT_FINDINGS, {"run_ids": list(due.plain_spans)})
        removed: dict[str, int] = {}
        for row in lasts:
            old = _old_steps(row, findings)
            num_rows = {
                table: self._store.rows(COUNT_OLD, {**old, "table": table})[0]["n"]
                for table in STEP_TABLES
            }
            if not any(num_rows.values()):
                continue
            # Told first: who finds the spans gone must find the reason.
            self._store.insert_rows("expired", [{**old, "at_ns": now_ns}])
            for table in STEP_TABLES:
                if num_rows[table]:
                    self._store.command(HIDE_OLD, {**old, "table": table})
            self._store.command(HIDE_FINER_PICTURES, old)
            removed[row["run_id"]] = removed.get(row["run_id"], 0) + num_rows["spans"]
        await_removals(self._store, (*STEP_TABLES, PICTURES))
        return removed


def _old_steps(row: Row, findings: Sequence[Row]) -> Row:
    """Return the row of table ``expired`` for one epoch."""
    near = [
        (found["first_step"], found["first_step"] if found["last_step"] is None
         else found["last_step"])
        for found in findings
        if found["run_id"] == row["run_id"] and found["epoch"] in {row["epoch"], -1}
    ]  # fmt: skip
    kept = kept_steps(near, last_step=row["last_step"])
    return {
        "run_id": row["run_id"],
        "epoch": row["epoch"],
        "last_step": row["last_step"],
        "kept_first": [first for first, _ in kept],
        "kept_last": [last for _, last in kept],
    }


def expire_samples(store: Store, *, before_ns: int) -> int:
    """Remove the readings of before a time, but those beside steps whose spans are kept.

    Returns:
        How many went.
    """
    windows = _windows(store)
    old = {
        "before_ns": before_ns,
        "first": [first for first, _ in windows],
        "last": [last for _, last in windows],
    }
    num_old = int(store.rows(COUNT_OLD_SAMPLES, old)[0]["n"])
    if num_old:
        store.command(HIDE_OLD_SAMPLES, old)
        await_removals(store, ["samples"])
    return num_old


def _windows(store: Store) -> list[tuple[int, int]]:
    """Return the times, Unix ns, of all steps whose spans are kept, ascending and apart."""
    found: list[tuple[int, int]] = []
    for row in store.rows(SELECT_EPOCHS, {"end_of_time": END_OF_TIME}):
        found += _kept_bounds(store, row) if row["is_expired"] else [_padded(row)]
    joined: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def _kept_bounds(store: Store, row: Row) -> list[tuple[int, int]]:
    bounds = [
        read_step_bounds(store, row["run_id"], first=first, last=last)
        for first, last in zip(row["kept_first"], row["kept_last"], strict=True)
    ]
    return [(found[0] - MARGIN_NS, found[1] + MARGIN_NS) for found in bounds if found is not None]


def _padded(row: Row) -> tuple[int, int]:
    return (row["first_ns"] - MARGIN_NS, min(row["last_ns"], END_OF_TIME - MARGIN_NS) + MARGIN_NS)
