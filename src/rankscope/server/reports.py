"""Finished diagnoses of a store's runs, each kept until new data of its run comes.

A run that trains is followed by a window of its newest steps (`analysis.window`), each read
once; a run that has ended is analysed as a whole, as far as `MAX_SPANS` goes.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.breakdown.mfu import compute_mfu
from rankscope.analysis.report.progress import Activity, Progress
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.analysis.window import RunWindow
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.context import RunContext
    from rankscope.analysis.trace.tables import (
        RunInfo,
        RunSummary,
        SpanSource,
        SpanTable,
        StepTable,
    )

MAX_SPANS = 4_000_000
"""Bounds the time and the memory of one analysis; a window of the last steps beyond."""

TURN_BUDGET_S = 5.0
"""What one analysis of a run that trains may take; its window keeps as many steps as that allows,
at least `analysis.window.MIN_STEPS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCost:
    """What the last analysis of a run took, reading included."""

    num_new_steps: int
    """Steps that it told of first; for a rank that ended without a new step, 1."""

    num_steps: int
    """Steps that it analysed: the window."""

    num_spans: int
    seconds: float

    @property
    def s_per_new_step(self) -> float:
        """Seconds that each new step cost: what must stay below the run's step time."""
        return self.seconds / max(self.num_new_steps, 1)


@dataclass(slots=True)
class _Entry:
    """What is known of one run; its lock lets one thread analyse it at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    size: tuple[int, int, int, str] | None = None
    """Spans, steps, rows and state of the run when `report` was made."""

    report: RunReport | None = None
    revision: int = 0
    window: RunWindow | None = None
    """While the run trains."""

    cost: TurnCost | None = None


class Reports:
    """Diagnoses by run, made when first asked for and again when the run has grown.

    Args:
        source: The runs.
        max_spans: Spans that one analysis reads at most; of a longer run, its last steps.
        monotonic_ns: Clock for what an analysis takes.
    """

    def __init__(
        self,
        source: SpanSource,
        *,
        max_spans: int = MAX_SPANS,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._source = WatchedSource(source)
        self._max_spans = max_spans
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def get(self, run_id: str) -> RunReport | None:
        """Return the latest diagnosis; None while the run has no step to analyse.

        Raises:
            UnknownRunError: The store holds no run of that name.
        """
        entry = self._entry(run_id)
        if entry is None or entry.size is None:
            return self.refresh(self._summary(run_id))
        return entry.report

    def refresh(self, summary: RunSummary) -> RunReport | None:
        """Analyse the run again if it has grown since; return the latest diagnosis.

        Args:
            summary: The run as the store sees it now.
        """
        size = (summary.num_spans, summary.num_steps, summary.num_rows, summary.state)
        with self._lock:
            entry = self._entries.setdefault(summary.run_id, _Entry())
        with entry.lock, self._source.watched(summary.run_id):
            begun_ns = self._monotonic_ns()
            if summary.state == RUNNING:
                num_new = self._follow(entry, summary.run_id)
            else:
                num_new = self._finish(entry, summary) if entry.size != size else 0
            entry.size = size
            if num_new and entry.report is not None:
                entry.cost = TurnCost(
                    num_new_steps=num_new,
                    num_steps=len(entry.report.steps),
                    num_spans=entry.report.num_spans,
                    seconds=(self._monotonic_ns() - begun_ns) / NS_PER_S,
                )
                if entry.window is not None:
                    entry.window.fit(entry.cost.seconds, TURN_BUDGET_S)
            return entry.report

    def is_made(self, run_id: str) -> bool:
        """Tell whether `get` returns at once."""
        entry = self._entry(run_id)
        return entry is not None and entry.size is not None

    def progress(self, run_id: str) -> Progress | None:
        """Return how far the analysis of a run is; None where none is under way."""
        return self._source.progress(run_id)

    def keep_only(self, run_ids: Collection[str]) -> None:
        """Forget every other run: it is not in the store any more."""
        with self._lock:
            self._entries = {
                run_id: entry for run_id, entry in self._entries.items() if run_id in run_ids
            }

    def cost(self, run_id: str) -> TurnCost | None:
        """Return what the run's last analysis took; None before the first."""
        entry = self._entry(run_id)
        return entry.cost if entry is not None else None

    def revision(self, run_id: str) -> int:
        """Return how often the run was analysed since the start."""
        entry = self._entry(run_id)
        return entry.revision if entry is not None else 0

    def _entry(self, run_id: str) -> _Entry | None:
        with self._lock:
            return self._entries.get(run_id)

    def _summary(self, run_id: str) -> RunSummary:
        found = self._source.runs()
        for summary in found:
            if summary.run_id == run_id:
                return summary
        self._source.run_info(run_id)  # knows whether it was deleted
        raise UnknownRunError(run_id, tuple(summary.run_id for summary in found))

    def _follow(self, entry: _Entry, run_id: str) -> int:
        """Analyse the window if it moved; return how many steps are new."""
        if entry.window is None:
            entry.window = RunWindow(self._source, run_id, max_spans=self._max_spans)
        num_new = entry.window.advance()
        if num_new:
            report = analyze_run(entry.window, run_id)
            # The window bounds the replay; an alert needs the MFU of the run's whole past.
            entry.report = replace(
                report, mfu=entry.window.mfu, num_earlier_steps=entry.window.num_earlier_steps
            )
            entry.revision += 1
        return num_new

    def _finish(self, entry: _Entry, summary: RunSummary) -> int:
        """Analyse a run that trains no more as a whole; return how many steps it had."""
        entry.window = None
        entry.report = self._analyze(summary)
        entry.revision += 1
        return len(entry.report.steps) if entry.report is not None else 0

    def _analyze(self, summary: RunSummary) -> RunReport | None:
        steps = self._source.steps(summary.run_id)
        first = _first_within(self._max_spans, summary, steps) if len(steps) else None
        try:
            report = analyze_run(self._source, summary.run_id, first=first)
        except EmptyRunError:
            return None
        if first is None:
            return report
        return replace(
            report,
            mfu=compute_mfu(self._source.run_info(summary.run_id), steps),
            num_earlier_steps=len(np.unique(steps.step[steps.step < first])),
        )


def _first_within(max_spans: int, summary: RunSummary, steps: StepTable) -> int | None:
    """Return the first step of the window that ``max_spans`` allows; None for the whole run."""
    if summary.num_spans <= max_spans:
        return None
    numbers = np.unique(steps.step)
    kept = max(1, int(len(numbers) * max_spans / summary.num_spans))
    return int(numbers[-kept])


class WatchedSource:
    """`analysis.trace.tables.SpanSource` over another one, with what is done with it.

    Args:
        source: The runs.
    """

    def __init__(self, source: SpanSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._progress: dict[str, Progress] = {}

    def progress(self, run_id: str) -> Progress | None:
        """Return how far the run's analysis is; None where none is under way."""
        with self._lock:
            return self._progress.get(run_id)

    @contextmanager
    def watched(self, run_id: str) -> Iterator[None]:
        """Note what an analysis of the run does until the block ends."""
        with self._lock:
            self._progress[run_id] = Progress(activity=Activity.READING)
        try:
            yield
        finally:
            with self._lock:
                self._progress.pop(run_id, None)

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        return self._source.runs()

    def run_info(self, run_id: str) -> RunInfo:
        """Return what is known of a run besides its spans."""
        return self._source.run_info(run_id)

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows with ``first <= step <= last``."""
        return self._source.steps(run_id, first=first, last=last)

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of these steps."""
        self._note(run_id, Activity.READING, num_spans=0)
        found = self._source.spans(run_id, first=first, last=last)
        self._note(run_id, Activity.COMPARING, num_spans=len(found))
        return found

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return what is known around the spans of these steps."""
        return self._source.context(run_id, first=first, last=last)

    def _note(self, run_id: str, activity: Activity, *, num_spans: int) -> None:
        with self._lock:
            before = self._progress.get(run_id)
            if before is not None:
                num_read = before.num_spans + num_spans
                self._progress[run_id] = Progress(activity=activity, num_spans=num_read)
