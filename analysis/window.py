"""A sliding window over a live run: its newest complete steps, each read once.

Of a run that has stopped, the unfinished steps are added: they show in what its ranks are blocked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .arrays.sorting import argsort_rows
from .breakdown.mfu import read_mfu
from .report.liveness import find_silence
from .report.report import Mfu
from .trace.errors import EmptyRunError, UnknownRunError
from .trace.rows import concatenate, select_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .trace.context import EventRecord, RunContext, SampleTable
    from .trace.tables import RunInfo, RunSummary, SpanSource, SpanTable, StepTable

MAX_STEPS = 512
"""Steps of a window: enough for what recurs every hundred steps, and replayed in about a second
for a small job."""

FIXED_SPANS = 20_000
"""Spans up to which the time of an analysis is mostly that of its fixed part, or of other work on
the machine: of 4 ranks, 8 steps took 0.3 to 0.5 s and 256 steps 0.7 s at a load of 10. A smaller
window would not be faster, and would forget when a fault began."""

MIN_STEPS = 8
"""Steps that a window keeps however long its analysis takes: three slow ones, and enough before
them as a baseline."""

MAX_STEP = (1 << 31) - 1

SETTLING_STEPS = 2
"""Newest steps that are read again: a span of another thread of a rank may reach the store after
the row that ends its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """Tables of the steps of a window."""

    run: RunInfo
    steps: StepTable
    spans: SpanTable
    context: RunContext


class RunWindow:
    """The newest complete steps of one run, as a `SpanSource` of that run alone.

    If a restart repeats steps in a new epoch, the rows of the newest epoch count. Steps of older
    epochs before the first repeated one are kept.

    Args:
        max_spans: Bound on the time and memory of one analysis; at least one step is kept.
        max_steps: The same for jobs with few spans.
        version: Returns what changes whenever the run has other ranks, groups, exits or events.
            Of thousands of ranks, these take a second to read. None: they are read each time.
    """

    def __init__(
        self,
        source: SpanSource,
        run_id: str,
        *,
        max_spans: int,
        max_steps: int = MAX_STEPS,
        version: Callable[[str], object] | None = None,
    ) -> None:
        self._source = source
        self._version_of = version
        self._known: tuple[object, RunInfo] | None = None
        self._run_id = run_id
        self._max_spans = max_spans
        self._max_steps = max_steps
        self._contents: _Contents | None = None
        self._unfinished: tuple[StepTable, SpanTable] | None = None
        self._stalled: tuple[EventRecord, ...] = ()
        self._epoch = -1
        self.last: int | None = None
        """Last step of the window; None before the first complete step."""

        self.mfu: Mfu | None = None
        """MFU of all steps read so far, including those that have left the window."""

        self._steps_read: set[int] = set()

    @property
    def num_earlier_steps(self) -> int:
        """Number of steps that were read and are now before the window."""
        if self._contents is None or self.last is None:
            return 0
        first = int(self._contents.steps.step.min())
        return sum(step < first for step in self._steps_read)

    def fit(self, seconds: float, budget_s: float) -> None:
        """Set the number of steps to keep from the time that an analysis takes."""
        if self._contents is None or self.last is None:
            return
        num_steps = len(np.unique(self._contents.steps.step))
        affordable = int(num_steps * budget_s / max(seconds, 1e-9))
        if num_steps < self._max_steps and affordable >= self._max_steps:
            return  # It was never full, so the duration of a larger one is unknown.
        self._max_steps = min(max(affordable, MIN_STEPS), MAX_STEPS)

    def advance(self) -> int:
        """Read what was stored since the last call; return how many steps are new.

        Returns:
            At least 1 also if there is no new step, but an exit of a rank or an event.
        """
        version = None if self._version_of is None else self._version_of(self._run_id)
        before, run = self._known or (None, None)
        is_known = run is not None and version is not None and version == before
        if run is None or not is_known:
            run = self._source.run_info(self._run_id)
        steps, first = self._read_new_steps(run)
        last = last_complete_step(run, steps)
        has_new = last is not None and (self.last is None or last > self.last)
        if is_known and has_new:
            run = self._source.run_info(self._run_id)  # how many records are stored
        num_new = 0
        if has_new or not is_known:
            num_new = self._take(run, steps, first=first, last=last)
        self._known = version, run
        return num_new

    def _take(self, run: RunInfo, steps: StepTable, *, first: int | None, last: int | None) -> int:
        """Read what belongs to new steps, or else what stopped them; see `advance`."""
        if last is None and self._contents is None:
            return int(self._read_stalled(run, steps))
        if last is None or (self.last is not None and last <= self.last):
            return int(self._read_exits(run))
        steps = select_rows(steps, steps.step <= last)
        before = -1 if self.last is None else self.last
        self._append(run, steps, first=first, last=last)
        return int((np.unique(steps.step) > before).sum())

    def is_silent(self, now_ns: int) -> bool:
        """Return whether the next step should have ended by now, Unix time."""
        if self._contents is None or self.last is None:
            return False
        steps = self._contents.steps
        ended_ns = int(steps.end_ns.max())
        num_steps = len(np.unique(steps.step))
        step_time_ns = (ended_ns - int(steps.start_ns.min())) // max(num_steps, 1)
        silence = find_silence(
            last_step=self.last, ended_ns=ended_ns, step_time_ns=step_time_ns, now_ns=now_ns
        )
        return silence is not None

    def read_unfinished(self) -> bool:
        """Add the steps after the last complete one until that is read; return if there are any."""
        if self._contents is None or self.last is None:
            return False
        first = self.last + 1
        steps = self._source.steps(self._run_id, first=first)
        spans = self._source.spans(self._run_id, first=first)
        steps = select_rows(steps, steps.epoch == self._epoch)
        spans = select_rows(spans, spans.epoch == self._epoch)
        self._unfinished = (steps, spans) if len(spans) else None
        return self._unfinished is not None

    def _read_new_steps(self, run: RunInfo) -> tuple[StepTable, int | None]:
        """Return the step rows that may be new, and their first step; None: all of the window."""
        newest = max((epoch.epoch for epoch in run.epochs), default=-1)
        if newest == self._epoch and self.last is not None:
            first = self.last + 1 - SETTLING_STEPS
            steps = self._source.steps(self._run_id, first=first)
            return select_rows(steps, steps.epoch == self._epoch), first
        steps = self._source.steps(self._run_id)
        reached = int(steps.epoch.max(initial=-1))
        if reached == self._epoch and self.last is not None:  # The new epoch has no step yet.
            return select_rows(steps, steps.step > self.last), self.last + 1
        self._epoch, self._contents, self._unfinished, self.last = reached, None, None, None
        is_newest = steps.epoch == reached
        began = steps.step.min(where=is_newest, initial=MAX_STEP)
        return select_rows(steps, is_newest | (steps.step < began)), None

    def _append(self, run: RunInfo, steps: StepTable, *, first: int | None, last: int) -> None:
        """Read the spans of these steps, and drop the oldest steps."""
        self._update_mfu(run, steps)
        self._steps_read.update(np.unique(steps.step).tolist())
        if first is None:
            num_spans = len(self._source.spans(self._run_id, first=last, last=last))
            num = min(self._max_steps, self._max_spans // max(num_spans, 1))
            first = int(np.unique(steps.step)[-max(num, 1) :][0])
        elif self._contents is not None:
            num_spans = len(self._contents.spans) // len(np.unique(self._contents.steps.step))
            first = max(first, last + 1 - max(1, self._max_spans // max(num_spans, 1)))
        steps = select_rows(steps, steps.step >= first)
        spans = self._source.spans(self._run_id, first=first, last=last)
        pairs = np.unique(_pairs(steps.epoch, steps.step))
        is_newest = np.isin(_pairs(spans.epoch, spans.step), pairs)
        spans = spans if is_newest.all() else select_rows(spans, is_newest)
        context = self._source.context(self._run_id, first=first, last=last)
        if self._contents is not None:
            old = self._contents
            begin_ns = int(steps.start_ns.min())
            steps = concatenate(select_rows(old.steps, old.steps.step < first), steps)
            spans = concatenate(select_rows(old.spans, old.spans.step < first), spans)
            before = select_rows(old.context.microbatches, old.context.microbatches.step < first)
            earlier = select_rows(old.context.samples, old.context.samples.at_ns < begin_ns)
            context = replace(
                context,
                microbatches=concatenate(before, context.microbatches),
                samples=sort_samples(concatenate(earlier, context.samples)),
            )
        self.last, self._unfinished = last, None
        self._contents = self._trim(_Contents(run=run, steps=steps, spans=spans, context=context))

    def _trim(self, contents: _Contents) -> _Contents:
        """Return the contents within the limits, without the oldest steps."""
        counts = np.bincount(contents.spans.step - contents.steps.step.min())
        numbers = np.flatnonzero(counts)
        fits = np.cumsum(counts[numbers][::-1]) <= self._max_spans
        num = max(1, min(int(fits.sum()), self._max_steps))
        if num >= len(numbers):
            return contents
        first = int(numbers[-num] + contents.steps.step.min())
        kept = select_rows(contents.steps, contents.steps.step >= first)
        microbatches, samples = contents.context.microbatches, contents.context.samples
        return _Contents(
            run=contents.run,
            steps=kept,
            spans=select_rows(contents.spans, contents.spans.step >= first),
            context=replace(
                contents.context,
                microbatches=select_rows(microbatches, microbatches.step >= first),
                samples=select_rows(samples, samples.at_ns >= kept.start_ns.min()),
            ),
        )

    def _update_mfu(self, run: RunInfo, steps: StepTable) -> None:
        new = read_mfu(self._source, self._run_id, steps, run=run)
        if new is not None:
            before = self.mfu or new
            by_step = {**before.by_step, **new.by_step}
            mean = float(np.mean(list(by_step.values())))
            self.mfu = Mfu(
                convention=new.convention,
                mean=mean,
                by_step=by_step,
                flops_by_step={**before.flops_by_step, **new.flops_by_step},
                restart_steps=tuple(sorted({*before.restart_steps, *new.restart_steps})),
                hfu=None if new.hfu is None else new.hfu / new.mean * mean,
            )

    def _read_stalled(self, run: RunInfo, steps: StepTable) -> bool:
        """Read a job that stalled before the first complete step; return if it is new that it did.

        The next call starts again.
        """
        context = self._source.context(self._run_id)
        stalled = tuple(event for event in context.events if event.kind == "stalled")
        if stalled == self._stalled:
            return False
        self._stalled = stalled
        spans = self._source.spans(self._run_id)
        self._contents = _Contents(run=run, steps=steps, spans=spans, context=context)
        return True

    def _read_exits(self, run: RunInfo) -> bool:
        """Add exits of ranks and events since the last call; return whether there are any."""
        if self._contents is None:
            return False
        before = self._contents.context
        newest = self._source.context(self._run_id, first=self.last, last=self.last)
        if (newest.exits, newest.events) == (before.exits, before.events):
            return False
        context = replace(before, exits=newest.exits, events=newest.events)
        self._contents = replace(self._contents, run=run, context=context)
        return True

    def runs(self) -> tuple[RunSummary, ...]:
        """Return nothing: a window lists no runs."""
        return ()

    def run_info(self, run_id: str) -> RunInfo:
        """Return the description of the run."""
        return self._window(run_id).run

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows of the window."""
        steps = self._window(run_id).steps
        if self._unfinished is not None:
            steps = concatenate(steps, self._unfinished[0])
        return select_rows(steps, _between(steps.step, first, last))

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of the window."""
        spans = self._window(run_id).spans
        if self._unfinished is not None:
            spans = concatenate(spans, self._unfinished[1])
        return select_rows(spans, _between(spans.step, first, last))

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return the context of all steps of the window, whichever are requested."""
        return self._window(run_id).context

    def _window(self, run_id: str) -> _Contents:
        if run_id != self._run_id:
            raise UnknownRunError(run_id, (self._run_id,))
        if self._contents is None:
            raise EmptyRunError(f"run {run_id!r} has no complete step yet")
        return self._contents


def last_complete_step(info: RunInfo, steps: StepTable) -> int | None:
    """Return the last step that all traced ranks of its epoch have ended; None if there is none."""
    num_ranks = {epoch.epoch: len(epoch.ranks) for epoch in info.epochs}
    pairs = np.stack([steps.epoch, steps.step], axis=1)[steps.end_ns > 0]
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    complete = [
        step
        for (epoch, step), count in zip(distinct.tolist(), counts.tolist(), strict=True)
        if count >= num_ranks.get(epoch, 1)
    ]
    return max(complete, default=None)


def _pairs(epoch: NDArray[np.int32], step: NDArray[np.int32]) -> NDArray[np.int64]:
    return (epoch.astype(np.int64) << 32) | step


def _between(step: NDArray[np.int32], first: int | None, last: int | None) -> NDArray[np.bool_]:
    least, most = 0 if first is None else first, MAX_STEP if last is None else last
    chosen: NDArray[np.bool_] = (step >= least) & (step <= most)
    return chosen


def sort_samples(samples: SampleTable) -> SampleTable:
    """Return samples ordered by (name, host, device, at_ns), as a `SampleTable` has to be."""
    order = argsort_rows(samples.name, samples.host, samples.device, samples.at_ns)
    return select_rows(samples, order)
