"""Roll up the steps of runs as they close, and again when late rows of them come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rankscope.analysis.breakdown.kind_times import sum_kind_times
from rankscope.analysis.drawing.raster import split_ranks
from rankscope.analysis.drawing.tiles import TilePlan, plan_tiles
from rankscope.analysis.drawing.timeline import make_timeline, records_groups
from rankscope.analysis.trace.rows import select_rows
from rankscope.collector.arrow_columns import coded_strings, numbers, repeated_string
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.breakdown.kind_times import KindTimes
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.trace.tables import RunInfo, RunSummary
    from rankscope.collector.read.rollups import EpochStep, OpenStep
    from rankscope.collector.store.store import Store


BATCH_SPANS = 131_072
"""Read at once; a step that has more is read in portions of so many. After
an outage a million of them wait, and a turn of many takes 170 to 220 MB."""

MAX_WHOLE_SPANS = 8_000_000
"""Of a step that must be read whole, at some 200 bytes a span while it is split: one of a format
that does not tell who communicates with whom. Others are read in portions."""

TURN_NS = 2_000_000_000
"""After which a turn begins no second batch: upkeep shares the engine with whoever looks."""

WHOLE_LOOK_NS = 60_000_000_000
"""How often all steps of a run that goes on are looked at, for rows that come very late: it counts
every span of the run. In between the steps are looked at that were open or new lately."""

LATELY_NS = 15_000_000_000
"""Rows of hosts that are a few seconds behind reopen steps of so long ago at the next look."""

KIND_NAMES = [kind.value for kind in KINDS]


@dataclass(slots=True)
class _Looked:
    """How far a run that goes on was looked at. All times are monotonic."""

    whole_ns: int
    """When all of its steps were."""

    since: EpochStep = FIRST_STEP
    """Where looks begin: all before was closed `LATELY_NS` ago and more."""

    next_since: EpochStep = FIRST_STEP
    next_ns: int = 0
    """Since when ``next_since`` waits to take the place of ``since``."""

    is_whole: bool = True
    """Whether the last look was at all steps."""

    def closed_before(self, place: EpochStep, now_ns: int) -> None:
        """Note that a look found all closed before a place."""
        if now_ns - self.next_ns >= LATELY_NS:
            self.since, self.next_since = min(self.next_since, place), place
            self.next_ns = now_ns


class Rolling:
    """Keeps the rollups of a store's runs current.

    Args:
        store: The store.
        max_whole_spans: Steps with more spans that can't be read in portions are left out, and
            that is said once a run.
        batch_spans: Spans that are held at once; those of one rank may be more.
        say: Tells a line to the person at the terminal.
        unix_ns: Clock for when a step was rolled up.
        monotonic_ns: Clock for how long a turn takes.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_whole_spans: int = MAX_WHOLE_SPANS,
        batch_spans: int = BATCH_SPANS,
        say: Callable[[str], None] = terminal.say,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._max_whole_spans = max_whole_spans
        self._batch_spans = batch_spans
        self._say = say
        self._told: set[str] = set()
        self._source = StoreSource(store)
        self._unix_ns = unix_ns
        self._monotonic_ns = monotonic_ns
        self._done: dict[str, tuple[int, str]] | None = None
        self._looked: dict[str, _Looked] = {}
        self._has_begun = False

    def turn(self) -> bool:
        """Roll up what is open; return whether all of it is done.

        Raises:
            StoreError: The store failed; what is open stays so.
        """
        if self._done is None:
            rolled = read_rolled_up_runs(self._store)
            self._done = {run_id: (num_spans, "") for run_id, num_spans in rolled.items()}
        give_up_ns = self._monotonic_ns() + TURN_NS
        self._has_begun = False
        for run in self._source.runs():
            if self._is_done(run):
                continue
            if not self._roll_up(run, give_up_ns):
                return False
            self._note(run)
        return True

    def _is_done(self, run: RunSummary) -> bool:
        num_spans, state = (self._done or {}).get(run.run_id, (None, ""))
        if num_spans != run.num_spans:
            return False
        return state == run.state or (not state and run.state != RUNNING)

    def _note(self, run: RunSummary) -> None:
        looked = self._looked.get(run.run_id)
        if looked is not None and not looked.is_whole:
            return  # rows of older steps are still to be looked for
        if run.state != RUNNING:
            mark_run_rolled_up(
                self._store, run.run_id, num_spans=run.num_spans, at_ns=self._unix_ns()
            )
        if self._done is not None:
            self._done[run.run_id] = (run.num_spans, run.state)

    def _roll_up(self, run: RunSummary, give_up_ns: int) -> bool:
        """Roll up the open steps of a run; return whether the time sufficed."""
        found = self._open_steps(run)
        if not found:
            return True
        info = self._source.run_info(run.run_id)
        steps = found if records_groups(info) else self._small_enough(run.run_id, found)
        for batch in batch_steps(steps, max_spans=self._batch_spans):
            # One batch a turn at least: on a busy machine the looking alone may take the time.
            if self._has_begun and self._monotonic_ns() >= give_up_ns:
                return False
            self._has_begun = True
            if records_groups(info) and batch[0].num_spans > self._batch_spans:
                self._roll_up_portions(info, batch[0])
            else:
                self._roll_up_batch(info, batch)
        return True

    def _open_steps(self, run: RunSummary) -> tuple[OpenStep, ...]:
        """Return what is open; of a run that goes on, mostly among its newest steps alone."""
        if run.state != RUNNING:
            self._looked.pop(run.run_id, None)
            return read_open_steps(self._store, run.run_id, state=run.state)
        now_ns = self._monotonic_ns()
        looked = self._looked.setdefault(run.run_id, _Looked(whole_ns=now_ns, next_ns=now_ns))
        looked.is_whole = looked.since == FIRST_STEP or now_ns - looked.whole_ns >= WHOLE_LOOK_NS
        if looked.is_whole:
            looked.whole_ns = now_ns
        since = FIRST_STEP if looked.is_whole else looked.since
        found = read_open_steps(self._store, run.run_id, state=run.state, since=since)
        first = (found[0].epoch, found[0].step) if found else None
        looked.closed_before(first or read_newest_closed(self._store, run.run_id), now_ns)
        return found

    def _small_enough(self, run_id: str, steps: tuple[OpenStep, ...]) -> tuple[OpenStep, ...]:
        kept = tuple(step for step in steps if step.num_spans <= self._max_whole_spans)
        if len(kept) < len(steps) and run_id not in self._told:
            self._told.add(run_id)
            limit = f"{self._max_whole_spans:,}"
            self._say(
                f"{run_id}: steps of more than {limit} spans are not rolled up, as their format"
                " tells no groups"
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
                continue  # deleted meanwhile
            timeline = make_timeline(info, own, epoch=step.epoch, step=step.step)
            ranks = np.unique(own.rank).tolist()
            plan = plan_tiles(ranks, timeline.coords, num_spans=len(own))
            done = self._closed(info, step, _bounds(timeline), plan, counts=(len(own), len(ranks)))
            tables.append(rollup_rows(info.run_id, done, sum_kind_times(timeline)))
            for ordering in plan.orders:
                lines = (0, len(plan.blocks(ordering)))
                pictures += make_tiles(timeline, plan, _key(done), ordering=ordering, lines=lines)
            closed.append(done)
        if closed:
            write_pixels(self._store, pictures)
            write_rollups(self._store, pa.concat_tables(tables).unify_dictionaries(), closed)

    def _roll_up_portions(self, info: RunInfo, step: OpenStep) -> None:
        """Do the same for one step, a portion of its ranks after the other."""
        outline = read_outline(self._store, info.run_id, epoch=step.epoch, step=step.step)
        if not outline.num_all:
            return  # deleted meanwhile
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
        walks = {ordering: plan.blocks(ordering) for ordering in plan.orders}
        for ordering, blocks in (walks or {"": split_ranks(ranks, 1)}).items():
            is_first = not tables
            for lines in group_blocks(blocks, num_spans, max_spans=self._batch_spans):
                own = [rank for block in blocks[lines[0] : lines[1]] for rank in block]
                portion = SpanSelection(
                    run_id=info.run_id, epoch=step.epoch, step=step.step, ranks=own
                )
                bounds = (outline.begin_ns, outline.end_ns)
                part = read_part(self._store, info, portion, bounds_ns=bounds)
                if walks:
                    tiles = make_tiles(part, plan, _key(done), ordering=ordering, lines=lines)
                    write_pixels(self._store, tiles)
                if is_first:
                    tables.append(rollup_rows(info.run_id, done, sum_kind_times(part)))
                    num_seen += len(part.spans)
        # A row that came meanwhile was seen by some portions only: the step stays open.
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
        """Return what a step is closed as; ``counts`` are its spans and ranks."""
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


def _bounds(timeline: StepTimeline) -> tuple[int, int]:
    return timeline.begin_ns, timeline.end_ns


def _key(closed: ClosedStep) -> StepRevision:
    place = StepId(run_id=closed.run_id, epoch=closed.epoch, step=closed.step)
    return StepRevision(step_id=place, revision=closed.revision)


def rollup_rows(run_id: str, closed: ClosedStep, times: KindTimes) -> pa.Table:
    """Return rows of table ``rollups``."""
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
