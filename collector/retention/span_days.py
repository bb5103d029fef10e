"""Expiry of spans: by days, each dropped as a whole, of live runs as of ended ones.

The spans of a day are one partition of the table ``spans``. Before it is dropped, the spans of
steps around findings are copied into ``kept_spans``, and so are all spans of imported traces, which
stay until they are deleted. Then a row of ``expired`` says up to which step of each epoch the
spans are gone: from then on, readers take these steps from ``kept_spans``. Each statement may run
again, so an expiry that was interrupted goes on at the next.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

from ..identity import MAX_INT32
from ..read.heartbeats import OWN_FORMAT
from ..store.deduplicated_reads import OUTSIDE_STEPS
from .removal import wait_for_removals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..identity import Row
    from ..store.store import Store

DAY_NS = 24 * 3_600 * NS_PER_S

STEPS_BEFORE, STEPS_AFTER = 8, 32
"""Steps kept around a finding's onset and its end; those between are kept if they are few."""

EPOCHS_AT_ONCE = 200
"""Epochs of one statement, whose bounds are among its parameters."""

SPANS, KEPT_SPANS, MICROBATCHES, PICTURES = "spans", "kept_spans", "microbatches", "pictures"

SELECT_DAYS = """
SELECT day FROM {table:Identifier} WHERE day >= 0 AND day < {first_day:Int32}
GROUP BY day ORDER BY day
"""

SELECT_EPOCHS = """
SELECT run_id, epoch, max(step) AS last_step, count() AS num_spans FROM {table:Identifier}
WHERE day = {day:Int32} GROUP BY run_id, epoch ORDER BY run_id, epoch
"""

SELECT_IMPORTED = "SELECT DISTINCT run_id FROM runs WHERE source_format != {own:String}"

SELECT_EXPIRED = "SELECT run_id, epoch, last_step, kept_first, kept_last FROM expired FINAL"

SELECT_FINDINGS = """
SELECT run_id, epoch, first_step, ifNull(last_step, first_step) AS last_step FROM findings FINAL
WHERE run_id IN {run_ids:Array(String)} AND first_step IS NOT NULL AND cause NOT IN
    ('healthy', 'insufficient-evidence')
"""

SELECT_OLD_PICTURES = """
SELECT run_id, epoch, max(step) AS last_step FROM closed_steps FINAL
WHERE step >= 0 AND at_ns < {before_ns:Int64}
    AND (run_id, epoch) IN (SELECT run_id, epoch FROM pictures)
    AND run_id NOT IN (SELECT run_id FROM runs WHERE source_format != {own:String})
GROUP BY run_id, epoch ORDER BY run_id, epoch
"""
"""By the time at which they were drawn: of an old spool that is read today, they are new."""

COUNT_KEPT = """
SELECT run_id, count() AS num_kept FROM kept_spans WHERE day = {day:Int32} GROUP BY run_id
"""

KEEP_STEPS = """
INSERT INTO kept_spans SELECT * FROM spans
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32}
    AND step >= {first:Int32} AND step <= {last:Int32}
"""

KEEP_RUN = """
INSERT INTO kept_spans SELECT * REPLACE(toInt32(-1) AS day) FROM spans
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32}
"""

IS_SAVE = "kind = 'checkpoint' AND track = 'main'"

NOTE_STEPS = f"""
INSERT INTO step_spans
SELECT spans.run_id, spans.epoch, step, count(), min(start_ns), max(start_ns),
    maxIf(start_ns + duration_ns, kind != 'gc'),
    toInt64(intervalLengthSumIf(start_ns, start_ns + duration_ns, {IS_SAVE})),
    minIf(start_ns, {IS_SAVE}), 0
FROM spans AS spans INNER JOIN (
    SELECT arrayJoin({{due:Array(Tuple(String, Int32, Int32, Int32))}}) AS steps,
        steps.1 AS run_id, steps.2 AS epoch, steps.3 AS after, steps.4 AS last
) AS due ON spans.run_id = due.run_id AND spans.epoch = due.epoch
WHERE (spans.run_id, spans.epoch) IN {{epochs:Array(Tuple(String, Int32))}}
    AND step >= 0 AND step > after AND step <= last
GROUP BY spans.run_id, spans.epoch, step
"""  # noqa: S608  # constants

NOTE_OUTSIDE = f"""
INSERT INTO step_spans
SELECT run_id, epoch, -1, count(), min(start_ns), max(start_ns), max(start_ns + duration_ns),
    toInt64(intervalLengthSum(start_ns, start_ns + duration_ns)), min(start_ns), {{day:Int32}}
FROM spans
WHERE day = {{day:Int32}} AND (run_id, epoch) IN {{epochs:Array(Tuple(String, Int32))}}
    AND step < 0 AND {IS_SAVE}
GROUP BY run_id, epoch
"""  # noqa: S608  # constants

OLD_STEPS = """
WHERE (run_id, epoch) IN {epochs:Array(Tuple(String, Int32))}
    AND step <= arrayElement({lasts:Array(Int32)},
        indexOf({epochs:Array(Tuple(String, Int32))}, (toString(run_id), epoch)))
    AND NOT arrayExists(kept -> kept.1 = run_id AND kept.2 = epoch
        AND step >= kept.3 AND step <= kept.4,
        {kept:Array(Tuple(String, Int32, Int32, Int32))})
"""

DROP_DAY = "ALTER TABLE {table:Identifier} DROP PARTITION {day:Int32}"

COUNT_OLD = "SELECT count() AS n FROM {table:Identifier}" + OLD_STEPS  # noqa: S608  # constants
COUNT_FINER = COUNT_OLD + " AND depth > 0"
"""Pictures of a part of a step, which expire with its spans."""

NO_WAITING = " SETTINGS lightweight_deletes_sync = 0"
HIDE_OLD = "DELETE FROM {table:Identifier}" + OLD_STEPS + NO_WAITING  # noqa: S608  # constants
HIDE_FINER = (
    "DELETE FROM {table:Identifier}" + OLD_STEPS + " AND depth > 0" + NO_WAITING  # noqa: S608
)

Epoch = tuple[str, int]
"""Run and epoch."""


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
    return merge_ranges((max(a, 0), min(b, last_step)) for a, b in wanted)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of whole numbers, both ends included, as ascending and disjoint ones."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if last < first:
            continue
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


class SpanDays:
    """Drops the days of spans that are no longer kept."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def expire(self, *, first_day: int, now_ns: int) -> Counter[str]:
        """Drop the spans of all days before ``first_day``; return their numbers by run."""
        store = self._store
        removed: Counter[str] = Counter()
        for day in self._days(SPANS, first_day):
            epochs = store.rows(SELECT_EPOCHS, {"table": SPANS, "day": day})
            imported = {row["run_id"] for row in store.rows(SELECT_IMPORTED, {"own": OWN_FORMAT})}
            for some in _portions(epochs):
                self._keep(some, day, imported, now_ns)
            removed.update({row["run_id"]: row["num_spans"] for row in epochs})
            for row in store.rows(COUNT_KEPT, {"day": day}):
                removed[row["run_id"]] -= row["num_kept"]
            for run_id in imported:
                del removed[run_id]
            self._drop(SPANS, day)
        return +removed

    def expire_kept(self, *, first_day: int, now_ns: int) -> Counter[str]:
        """Drop the kept spans of all days before ``first_day``; return their numbers by run."""
        removed: Counter[str] = Counter()
        for day in self._days(KEPT_SPANS, first_day):
            epochs = self._store.rows(SELECT_EPOCHS, {"table": KEPT_SPANS, "day": day})
            before = self._expired()
            rows = []
            for row in epochs:
                last, kept = before.get(_key(row), (row["last_step"], ()))
                still = [(max(a, row["last_step"] + 1), b) for a, b in kept]
                rows.append(_expired_row(_key(row), last, merge_ranges(still), now_ns))
            for some in _portions(rows):
                self._store.insert_rows("expired", some)
                self._hide(MICROBATCHES, some)
            removed.update({row["run_id"]: row["num_spans"] for row in epochs})
            self._drop(KEPT_SPANS, day)
        return removed

    def expire_pictures(self, *, first_day: int) -> None:
        """Remove the pictures that were drawn before ``first_day``, with or without findings."""
        bound = {"before_ns": first_day * DAY_NS, "own": OWN_FORMAT}
        rows = self._store.rows(SELECT_OLD_PICTURES, bound)
        for some in _portions([{**row, "kept_first": [], "kept_last": []} for row in rows]):
            self._hide(PICTURES, some)
        wait_for_removals(self._store, (PICTURES,))

    def _days(self, table: str, first_day: int) -> list[int]:
        rows = self._store.rows(SELECT_DAYS, {"table": table, "first_day": first_day})
        return [row["day"] for row in rows]

    def _drop(self, table: str, day: int) -> None:
        wait_for_removals(self._store, (MICROBATCHES, PICTURES))
        self._store.command(DROP_DAY, {"table": table, "day": day})

    def _expired(self) -> dict[Epoch, tuple[int, tuple[tuple[int, int], ...]]]:
        return {
            _key(row): (
                row["last_step"], tuple(zip(row["kept_first"], row["kept_last"], strict=True))
            )
            for row in self._store.rows(SELECT_EXPIRED)
        }  # fmt: skip

    def _keep(self, epochs: Sequence[Row], day: int, imported: set[str], now_ns: int) -> None:
        """Copy what outlives a day, and note that the rest of it has expired."""
        before = self._expired()
        findings = self._findings(sorted({row["run_id"] for row in epochs}))
        rows, due = [], []
        for row in epochs:
            key = _key(row)
            bound = {"run_id": row["run_id"], "epoch": row["epoch"]}
            after, kept = before.get(key, (OUTSIDE_STEPS, ()))
            if row["run_id"] in imported:
                if after != MAX_INT32:
                    self._store.command(KEEP_RUN, bound)
                    rows.append(_expired_row(key, MAX_INT32, [(OUTSIDE_STEPS, MAX_INT32)], now_ns))
                continue
            if row["last_step"] <= after:
                continue
            near = [*findings.get(key, ()), *findings.get((row["run_id"], -1), ())]
            new = merge_ranges(
                (max(first, after + 1), last)
                for first, last in kept_steps(near, last_step=row["last_step"])
            )
            for first, last in new:
                self._store.command(KEEP_STEPS, {**bound, "first": first, "last": last})
            due.append((*key, after, row["last_step"]))
            rows.append(_expired_row(key, row["last_step"], merge_ranges([*kept, *new]), now_ns))
        own = [_key(row) for row in epochs if row["run_id"] not in imported]
        if own:
            self._store.command(NOTE_OUTSIDE, {"day": day, "epochs": own})
        if due:
            self._store.command(NOTE_STEPS, {"due": due, "epochs": [each[:2] for each in due]})
        # Stored last: from then on readers take these steps from the kept spans.
        if rows:
            self._store.insert_rows("expired", rows)
            self._hide(MICROBATCHES, rows)
            self._hide(PICTURES, rows, finer=True)

    def _findings(self, run_ids: list[str]) -> dict[Epoch, list[tuple[int, int]]]:
        """Return first and last step of the findings by run and epoch; epoch -1: any."""
        near: dict[Epoch, list[tuple[int, int]]] = {}
        for row in self._store.rows(SELECT_FINDINGS, {"run_ids": run_ids}):
            near.setdefault(_key(row), []).append((row["first_step"], row["last_step"]))
        return near

    def _hide(self, table: str, expired: Sequence[Row], *, finer: bool = False) -> None:
        """Remove the rows of expired steps, except kept ones; of pictures, the finer ones."""
        bound = {
            "table": table,
            "epochs": [_key(row) for row in expired],
            "lasts": [row["last_step"] for row in expired],
            "kept": [
                (*_key(row), first, last)
                for row in expired
                for first, last in zip(row["kept_first"], row["kept_last"], strict=True)
            ],
        }
        count, hide = (COUNT_FINER, HIDE_FINER) if finer else (COUNT_OLD, HIDE_OLD)
        if self._store.rows(count, bound)[0]["n"]:
            self._store.command(hide, bound)


def _key(row: Mapping[str, object]) -> Epoch:
    return str(row["run_id"]), int(str(row["epoch"]))


def _expired_row(key: Epoch, last_step: int, kept: Sequence[tuple[int, int]], now_ns: int) -> Row:
    return {
        "run_id": key[0],
        "epoch": key[1],
        "last_step": last_step,
        "kept_first": [first for first, _ in kept],
        "kept_last": [last for _, last in kept],
        "at_ns": now_ns,
    }


def _portions(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for first in range(0, len(rows), EPOCHS_AT_ONCE):
        yield rows[first : first + EPOCHS_AT_ONCE]
