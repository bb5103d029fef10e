"""The last steps of a run that trains, read once each as they come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .arrays.sorting import argsort_rows
from .breakdown.mfu import compute_mfu
from .report.report import Mfu
from .trace.errors import EmptyRunError, UnknownRunError
from .trace.rows import concatenate, select_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .trace.context import RunContext, SampleTable
    from .trace.tables import RunInfo, RunSummary, SpanSource, SpanTable, StepTable

MAX_STEPS = 256
"""Steps of a window: enough for what comes every hundred steps, and a replay of a second or so
for a small job."""

MIN_STEPS = 8
"""Steps that a window keeps however long its analysis takes: three that are slow, and as many
before them to stand out from."""

MAX_STEP = (1 << 31) - 1

SETTLING_STEPS = 2
"""Newest steps that are read again: a span that another thread of a rank recorded may reach the
store after the row that ends its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What the window holds of its steps."""

    run: RunInfo
    steps: StepTable
    spans: SpanTable
    context: RunContext


class RunWindow:
    """The newest whole steps of one run; itself a `SpanSource` of that run alone.

    Of a repeated step (a restart is a new epoch) the newest epoch's rows count;
    what older epochs did before it stays.

    Args:
        source: Where the run is read from.
        run_id: The run.
        max_spans: Bounds time and memory of one analysis; at least one step stays.
        max_steps: The same for jobs of few spans.
    """

    def __init__(
        self, source: SpanSource, run_id: str, *, max_spans: int, max_steps: int = MAX_STEPS
    ) -> None:
        self._source = source
        self._run_id = run_id
        self._max_spans = max_spans
        self._max_steps = max_steps
        self._held: _Held | None = None
        self._epoch = -1
        self.last: int | None = None
        """Last step of the window; None before the first whole one."""

        self.mfu: Mfu | None = None
        """Of all steps read so far, also of those that have left the window."""

        self._numbers: set[int] = set()

    @property
    def num_earlier_steps(self) -> int:
        """How many steps that were read lie before the window."""
        if self._held is None:
            return 0
        first = int(self._held.steps.step.min())
        return sum(step < first for step in self._numbers)

    def fit(self, seconds: float, budget_s: float) -> None:
        """Set how many steps to keep so that an analysis takes about what it may.

        Args:
            seconds: What the analysis of the window, as it is, took.
            budget_s: What it may take.
        """
        if self._held is None:
            return
        num_steps = len(np.unique(self._held.steps.step))
        affordable = int(num_steps * budget_s / max(seconds, 1e-9))
        if num_steps < self._max_steps and affordable >= self._max_steps:
            return  # never filled yet: nothing is known of a larger one
        self._max_steps = min(max(affordable, MIN_STEPS), MAX_STEPS)

    def advance(self) -> int:
        """Read what came since the last call; return how many steps of it are new.

        A rank that ended, or an event, since the last call counts as news too: then
        the answer is at least 1, although the newest step may be an old one.
        """
        run = self._source.run_info(self._run_id)
        steps, first = self._fresh_steps(run)
        last = last_whole_step(run, steps)
        if last is None or (self.last is not None and last <= self.last):
            return int(self._hear(run))
        steps = select_rows(steps, steps.step <= last)
        before = -1 if self.last is None else self.last
        self._take(run, steps, first=first, last=last)
        return int((np.unique(steps.step) > before).sum())

    def _fresh_steps(self, run: RunInfo) -> tuple[StepTable, int | None]:
        """Return the step rows that may be new, and from which step on they are."""
        newest = max((epoch.epoch for epoch in run.epochs), default=-1)
        if newest == self._epoch and self.last is not None:
            first = self.last + 1 - SETTLING_STEPS
            steps = self._source.steps(self._run_id, first=first)
            return select_rows(steps, steps.epoch == self._epoch), first
        steps = self._source.steps(self._run_id)
        reached = int(steps.epoch.max(initial=-1))
        if reached == self._epoch and self.last is not None:  # the new epoch has no step yet
            return select_rows(steps, steps.step > self.last), self.last + 1
        self._epoch, self._held, self.last = reached, None, None
        is_newest = steps.epoch == reached
        began = steps.step.min(where=is_newest, initial=MAX_STEP)
        return select_rows(steps, is_newest | (steps.step < began)), None

    def _take(self, run: RunInfo, steps: StepTable, *, first: int | None, last: int) -> None:
        """Read the spans of these steps, and let go of the oldest ones."""
        self._note_mfu(run, steps)
        self._numbers.update(np.unique(steps.step).tolist())
        if first is None:
            first = self._first_affordable(steps, last)
            steps = select_rows(steps, steps.step >= first)
        spans = self._spans(first, last, steps)
        context = self._source.context(self._run_id, first=first, last=last)
        if self._held is not None:
            held, fresh = self._held, steps
            steps = concatenate(select_rows(held.steps, held.steps.step < first), steps)
            spans = concatenate(select_rows(held.spans, held.spans.step < first), spans)
            began_ns = int(fresh.start_ns.min())
            context = _joined(held.context, context, first=first, began_ns=began_ns)
        self.last = last
        self._held = self._trimmed(_Held(run=run, steps=steps, spans=spans, context=context))

    def _first_affordable(self, steps: StepTable, last: int) -> int:
        """Return the first step of the first window, judged by the spans of its last one."""
        numbers = np.unique(steps.step)
        num_spans = len(self._source.spans(self._run_id, first=last, last=last))
        num = min(self._max_steps, self._max_spans // max(num_spans, 1))
        return int(numbers[-max(num, 1) :][0])

    def _spans(self, first: int, last: int, steps: StepTable) -> SpanTable:
        """Return the spans of these steps, without those of steps that ran again."""
        spans = self._source.spans(self._run_id, first=first, last=last)
        pairs = _pairs(steps.epoch, steps.step)
        keep = np.isin(_pairs(spans.epoch, spans.step), np.unique(pairs))
        return spans if keep.all() else select_rows(spans, keep)

    def _trimmed(self, held: _Held) -> _Held:
        """Drop the oldest steps until the window keeps its limits; the newest always stays."""
        counts = np.bincount(held.spans.step - held.steps.step.min())
        numbers = np.flatnonzero(counts)
        fits = np.cumsum(counts[numbers][::-1]) <= self._max_spans
        num = max(1, min(int(fits.sum()), self._max_steps))
        if num >= len(numbers):
            return held
        first = int(numbers[-num] + held.steps.step.min())
        kept = select_rows(held.steps, held.steps.step >= first)
        microbatches, samples = held.context.microbatches, held.context.samples
        return _Held(
            run=held.run,
            steps=kept,
            spans=select_rows(held.spans, held.spans.step >= first),
            context=replace(
                held.context,
                microbatches=select_rows(microbatches, microbatches.step >= first),
                samples=select_rows(samples, samples.at_ns >= kept.start_ns.min()),
            ),
        )

    def _note_mfu(self, run: RunInfo, steps: StepTable) -> None:
        found = compute_mfu(run, steps)
        if found is not None:
            by_step = {**(self.mfu.by_step if self.mfu is not None else {}), **found.by_step}
            mean = float(np.mean(list(by_step.values())))
            self.mfu = Mfu(convention=found.convention, mean=mean, by_step=by_step)

    def _hear(self, run: RunInfo) -> bool:
        """Return whether a rank ended or an event came since the last call, and take it in."""
        if self._held is None:
            return False
        known = self._held.context
        heard = self._source.context(self._run_id, first=self.last, last=self.last)
        if (heard.exits, heard.events) == (known.exits, known.events):
            return False
        context = replace(known, exits=heard.exits, events=heard.events)
        self._held = replace(self._held, run=run, context=context)
        return True

    def runs(self) -> tuple[RunSummary, ...]:
        """Return nothing: a window lists no runs."""
        return ()

    def run_info(self, run_id: str) -> RunInfo:
        """Return what is known of the run besides its spans."""
        return self._window(run_id).run

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows of the window."""
        steps = self._window(run_id).steps
        return select_rows(steps, _between(steps.step, first, last))

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of the window."""
        spans = self._window(run_id).spans
        return select_rows(spans, _between(spans.step, first, last))

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return what is known around the window's spans, whatever steps are asked for."""
        return self._window(run_id).context

    def _window(self, run_id: str) -> _Held:
        if run_id != self._run_id:
            raise UnknownRunError(run_id, (self._run_id,))
        if self._held is None:
            raise EmptyRunError(f"run {run_id!r} has no whole step yet")
        return self._held


def last_whole_step(info: RunInfo, steps: StepTable) -> int | None:
    """Return the last step that every traced rank of its epoch has ended; None before the first."""
    num_ranks = {epoch.epoch: len(epoch.ranks) for epoch in info.epochs}
    pairs = np.stack([steps.epoch, steps.step], axis=1)[steps.end_ns > 0]
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    whole = [
        step
        for (epoch, step), count in zip(found.tolist(), counts.tolist(), strict=True)
        if count >= num_ranks.get(epoch, 1)
    ]
    return max(whole, default=None)


def _joined(held: RunContext, fresh: RunContext, *, first: int, began_ns: int) -> RunContext:
    """Return the fresh context with what the held one knows of the steps before ``first``."""
    before = select_rows(held.microbatches, held.microbatches.step < first)
    earlier = select_rows(held.samples, held.samples.at_ns < began_ns)
    return replace(
        fresh,
        microbatches=concatenate(before, fresh.microbatches),
        samples=sort_samples(concatenate(earlier, fresh.samples)),
    )


def _pairs(epoch: NDArray[np.int32], step: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return one number for each (epoch, step)."""
    return (epoch.astype(np.int64) << 32) | step


def _between(step: NDArray[np.int32], first: int | None, last: int | None) -> NDArray[np.bool_]:
    least, most = 0 if first is None else first, MAX_STEP if last is None else last
    chosen: NDArray[np.bool_] = (step >= least) & (step <= most)
    return chosen


def sort_samples(samples: SampleTable) -> SampleTable:
    """Return samples ordered by (name, host, device, at_ns), as a `SampleTable` has to be."""
    order = argsort_rows(samples.name, samples.host, samples.device, samples.at_ns)
    return select_rows(samples, order)
