"""Rollups and pictures of closed steps, computed again when late rows arrive."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rankscope.analysis.breakdown.kind_times import sum_kind_times
from rankscope.analysis.drawing.rows import split_ranks
from rankscope.analysis.drawing.tiles import TilePlan, plan_tiles
from rankscope.analysis.drawing.timeline import make_timeline, records_groups
from rankscope.analysis.trace.rows import select_rows
from rankscope.collector.arrow_columns import coded_strings, numbers, repeated_string
from rankscope.collector.errors import StoreError
from rankscope.collector.read.pictures import StepId, StepRevision, write_pixels
from rankscope.collector.read.rollups import (
    FIRST_STEP,
    ClosedStep,
    batch_steps,
    mark_run_rolled_up,
    read_newest_closed,
    read_open_steps,
    read_rolled_up_runs,
    write_rollups,
)
from rankscope.collector.read.spans import (
    SpanSelection,
    group_blocks,
    read_outline,
    read_spans_final,
)
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.tracer.span import KINDS

from ..sources.arrow_tables import span_table
from ..sources.store_source import StoreSource
from ..terminal import lines as terminal
from .pictures import make_tiles, read_part
from .run_failures import ROLLED_UP, RunFailures, raise_common

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.breakdown.kind_times import KindTimes
    from rankscope.analysis.trace.tables import RunInfo, RunSummary
    from rankscope.collector.read.rollups import EpochStep, OpenStep
    from rankscope.collector.store.store import Store


BATCH_SPANS = 131_072
"""Spans read at once. Larger steps are read in portions of this size. After an outage a million
spans wait, and a turn takes 170 to 220 MB."""

MAX_WHOLE_SPANS = 8_000_000
"""Largest step of a format that does not record groups. Such a step must be read whole, which takes
some 200 bytes per span; steps of other formats are read in portions."""

TURN_NS = 2_000_000_000
"""Time after which a turn starts no further batch: upkeep shares the engine with all clients."""

FULL_SCAN_PAUSE_NS = 60_000_000_000
"""Pause between two scans of all steps of a running job, which find very late rows. A full scan
counts every span of the run, so the scans in between cover recent steps only."""

RECENT_STEP_NS = 15_000_000_000
"""Age up to which a closed step is recent: hosts that are a few seconds behind may reopen it."""

KIND_NAMES = [kind.value for kind in KINDS]


@dataclass(slots=True)
class _Scan:
    """State of the scans of a running job's steps. All times are monotonic."""

    full_ns: int
    """Time of the last scan of all steps."""

    since: EpochStep = FIRST_STEP
    """First step of a scan: all steps before it were closed more than `RECENT_STEP_NS` ago."""

    next_since: EpochStep = FIRST_STEP
    next_ns: int = 0
    """Time since which ``next_since`` waits to replace ``since``."""

    is_full: bool = True
    """Whether the last scan covered all steps."""

    def closed_before(self, place: EpochStep, now_ns: int) -> None:
        """Record that a scan found all steps before a place closed."""
        if now_ns - self.next_ns >= RECENT_STEP_NS:
            self.since, self.next_since = min(self.next_since, place), place
            self.next_ns = now_ns


class Rollups:
    """The rollups of the runs of a store, kept up to date.

    Args:
        max_whole_spans: Steps with more spans that cannot be read in portions are skipped, which
            is logged once for each run.
        failures: Failures of single runs. None: they are kept here alone.
        batch_spans: Spans held in memory at once. A single rank may have more.
        unix_ns: Clock for the time of a rollup.
        monotonic_ns: Clock for the duration of a turn.
    """

    def __init__(  # noqa: PLR0913  # effects come in here
        self,
        store: Store,
        *,
        max_whole_spans: int = MAX_WHOLE_SPANS,
        failures: RunFailures | None = None,
        batch_spans: int = BATCH_SPANS,
        say: Callable[[str], None] = terminal.say,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._max_whole_spans = max_whole_spans
        self._batch_spans = batch_spans
        self._say = say
        self._failures = failures or RunFailures(store, say=say)
        self._served_ns: dict[str, int] = {}
        self._skipped_runs: set[str] = set()
        self._source = StoreSource(store)
        self._unix_ns = unix_ns
        self._monotonic_ns = monotonic_ns
        self._done: dict[str, tuple[int, str]] | None = None
        self._scans: dict[str, _Scan] = {}
        self._infos: dict[str, tuple[object, RunInfo]] = {}
        self._has_started = False

    def turn(self) -> bool:
        """Roll up the open steps; return whether all are done.

        Runs take turns: the one that has waited longest is first.

        Raises:
            StoreError: The store does not answer. The remaining steps stay open.
        """
        if self._done is None:
            rolled = read_rolled_up_runs(self._store)
            self._done = {run_id: (num_spans, "") for run_id, num_spans in rolled.items()}
        deadline_ns = self._monotonic_ns() + TURN_NS
        self._has_started = False
        runs = self._source.runs()
        attempts = []
        stored = {run.run_id for run in runs}
        for by_run in (self._served_ns, self._done, self._scans, self._infos):
            for run_id in by_run.keys() - stored:
                del by_run[run_id]
        for run in sorted(runs, key=lambda run: self._served_ns.get(run.run_id, 0)):
            if self._is_done(run):
                continue
            with self._failures.catch(run.run_id, ROLLED_UP) as caught:
                attempts.append(caught)
                if not self._roll_up(run, deadline_ns):
                    return False
                self._set_done(run)
            if caught.error is not None and not isinstance(caught.error, StoreError):
                self._done[run.run_id] = (run.num_spans, run.state)  # until it grows
        raise_common(attempts)
        return True

    def _is_done(self, run: RunSummary) -> bool:
        num_spans, state = (self._done or {}).get(run.run_id, (None, ""))
        if num_spans != run.num_spans:
            return False
        return state == run.state or (not state and run.state != RUNNING)

    def _set_done(self, run: RunSummary) -> None:
        scan = self._scans.get(run.run_id)
        if scan is not None and not scan.is_full:
            return  # older steps may have late rows
        if run.state != RUNNING:
            mark_run_rolled_up(
                self._store, run.run_id, num_spans=run.num_spans, at_ns=self._unix_ns()
            )
        if self._done is not None:
            self._done[run.run_id] = (run.num_spans, run.state)

    def _roll_up(self, run: RunSummary, deadline_ns: int) -> bool:
        """Roll up the open steps of a run; return whether all were done before the deadline."""
        steps = self._open_steps(run)
        if not steps:
            return True
        info = self._run_info(run.run_id)
        if not records_groups(info):
            steps = self._readable_whole(run.run_id, steps)
        for batch in batch_steps(steps, max_spans=self._batch_spans):
            # At least one batch per turn: on a busy machine the scan alone may take all the time.
            if self._has_started and self._monotonic_ns() >= deadline_ns:
                return False
            self._has_started = True
            self._served_ns[run.run_id] = self._monotonic_ns()
            if records_groups(info) and batch[0].num_spans > self._batch_spans:
                self._roll_up_portions(info, batch[0])
            else:
                self._roll_up_batch(info, batch)
        return True

    def _run_info(self, run_id: str) -> RunInfo:
        """Return the description of a run, read anew if its ranks or groups are others."""
        version = self._source.version(run_id)
        before, info = self._infos.get(run_id, (None, None))
        if info is None or version != before:
            info = self._source.run_info(run_id)
            self._infos[run_id] = version, info
        return info

    def _open_steps(self, run: RunSummary) -> tuple[OpenStep, ...]:
        """Return the open steps of a run; of a running job, mostly among its recent steps."""
        if run.state != RUNNING:
            self._scans.pop(run.run_id, None)
            return read_open_steps(self._store, run.run_id, state=run.state)
        now_ns = self._monotonic_ns()
        scan = self._scans.setdefault(run.run_id, _Scan(full_ns=now_ns, next_ns=now_ns))
        scan.is_full = scan.since == FIRST_STEP or now_ns - scan.full_ns >= FULL_SCAN_PAUSE_NS
        if scan.is_full:
            scan.full_ns = now_ns
        since = FIRST_STEP if scan.is_full else scan.since
        found = read_open_steps(self._store, run.run_id, state=run.state, since=since)
        first = (found[0].epoch, found[0].step) if found else None
        scan.closed_before(first or read_newest_closed(self._store, run.run_id), now_ns)
        return found

    def _readable_whole(self, run_id: str, steps: tuple[OpenStep, ...]) -> tuple[OpenStep, ...]:
        kept = tuple(step for step in steps if step.num_spans <= self._max_whole_spans)
        if len(kept) < len(steps) and run_id not in self._skipped_runs:
            self._skipped_runs.add(run_id)
            limit = f"{self._max_whole_spans:,}"
            self._say(
                f"{run_id}: steps of more than {limit} spans are not rolled up, because their"
                " format does not record groups"
            )
        return kept

    def _roll_up_batch(self, info: RunInfo, batch: tuple[OpenStep, ...]) -> None:
        first, last = batch[0].step, batch[-1].step
        spans = span_table(read_spans_final(self._store, info.run_id, first=first, last=last))
        tables, pictures, closed = [], [], []
        epoch_begin, epoch_end = np.searchsorted(spans.epoch, (batch[0].epoch, batch[0].epoch + 1))
        spans = select_rows(spans, slice(int(epoch_begin), int(epoch_end)))
        for step in batch:
            begin, end = np.searchsorted(spans.step, (step.step, step.step + 1))
            own = select_rows(spans, slice(int(begin), int(end)))
            if not len(own):
                continue  # deleted in the meantime
            timeline = make_timeline(info, own, epoch=step.epoch, step=step.step)
            ranks = np.unique(own.rank).tolist()
            plan = plan_tiles(ranks, timeline.coords, num_spans=len(own))
            done = self._closed(
                info,
                step,
                (timeline.begin_ns, timeline.end_ns),
                plan,
                counts=(len(own), len(ranks)),
            )
            tables.append(rollup_rows(info.run_id, done, sum_kind_times(timeline)))
            for ordering in plan.orders:
                lines = (0, len(plan.blocks(ordering)))
                pictures += make_tiles(timeline, plan, _key(done), ordering=ordering, lines=lines)
            closed.append(done)
        if closed:
            write_pixels(self._store, pictures)
            write_rollups(self._store, pa.concat_tables(tables).unify_dictionaries(), closed)

    def _roll_up_portions(self, info: RunInfo, step: OpenStep) -> None:
        """Roll up one step, one portion of its ranks after the other."""
        outline = read_outline(self._store, info.run_id, epoch=step.epoch, step=step.step)
        if not outline.num_all:
            return  # deleted in the meantime
        ranks = outline.ranks.tolist()
        num_spans = dict(zip(ranks, outline.num_spans.tolist(), strict=True))
        coords = {
            rank.rank: rank.coords
            for epoch in info.epochs if epoch.epoch == step.epoch for rank in epoch.ranks
        }  # fmt: skip
        plan = plan_tiles(ranks, coords, num_spans=outline.num_all)
        counts = (outline.num_all, len(ranks))
        done = self._closed(info, step, (outline.begin_ns, outline.end_ns), plan, counts=counts)
        tables: list[pa.Table] = []
        num_seen = 0
        blocks_by_ordering = {ordering: plan.blocks(ordering) for ordering in plan.orders}
        for ordering, blocks in (blocks_by_ordering or {"": split_ranks(ranks, 1)}).items():
            is_first = not tables
            for lines in group_blocks(blocks, num_spans, max_spans=self._batch_spans):
                own = [rank for block in blocks[lines[0] : lines[1]] for rank in block]
                portion = SpanSelection(
                    run_id=info.run_id, epoch=step.epoch, step=step.step, ranks=own
                )
                bounds = (outline.begin_ns, outline.end_ns)
                part = read_part(self._store, info, portion, bounds_ns=bounds)
                if blocks_by_ordering:
                    tiles = make_tiles(part, plan, _key(done), ordering=ordering, lines=lines)
                    write_pixels(self._store, tiles)
                if is_first:
                    tables.append(rollup_rows(info.run_id, done, sum_kind_times(part)))
                    num_seen += len(part.spans)
        # If rows arrived in the meantime, some portions lack them: the step stays open.
        if num_seen == outline.num_all:
            rows = pa.concat_tables(tables).unify_dictionaries()
            write_rollups(self._store, rows, [done])

    def _closed(
        self,
        info: RunInfo,
        step: OpenStep,
        bounds_ns: tuple[int, int],
        plan: TilePlan,
        *,
        counts: tuple[int, int],
    ) -> ClosedStep:
        """Return the row of a closed step. ``counts`` are its numbers of spans and ranks."""
        return ClosedStep(
            run_id=info.run_id,
            epoch=step.epoch,
            step=step.step,
            begin_ns=bounds_ns[0],
            end_ns=bounds_ns[1],
            num_spans=counts[0],
            num_ranks=counts[1],
            num_described=step.num_described,
            at_ns=self._unix_ns(),
            orderings=plan.orderings,
            line_ranks=plan.line_ranks,
        )


def _key(closed: ClosedStep) -> StepRevision:
    place = StepId(run_id=closed.run_id, epoch=closed.epoch, step=closed.step)
    return StepRevision(step_id=place, revision=closed.revision)


def rollup_rows(run_id: str, closed: ClosedStep, times: KindTimes) -> pa.Table:
    """Return the rows of table ``rollups`` for a step."""
    size = len(times)
    columns = {
        "run_id": repeated_string(run_id, size),
        "epoch": numbers(np.full(size, closed.epoch), np.int32),
        "step": numbers(np.full(size, closed.step), np.int32),
        "rank": numbers(times.rank, np.int32),
        "kind": coded_strings(times.kind.astype(np.int32), KIND_NAMES),
        "num_spans": numbers(times.num_spans, np.uint32),
        "num_unsplit": numbers(times.num_unsplit, np.uint32),
        "busy_ns": numbers(times.busy_ns, np.int64),
        "wait_ns": numbers(times.wait_ns, np.int64),
        "transfer_ns": numbers(times.transfer_ns, np.int64),
        "exposed_ns": numbers(times.exposed_ns, np.int64),
        "revision": numbers(np.full(size, closed.revision), np.uint64),
    }
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))
