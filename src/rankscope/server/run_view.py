"""Data of the pages about runs: list, diagnosis, progress, history and comparison."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rankscope.analysis.breakdown.mfu import read_mfu
from rankscope.analysis.breakdown.run_history import StepMark, summarize_history
from rankscope.analysis.report.liveness import StepSilence, find_silence
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.errors import StoreError
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.hosts import read_excluded, read_runs_of_hosts
from rankscope.collector.read.reports import read_last_loss
from rankscope.collector.read.rollups import read_mean_times, read_newest_rolled_up
from rankscope.collector.read.steps import read_step_bounds, read_step_marks, read_step_times
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.dashboard.records.progress import (
    Activity,
    AnalysisFailed,
    AnalysisInProgress,
    MarkedSteps,
    MeanKindTimes,
    Progress,
)
from rankscope.tracer.span import COMM_KINDS, KINDS, NS_PER_S, SpanKind

from ..doctor.confirmation import with_host_checks
from ..errors import find_exit_code, format_error
from ..sources.goodput import read_goodput
from ..sources.stored_findings import to_tracked
from ..sources.stored_reports import MAX_RANKS, read_run_lines
from .around_runs import analyze_steps, compare_finished, read_startup, read_strip
from .background_jobs import BackgroundJobs, KeptResults
from .reports import find_run
from .shared_results import SharedResults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankscope.analysis.breakdown.run_history import RunHistory
    from rankscope.analysis.goodput import Goodput
    from rankscope.analysis.report.liveness import RankLiveness
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.trace.tables import RunInfo, RunSummary, SpanSource
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from rankscope.dashboard.records.page_results import RunComparison, RunLine, RunStrip, Startup

    from .around_runs import Steps
    from .reports import Reports
    from .run_failures import RunFailures

MAX_KIND_TIMES = 8
"""Runs whose times by kind are kept in memory: each open page asks for them every few seconds."""

MAX_COMPARISONS = 8
"""Comparisons kept in memory: an open page asks for one again and again."""

MAX_MARKED = 8
"""Runs whose steps are kept as the ranks marked them, while their first analysis runs."""

MAX_STEPS = 2_000
"""Steps whose times are read before the analysis is done, the newest."""

MAX_MFU_ROWS = 250_000
"""Rows of table ``steps`` read for the MFU: the newest 20 steps of 12,288 ranks."""

MAX_ROLLUP_ROWS = 2_500_000
"""Rows of table ``rollups`` read for the times by kind: the newest 13 steps of 12,288 ranks, if
they have spans of all kinds."""

RUNS_AGE_NS = 500_000_000
"""Age of the list of runs: each part of a page asks for it, and it takes 20 ms."""

HISTORY_AGE_NS = 2_000_000_000
MAX_HISTORIES = 8
"""Histories of runs that are kept, of several thousand numbers each."""

MAX_CHECKED = 8
"""Reports that are kept with the checks of their hosts."""

CHECKS_AGE_NS = 5_000_000_000
"""Age of these checks: a host is examined within a minute."""

GOODPUT_AGE_NS = 10_000_000_000
"""Age of a run's goodput between two diagnoses: reading it visits all of its steps."""

SMALL_SPANS = 500_000
"""Largest run whose analysis takes only seconds."""


@dataclass(frozen=True, slots=True)
class JobQueues:
    """Queues of background jobs: a small run never waits for large ones, nor steps for analyses."""

    large: BackgroundJobs = field(default_factory=BackgroundJobs)
    small: BackgroundJobs = field(default_factory=BackgroundJobs)
    steps: BackgroundJobs = field(default_factory=BackgroundJobs)
    parts: BackgroundJobs = field(default_factory=lambda: BackgroundJobs(max_concurrent=1))

    def of_run(self, run: RunSummary) -> BackgroundJobs:
        """Return the queue of a run's analysis and of its whole steps."""
        return self.small if run.num_spans <= SMALL_SPANS else self.large

    def num_unfinished(self) -> int:
        """Return the number of jobs that wait or run."""
        queues = (self.large, self.small, self.steps, self.parts)
        return sum(jobs.num_unfinished() for jobs in queues)


class RunView:
    """Runs of a store, as pages show them.

    One that the store does not hold is an `UnknownRunError`.

    Args:
        failures: What could not be done for single runs. None: nothing.
        read_liveness: Returns the liveness of a run's ranks.
        timeout_s: Time that a page waits for a background job.
    """

    def __init__(  # noqa: PLR0913  # what it shows
        self,
        source: SpanSource,
        reports: Reports,
        *,
        store: Store,
        failures: RunFailures | None,
        queues: JobQueues,
        read_liveness: Callable[[str], RankLiveness | None],
        timeout_s: float,
    ) -> None:
        self._source = source
        self._reports = reports
        self._store = store
        self._failures = failures
        self._queues = queues
        self._read_liveness = read_liveness
        self._timeout_s = timeout_s
        self._runs: SharedResults[None, tuple[RunSummary, ...]] = SharedResults(max_results=1)
        self._infos: SharedResults[RunSummary, RunInfo] = SharedResults(max_results=1)
        self._histories: SharedResults[str, RunHistory | None] = SharedResults(
            max_results=MAX_HISTORIES
        )
        self._goodputs: SharedResults[tuple[str, int], Goodput | None] = SharedResults(
            max_results=MAX_HISTORIES
        )
        self._kind_times: SharedResults[tuple[str, int], MeanKindTimes] = SharedResults(
            max_results=MAX_KIND_TIMES
        )
        self._comparisons: KeptResults[RunComparison] = KeptResults(MAX_COMPARISONS)
        self._marked: KeptResults[MarkedSteps] = KeptResults(MAX_MARKED)
        self._checked: SharedResults[tuple[str, int], RunReport] = SharedResults(
            max_results=MAX_CHECKED
        )

    def runs(self, *, max_age_ns: int = RUNS_AGE_NS) -> tuple[RunSummary, ...]:
        """Return every run, the newest first, as of ``max_age_ns`` ago at most."""

        def read() -> tuple[RunSummary, ...]:
            return tuple(
                replace(run, warnings=(*run.warnings, *self._failures_of(run.run_id)))
                for run in self._source.runs()
            )

        return self._runs.get(None, read, max_age_ns=max_age_ns)

    def _failures_of(self, run_id: str) -> tuple[str, ...]:
        return () if self._failures is None else self._failures.of_run(run_id)

    def info(self, run_id: str) -> RunInfo:
        """Return the description of a run. That of the last requested one is cached.

        Its queries take as long as those of a step's spans.
        """
        run = self.find(run_id)  # it changes with the number of spans
        return self._infos.get(run, lambda: self._source.run_info(run_id))

    def find(self, run_id: str) -> RunSummary:
        """Return the summary of a run, as of `runs`."""
        listed = next((run for run in self.runs() if run.run_id == run_id), None)
        return find_run(self._source, run_id) if listed is None else listed

    def report(self, run_id: str) -> RunReport | AnalysisInProgress | AnalysisFailed | None:
        """Return the diagnosis; None if the run has no step to analyse yet.

        The first diagnosis of a run is a background job. While it runs, and if it fails, the result
        is what is known without it.
        """
        if self._reports.has_report(run_id):
            return self._completed(self._reports.get(run_id))
        run = self.find(run_id)
        key = ("report", run_id)
        jobs = self._queues.of_run(run)
        done = jobs.result(key, lambda: self._reports.get(run_id), timeout_s=self._timeout_s)
        error = None if done is None else done.exception()
        if isinstance(error, UnknownRunError):
            raise error
        if done is not None and error is None:
            return self._completed(done.result())
        steps = self._marked_steps(run_id)
        if isinstance(error, Exception):
            return AnalysisFailed(run=run, reason=_format_failure(error), steps=steps)
        activity = Activity.READING if jobs.is_running(key) else Activity.WAITING
        return AnalysisInProgress(
            run=run,
            progress=self._reports.progress(run.run_id) or Progress(activity=activity),
            elapsed_s=jobs.age_ns(key) / NS_PER_S,
            steps=steps,
            earlier_findings=read_open_findings(self._store, run.run_id),
        )

    def _marked_steps(self, run_id: str) -> MarkedSteps | None:
        """Return the steps as the ranks marked them; None while a background job reads them."""
        done = self._marked.get(
            ("steps", run_id),
            lambda: read_marked_steps(self._store, self._source, run_id),
            jobs=self._queues.steps,
            timeout_s=0,
        )
        return None if done is None or done.exception() is not None else done.result()

    def revision(self, run_id: str) -> int:
        """Return a number that changes with the diagnosis of a run, and the checks beside it."""
        report = self._reports.peek(run_id)
        checked = () if report is None else self._with_checks(report).findings
        notes = tuple(finding.host_notes for finding in checked)
        return hash((self._reports.revision(run_id), notes))

    def _with_checks(self, report: RunReport) -> RunReport:
        """Return a report with what the checks of its hosts say since it was made."""
        with suppress(StoreError):  # they are missing until it answers
            return self._checked.get(
                (report.run, self._reports.revision(report.run)),
                lambda: with_host_checks(self._store, report),
                max_age_ns=CHECKS_AGE_NS,
            )
        return report

    def _completed(self, report: RunReport | None) -> RunReport | None:
        """Return a report with what has happened since it was made: checks of hosts, failures."""
        if report is None:
            return None
        report, failures = self._with_checks(report), self._failures_of(report.run)
        if not failures:
            return report
        warnings = (*report.quality.warnings, *failures)
        return replace(report, quality=replace(report.quality, warnings=warnings))

    def history(self, run_id: str) -> RunHistory | None:
        """Return loss and epochs of the newest steps; None if no step has ended."""

        def read() -> RunHistory | None:
            rows = read_step_marks(self._store, run_id, most=MAX_STEPS)
            return summarize_history(StepMark(**row) for row in rows)

        return self._histories.get(run_id, read, max_age_ns=HISTORY_AGE_NS)

    def goodput(self, run_id: str) -> Goodput | None:
        """Return what the time of a run was spent on, by its last diagnosis; None if unknown."""

        def read() -> Goodput | None:
            report = self._reports.peek(run_id)
            return read_goodput(self._store, run_id, report, state=self.find(run_id).state)

        revision = self._reports.revision(run_id)
        return self._goodputs.get((run_id, revision), read, max_age_ns=GOODPUT_AGE_NS)

    def kind_times(self, run_id: str) -> MeanKindTimes | None:
        """Return the mean times of the newest closed steps by kind; None if no step is closed."""
        newest = read_newest_rolled_up(self._store, run_id, most=MAX_STEPS)
        if not newest:
            return None
        # Steps are closed, computed again and deleted: each changes this number.
        revision = hash(tuple(tuple(row.values()) for row in newest))

        def read() -> MeanKindTimes:
            num_ranks = max(row["num_ranks"] for row in newest)
            first = newest[-max(1, MAX_ROLLUP_ROWS // (num_ranks * len(KINDS))) :][0]
            rows = read_mean_times(self._store, run_id, since=(first["epoch"], first["step"]))
            return make_kind_times(rows, revision=revision)

        return self._kind_times.get((run_id, revision), read)

    def silence(self, run_id: str) -> StepSilence | None:
        """Return since when a running job has ended no step; None if it goes on, or has ended."""
        if not self._reports.has_report(run_id):
            return None
        report = self._reports.get(run_id)
        if report is None or report.step_time_s.actual is None or not report.steps:
            return None
        if self.find(run_id).state != RUNNING:
            return None
        bounds_ns = read_step_bounds(self._store, run_id, first=report.steps[-1])
        if bounds_ns is None:
            return None
        return find_silence(
            last_step=report.steps[-1],
            ended_ns=bounds_ns[1],
            step_time_ns=round(report.step_time_s.actual * NS_PER_S),
            now_ns=time.time_ns(),
        )

    def run_lines(self) -> tuple[RunLine, ...]:
        """Return every run with what is known of it without an analysis, the newest first."""
        excluded = read_excluded(self._store, time.time_ns())
        used = read_runs_of_hosts(self._store, [mark.host for mark in excluded])
        return tuple(
            replace(self._complete_live(line), excluded_hosts=used.get(line.run.run_id, ()))
            for line in read_run_lines(self._store)
        )

    def _complete_live(self, line: RunLine) -> RunLine:
        """Return a running job's line with its last diagnosis, its newest loss and its silence."""
        if line.run.state != RUNNING:
            return line
        if (report := self._reports.peek(line.run.run_id)) is not None:
            mfu = None if report.mfu is None else report.mfu.mean
            top = report.top_finding
            is_same = (line.cause, line.ranks) == (top.cause, top.ranks)
            line = replace(
                line,
                incident=line.incident if is_same else None,
                cause=top.cause,
                severity=top.severity or "",
                ranks=top.ranks[:MAX_RANKS],
                is_closed=False,
                verdict=verdict_sentence(report),
                step_s=report.step_time_s.actual,
                mfu=mfu,
            )
            if report.steps:
                loss = read_last_loss(self._store, report.run, first=report.steps[0])
                line = replace(line, loss=loss)
        with suppress(UnknownRunError):  # deleted meanwhile
            return replace(line, is_silent=self.silence(line.run.run_id) is not None)
        return line

    def strip(self, run_id: str) -> RunStrip | None:
        """Return the state of a run in one line; None if there is no such run."""
        run = next((run for run in self.runs() if run.run_id == run_id), None)
        if run is None:
            return None
        report = self._reports.find_made(run)
        liveness = self._read_liveness(run_id) if run.state == RUNNING else None
        return read_strip(self._store, run, report, liveness, self.silence(run_id))

    def comparison(
        self,
        first: str,
        second: str,
        *,
        first_steps: Steps | None = None,
        second_steps: Steps | None = None,
    ) -> RunComparison | AnalysisFailed | None:
        """Return two runs, or ranges of their steps, side by side; None while being made.

        Raises:
            UnknownRunError: The store holds no run of one of these names.
        """
        runs = [self.find(run_id) for run_id in (first, second)]

        def compute() -> RunComparison:
            reports = (
                self._report_of(first, first_steps),
                self._report_of(second, second_steps),
            )
            return compare_finished(self._source, *reports)

        revisions = [self._reports.revision(run_id) for run_id in (first, second)]
        done = self._comparisons.get(
            ("comparison", first, second, first_steps, second_steps, *revisions),
            compute,
            jobs=self._queues.of_run(max(runs, key=lambda run: run.num_spans)),
            timeout_s=self._timeout_s,
        )
        if done is None:
            return None
        error = done.exception()
        if isinstance(error, Exception):
            return AnalysisFailed(run=runs[0], reason=_format_failure(error), steps=None)
        return done.result()

    def _report_of(self, run_id: str, steps: Steps | None) -> RunReport:
        """Return the report of a run, or of a range of its steps.

        Raises:
            EmptyRunError: It has no step to analyse.
        """
        report = analyze_steps(self._source, run_id, steps) if steps else self._reports.get(run_id)
        if report is None:
            raise EmptyRunError(f"run {run_id!r} has no step to analyse")
        return report

    def startup(self, run_id: str) -> Startup | None:
        """Return the start-up of a run's newest epoch; None if no span is outside the steps."""
        self.find(run_id)
        return read_startup(self._store, run_id)


def _format_failure(error: Exception) -> str:
    """Return an error in one line; for a defect of rankscope, with its type."""
    line = format_error(error)
    return line if find_exit_code(error) is not None else f"{type(error).__name__}: {line}"


def make_kind_times(rows: Sequence[Row], *, revision: int) -> MeanKindTimes:
    """Return the times of `collector.read.rollups.read_mean_times` by kind and step."""
    busy: dict[SpanKind, dict[int, float]] = {}
    exposed: dict[SpanKind, dict[int, float]] = {}
    wait: dict[SpanKind, dict[int, float]] = {}
    for row in rows:  # ascending: a repeated step takes the values of its last epoch
        kind, step = SpanKind(row["kind"]), row["step"]
        busy.setdefault(kind, {})[step] = row["busy_ns"] / NS_PER_S
        if kind in COMM_KINDS:
            exposed.setdefault(kind, {})[step] = row["exposed_ns"] / NS_PER_S
            if not row["num_unsplit"]:
                wait.setdefault(kind, {})[step] = row["wait_ns"] / NS_PER_S
    return MeanKindTimes(revision=revision, busy_s=busy, exposed_s=exposed, wait_s=wait)


def read_marked_steps(store: Store, source: SpanSource, run_id: str) -> MarkedSteps:
    """Return times and MFU of a run's newest steps as the ranks marked them, without spans.

    Raises:
        UnknownRunError: The store holds no run of this name.
    """
    rows = read_step_times(store, run_id, most=MAX_STEPS)
    seconds = {row["step"]: (row["last_ns"] - row["first_ns"]) / NS_PER_S for row in rows}
    steps = sorted(seconds)
    mfu = None
    if steps:
        num_ranks = max(row["num_ranks"] for row in rows)
        first = steps[-max(1, MAX_MFU_ROWS // num_ranks) :][0]
        mfu = read_mfu(source, run_id, source.steps(run_id, first=first))
    return MarkedSteps(
        epochs=tuple(sorted({row["epoch"] for row in rows})),
        actual_s_by_step={step: seconds[step] for step in steps},
        mfu=mfu,
    )


def read_open_findings(store: Store, run_id: str) -> tuple[Finding, ...]:
    """Return the findings of a run that were open when it was last analysed."""
    return tuple(
        to_tracked(stored).finding
        for stored in read_findings(store, run_id)
        if stored.closed_ns is None
    )
