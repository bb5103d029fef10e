"""Roll up the steps of runs as they close, and again when late rows of them come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from analysis.kind_times import kind_times
from analysis.source import range_of_spans
from analysis.timeline import timeline_of
from collector.columns import coded_strings, numbers, repeated_string
from collector.describe import RUNNING
from collector.pyramid import write_pixels
from collector.read import read_spans_once
from collector.rollups import (
    ClosedStep,
    in_batches,
    note_run_rolled_up,
    open_steps,
    runs_rolled_up,
    write_rollups,
)
from rankscope import terminal
from rankscope.pictures import picture_rows
from rankscope.source import StoreSource
from rankscope.tables import span_table
from tracer.span import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.kind_times import KindTimes
    from analysis.source import RunInfo, RunSummary
    from analysis.timeline import StepTimeline
    from collector.rollups import OpenStep
    from collector.store import Store

BATCH_SPANS = 1_000_000
"""Read at once; a step that has more is read whole."""

MAX_STEP_SPANS = 8_000_000
"""Of a step that is rolled up: it is read whole, at some 200 bytes a span while it is split."""

TURN_NS = 2_000_000_000
"""After which a turn begins no further batch: upkeep shares the engine with whoever looks."""

KIND_NAMES = [kind.value for kind in KINDS]


class Rolling:
    """Keeps the rollups of a store's runs current.

    Args:
        store: The store.
        max_step_spans: Steps with more spans are left out, and that is said once a run.
        say: Tells a line to the person at the terminal.
        unix_ns: Clock for when a step was rolled up.
        monotonic_ns: Clock for how long a turn takes.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_step_spans: int = MAX_STEP_SPANS,
        say: Callable[[str], None] = terminal.say,
        unix_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._max_step_spans = max_step_spans
        self._say = say
        self._told: set[str] = set()
        self._source = StoreSource(store)
        self._unix_ns = unix_ns
        self._monotonic_ns = monotonic_ns
        self._done: dict[str, tuple[int, str]] | None = None

    def turn(self) -> bool:
        """Roll up what is open; return whether all of it is done.

        Raises:
            StoreError: The store failed; what is open stays so.
        """
        if self._done is None:
            rolled = runs_rolled_up(self._store)
            self._done = {run_id: (num_spans, "") for run_id, num_spans in rolled.items()}
        give_up_ns = self._monotonic_ns() + TURN_NS
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
        if run.state != RUNNING:
            note_run_rolled_up(
                self._store, run.run_id, num_spans=run.num_spans, at_ns=self._unix_ns()
            )
        if self._done is not None:
            self._done[run.run_id] = (run.num_spans, run.state)

    def _roll_up(self, run: RunSummary, give_up_ns: int) -> bool:
        """Roll up the open steps of a run; return whether the time sufficed."""
        found = open_steps(self._store, run.run_id, state=run.state)
        steps = [step for step in found if step.num_spans <= self._max_step_spans]
        if len(steps) < len(found) and run.run_id not in self._told:
            self._told.add(run.run_id)
            limit = f"{self._max_step_spans:,}"
            self._say(f"{run.run_id}: steps of more than {limit} spans are not rolled up")
        if not steps:
            return True
        info = self._source.run_info(run.run_id)
        for batch in in_batches(steps, max_spans=BATCH_SPANS):
            if self._monotonic_ns() >= give_up_ns:
                return False
            self._roll_up_batch(info, batch)
        return True

    def _roll_up_batch(self, info: RunInfo, batch: tuple[OpenStep, ...]) -> None:
        first, last = batch[0].step, batch[-1].step
        spans = span_table(read_spans_once(self._store, info.run_id, first=first, last=last))
        tables, pictures, closed = [], [], []
        epoch_begin, epoch_end = np.searchsorted(spans.epoch, (batch[0].epoch, batch[0].epoch + 1))
        spans = range_of_spans(spans, int(epoch_begin), int(epoch_end))
        for step in batch:
            begin, end = np.searchsorted(spans.step, (step.step, step.step + 1))
            own = range_of_spans(spans, int(begin), int(end))
            if not len(own):
                continue  # deleted meanwhile
            timeline = timeline_of(info, own, epoch=step.epoch, step=step.step)
            done = self._closed(timeline, step)
            tables.append(rollup_rows(info.run_id, done, kind_times(timeline)))
            pictures += picture_rows(timeline, done)
            closed.append(done)
        if closed:
            write_pixels(self._store, pictures)
            write_rollups(self._store, pa.concat_tables(tables).unify_dictionaries(), closed)

    def _closed(self, timeline: StepTimeline, step: OpenStep) -> ClosedStep:
        return ClosedStep(
            run_id=timeline.run,
            epoch=step.epoch,
            step=step.step,
            begin_ns=timeline.begin_ns,
            end_ns=timeline.end_ns,
            num_spans=len(timeline.spans),
            num_ranks=len(np.unique(timeline.spans.rank)),
            num_described=step.num_described,
            at_ns=self._unix_ns(),
        )


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
