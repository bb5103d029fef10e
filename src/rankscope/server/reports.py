"""Diagnoses of the runs of a store, kept until a run has new data: in memory, and of ended runs in
the store.

Of a running job, a window of the newest steps is analysed (`analysis.window`), and each step is
read once. An ended run is analysed as a whole, up to `MAX_SPANS`.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.breakdown.mfu import read_mfu
from rankscope.analysis.breakdown.mfu_shape import with_mfu
from rankscope.analysis.trace.account import sum_accounts
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.analysis.window import FIXED_SPANS, RunWindow
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.dashboard.records.progress import Activity, Progress
from rankscope.tracer.span import NS_PER_S

from ..sources.stored_reports import is_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.account import RecordAccount
    from rankscope.analysis.trace.tables import (
        RunSummary,
        SpanSource,
        SpanTable,
        StepTable,
    )

    from ..sources.stored_reports import StoredReports

V = TypeVar("V")

MAX_SPANS = 4_000_000
"""Limit on the time and memory of one analysis. Of larger runs, the last steps are analysed."""

MAX_OWN_SPANS = 500_000
"""Largest run that the server analyses itself, in 0.3 GB; of larger ones the last part may take
3 GB."""

TURN_BUDGET_S = 5.0
"""Longest time for one analysis of a running job. Its window has as many steps as that allows, at
least `analysis.window.MIN_STEPS`."""


MAX_EARLIER = 20_000
"""Steps before the window whose times are kept, for curves and for the baseline of alerts."""


class AnalyzeElsewhere(Protocol):
    """Returns the report of an ended run, without using this process for it."""

    def __call__(
        self, run_id: str, *, first: int | None, show: Callable[[Progress], None]
    ) -> RunReport:
        """Analyse a run from a step on (None: all of it); raise `EmptyRunError` if it is empty."""


class Track(Protocol):
    """Updates the tracked findings of a run by a report, and returns it as they are then."""

    def __call__(self, report: RunReport, *, is_over: bool) -> RunReport:
        """Track a report of the newest steps, or of the last ones if the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCost:
    """Cost of the last analysis of a run, reading included."""

    num_new_steps: int
    """Steps that had not been analysed before; 1 if a rank ended without a new step."""

    num_steps: int
    """Steps in the window."""

    num_spans: int
    seconds: float


@dataclass(slots=True)
class _Entry:
    """The diagnosis of one run. One thread at a time analyses it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    size: tuple[int, int, int, str] | None = None
    """Spans, steps, rows and state of the run when `report` was made."""

    report: RunReport | None = None
    revision: int = 0
    window: RunWindow | None = None
    """Newest steps of a running job; None if the run has ended."""

    unfinished_size: tuple[int, int, int, str] | None = None
    """Size of the run when its unfinished steps were read."""

    cost: TurnCost | None = None


class Reports:
    """Diagnoses by run, made at the first request and again after the run has grown.

    Args:
        max_spans: Largest number of spans of one analysis. Of larger runs, the last steps are
            analysed.
        monotonic_ns: Clock for the duration of an analysis.
        unix_ns: Clock that says whether a running job is silent.
        stored: Reports in the store. None: they are kept in memory alone.
        analyze_elsewhere: Analyses an ended run of more than `MAX_OWN_SPANS` from a step on, and
            reports its progress. None: it is analysed here.
        version: See `RunWindow`.
    """

    def __init__(  # noqa: PLR0913  # effects come in here
        self,
        source: SpanSource,
        *,
        stored: StoredReports | None = None,
        max_spans: int = MAX_SPANS,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        unix_ns: Callable[[], int] = time.time_ns,
        analyze_elsewhere: AnalyzeElsewhere | None = None,
        version: Callable[[str], object] | None = None,
    ) -> None:
        self._version = version
        self._analyze_elsewhere = analyze_elsewhere
        self._source = ObservedSource(source)
        self._stored = stored
        self._max_spans = max_spans
        self._monotonic_ns = monotonic_ns
        self._unix_ns = unix_ns
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._track: Track = lambda report, **_: report

    def track_with(self, track: Track) -> None:
        """Track the findings of live runs from now on: reports show their onset and their price."""
        self._track = track

    def get(self, run_id: str) -> RunReport | None:
        """Return the latest diagnosis; None if the run has no step to analyse.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        entry = self._entry(run_id)
        return self.refresh(find_run(self._source, run_id)) if entry.size is None else entry.report

    def refresh(self, summary: RunSummary) -> RunReport | None:
        """Analyse the run again if it has grown, and return the latest diagnosis.

        Args:
            summary: The run as the store holds it now.
        """
        size = (summary.num_spans, summary.num_steps, summary.num_rows, summary.state)
        with self._lock:
            entry = self._entries.setdefault(summary.run_id, _Entry())
        with entry.lock, self._source.observe(summary.run_id):
            begun_ns = self._monotonic_ns()
            if summary.state == RUNNING:
                num_new = self._follow(entry, summary.run_id, size)
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
                    fixed_s = TURN_BUDGET_S * entry.cost.num_spans / FIXED_SPANS
                    entry.window.fit(min(entry.cost.seconds, fixed_s), TURN_BUDGET_S)
            return entry.report

    def peek(self, run_id: str) -> RunReport | None:
        """Return the latest diagnosis that was made; None if there is none. Never analyses."""
        return self._entry(run_id).report

    def has_report(self, run_id: str) -> bool:
        """Return whether `get` returns without an analysis."""
        return self._entry(run_id).size is not None

    def progress(self, run_id: str) -> Progress | None:
        """Return the progress of the run's analysis; None if none is running."""
        return self._source.progress(run_id)

    def find_made(self, summary: RunSummary) -> RunReport | None:
        """Return the diagnosis of a run if it is in memory or stored; None if it must be made."""
        is_made = self.has_report(summary.run_id) or (
            self._stored is not None and summary.state != RUNNING and self._stored.has(summary)
        )
        return self.get(summary.run_id) if is_made else None

    def without_stored(self, runs: Iterable[RunSummary]) -> list[RunSummary]:
        """Return those of these runs that have ended and have no stored report."""
        if self._stored is None:
            return []
        lines = self._stored.lines()
        return [
            run
            for run in runs
            if run.state != RUNNING and not (run.run_id in lines and is_of(lines[run.run_id], run))
        ]

    def keep_only(self, run_ids: Collection[str]) -> None:
        """Forget all other runs, because they are no longer in the store."""
        with self._lock:
            self._entries = {
                run_id: entry for run_id, entry in self._entries.items() if run_id in run_ids
            }

    def running_account(self) -> RecordAccount:
        """Return the account of the records of all running jobs, as of their last analyses."""
        with self._lock:
            entries = list(self._entries.values())
        return sum_accounts(
            entry.report.quality.account
            for entry in entries
            if entry.window is not None and entry.report is not None
        )

    def cost(self, run_id: str) -> TurnCost | None:
        """Return the cost of the run's last analysis; None before the first one."""
        return self._entry(run_id).cost

    def revision(self, run_id: str) -> int:
        """Return how many times the run was analysed since the start."""
        return self._entry(run_id).revision

    def _entry(self, run_id: str) -> _Entry:
        with self._lock:
            return self._entries.get(run_id) or _Entry()

    def _follow(self, entry: _Entry, run_id: str, size: tuple[int, int, int, str]) -> int:
        """Analyse the window if it has new steps; return their number.

        Of a silent job, the unfinished step is read too: it shows in what the ranks are blocked.
        """
        if entry.window is None:
            entry.window = RunWindow(
                self._source, run_id, max_spans=self._max_spans, version=self._version
            )
        num_new = entry.window.advance()
        is_silent = entry.window.is_silent(self._unix_ns())
        if is_silent and entry.unfinished_size != size:
            entry.unfinished_size = size
            num_new += int(entry.window.read_unfinished())
        if num_new:
            report = analyze_run(
                entry.window, run_id, num_earlier_steps=entry.window.num_earlier_steps
            )
            if entry.report is not None:
                report = _with_earlier_steps(report, entry.report)
            entry.report = self._track(with_mfu(report, entry.window.mfu), is_over=False)
            entry.revision += 1
        return num_new

    def _finish(self, entry: _Entry, summary: RunSummary) -> int:
        """Analyse an ended run as a whole, unless the store has its report.

        Returns:
            The number of steps analysed.
        """
        entry.window = None
        entry.report = None if self._stored is None else self._stored.find(summary)
        if entry.report is None:
            entry.report = self._analyze(summary)
            if entry.report is not None and self._stored is not None:
                self._stored.keep(summary, entry.report)
        entry.revision += 1
        return len(entry.report.steps) if entry.report is not None else 0

    def _analyze(self, summary: RunSummary) -> RunReport | None:
        steps = self._source.steps(summary.run_id)
        first = first_step(self._max_spans, summary, steps) if len(steps) else None
        try:
            report = self._analyze_from(summary, first)
        except EmptyRunError:
            return None
        if first is None:
            return report
        report = with_mfu(report, read_mfu(self._source, summary.run_id, steps))
        return self._track(report, is_over=True)

    def _analyze_from(self, summary: RunSummary, first: int | None) -> RunReport:
        run_id = summary.run_id
        if self._analyze_elsewhere is None or summary.num_spans <= MAX_OWN_SPANS:
            return analyze_run(self._source, run_id, first=first)
        return self._analyze_elsewhere(
            run_id, first=first, show=lambda progress: self._source.show(run_id, progress)
        )


def _with_earlier_steps(report: RunReport, before: RunReport) -> RunReport:
    """Return a report that knows of steps that have left the window what an earlier one knew.

    The window limits the replay only. Alerts and curves need the values of all steps of the run.
    """
    first = report.steps[0] if report.steps else 0

    def earlier(values: dict[int, V]) -> dict[int, V]:
        return {step: values[step] for step in values if first - MAX_EARLIER <= step < first}

    return replace(
        report,
        planned_steps=(
            *(step for step in before.planned_steps if step < first),
            *report.planned_steps,
        ),
        squares_by_step=earlier(before.squares_by_step) | report.squares_by_step,
        startup_s_by_step=before.startup_s_by_step | report.startup_s_by_step,
        tokens_by_step=earlier(before.tokens_by_step) | report.tokens_by_step,
        actual_s_by_step=earlier(before.actual_s_by_step) | report.actual_s_by_step,
    )


def first_step(max_spans: int, summary: RunSummary, steps: StepTable) -> int | None:
    """Return the first of the last steps that ``max_spans`` allows; None for the whole run."""
    if summary.num_spans <= max_spans:
        return None
    numbers = np.unique(steps.step)
    kept = max(1, int(len(numbers) * max_spans / summary.num_spans))
    return int(numbers[-kept])


def find_run(source: SpanSource, run_id: str) -> RunSummary:
    """Return the summary of a run.

    Raises:
        UnknownRunError: The store holds no run of this name.
        DeletedRunError: The run was deleted.
    """
    runs = source.runs()
    for run in runs:
        if run.run_id == run_id:
            return run
    source.run_info(run_id)  # raises DeletedRunError for a deleted run
    raise UnknownRunError(run_id, tuple(run.run_id for run in runs))


class ObservedSource:
    """A `analysis.trace.tables.SpanSource` that reports the progress of analyses.

    Args:
        on_progress: Called whenever an analysis gets further. None: `progress` returns it.
    """

    def __init__(
        self, source: SpanSource, *, on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        self._source = source
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._progress: dict[str, Progress] = {}
        self.runs, self.run_info = source.runs, source.run_info
        self.steps, self.context = source.steps, source.context

    def progress(self, run_id: str) -> Progress | None:
        """Return how far the run's analysis is; None if none is running."""
        with self._lock:
            return self._progress.get(run_id)

    @contextmanager
    def observe(self, run_id: str) -> Iterator[None]:
        """Record the progress of an analysis of the run until the block ends."""
        with self._lock:
            self._progress[run_id] = Progress(activity=Activity.READING)
        try:
            yield
        finally:
            with self._lock:
                self._progress.pop(run_id, None)

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of these steps."""
        self._record(run_id, Activity.READING, num_spans=0)
        found = self._source.spans(run_id, first=first, last=last)
        self._record(run_id, Activity.COMPARING, num_spans=len(found))
        return found

    def show(self, run_id: str, progress: Progress) -> None:
        """Report how far an analysis of the run is that goes on elsewhere."""
        with self._lock:
            if run_id in self._progress:
                self._progress[run_id] = progress

    def _record(self, run_id: str, activity: Activity, *, num_spans: int) -> None:
        with self._lock:
            before = self._progress.get(run_id)
            if before is None:
                return
            after = Progress(activity=activity, num_spans=before.num_spans + num_spans)
            self._progress[run_id] = after
        if self._on_progress is not None:
            self._on_progress(after)
