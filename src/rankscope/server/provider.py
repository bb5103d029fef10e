"""Data of the dashboard's pages, from the runs and diagnoses of a store."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.analysis.breakdown.goodput import StepMark, summarize_history
from rankscope.analysis.breakdown.mfu import read_mfu
from rankscope.analysis.drawing.tiles import MAX_REDRAWN_SPANS, is_few, needs_spans
from rankscope.analysis.drawing.timeline import (
    NO_SPANS,
    ViewportSpans,
    read_timeline,
    records_groups,
)
from rankscope.analysis.report.liveness import (
    MAX_SHOWN,
    RECENT_NS,
    SILENT_NS,
    RankLiveness,
    SilentRank,
    StepSilence,
    find_silence,
)
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.heartbeats import read_oldest_heartbeats
from rankscope.collector.read.pictures import StepId
from rankscope.collector.read.reports import read_last_loss
from rankscope.collector.read.rollups import read_mean_times, read_newest_rolled_up
from rankscope.collector.read.runs import read_events
from rankscope.collector.read.spans import SpanSelection, count_selected_spans
from rankscope.collector.read.steps import read_step_bounds, read_step_marks, read_step_times
from rankscope.collector.spool.descriptions import LOST, RUNNING
from rankscope.dashboard.records.alert_list import AlertList
from rankscope.dashboard.records.page_results import RunLine
from rankscope.dashboard.records.progress import (
    Activity,
    AnalysisFailed,
    AnalysisInProgress,
    MarkedSteps,
    MeanKindTimes,
    Progress,
)
from rankscope.tracer.span import COMM_KINDS, KINDS, NS_PER_S, SpanKind

from ..errors import find_exit_code, format_error
from ..sources.store_source import to_event
from ..sources.stored_findings import to_tracked
from ..sources.stored_reports import MAX_RANKS, read_run_lines
from .alert_changes import AlertChange
from .around_runs import (
    analyze_steps,
    compare_finished,
    read_startup,
    read_strip,
    write_step_trace,
)
from .background_jobs import BackgroundJobs
from .health import HealthReader
from .page_alerts import change, list_alerts, silence_like
from .pictures import LargeSteps, StepPictures, read_part
from .rank_view import read_quantity, read_rank_details
from .reports import find_run
from .shared_results import SharedResults
from .step_replays import StepReplays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.breakdown.goodput import RunHistory
    from rankscope.analysis.drawing.raster import StepPicture, Viewport
    from rankscope.analysis.drawing.rows import RowOrder
    from rankscope.analysis.drawing.step_replay import StepReplay
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.trace.tables import RunInfo, RunSummary, SpanSource
    from rankscope.collector.http.metrics import Metrics
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from rankscope.dashboard.records.page_results import Health, RunComparison, RunStrip, Startup
    from rankscope.dashboard.records.rank_details import RankDetails, RankQuantity, RankValues
    from rankscope.tracer.topology import Coords

    from .alerting import Alerting
    from .around_runs import Steps
    from .reports import Reports
    from .run_failures import RunFailures

MAX_TIMELINES = 8
"""Timelines kept in memory: a page requests the same step at each zoom."""

MAX_PARTS = 4
"""Parts of steps kept in memory, 50 MB each at most: a page asks for one again when it is read."""

MAX_READING_PARTS = 4
"""Parts that are read or wait for it: of a reader who zooms on, most are outdated."""

PART_TIMEOUT_RATIO = 1 / 8
"""Time that a page waits for the spans of a part before it shows the part's tiles, over
`TIMEOUT_S`: they are shown meanwhile, so a short time is no loss."""

MAX_KIND_TIMES = 8
"""Runs whose times by kind are kept in memory: each open page asks for them every few seconds."""

MAX_COMPARISONS = 8
"""Comparisons kept in memory: an open page asks for one again and again."""

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

LIVENESS_AGE_NS = 2_000_000_000
LIVENESS_AGE_FACTOR = 10
"""All clients share a liveness for `LIVENESS_AGE_NS`, and for this many times the time that reading
it took."""

SMALL_SPANS = 500_000
"""Largest run whose analysis takes only seconds."""

LARGE_STEP_SPANS = 5_000_000
"""Larger steps are drawn in portions, because a whole step takes 250 bytes per span."""

TIMEOUT_S = 0.4
"""Time that a page waits for a background job. The analysis of a small run is done by then, and so
is the timeline of one of its steps."""


class StoreProvider:
    """`dashboard.provider.ReportProvider` of one store.

    Args:
        store: The store with the pictures of closed steps. None: all steps are drawn from spans.
        failures: What could not be done for single runs, shown on their pages. None: nothing.
        alerting: Alerts. None: there are none.
        metrics: Metrics of the server, for the page of its state. None: it is not shown.
        timeout_s: Time that a page waits for a background job.
    """

    def __init__(  # noqa: PLR0913  # what it shows
        self,
        source: SpanSource,
        reports: Reports,
        *,
        store: Store | None = None,
        failures: RunFailures | None = None,
        alerting: Alerting | None = None,
        metrics: Metrics | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._failures = failures
        self._comparisons: OrderedDict[tuple[object, ...], RunComparison] = OrderedDict()
        self._health = None
        if store is not None and metrics is not None:
            self._health = HealthReader(
                store,
                metrics,
                read_account=reports.running_account,
                read_queue=lambda: sum(
                    jobs.num_unfinished()
                    for jobs in (
                        self._large_jobs,
                        self._small_jobs,
                        self._step_jobs,
                        self._part_jobs,
                    )
                ),
            )
        # Separate queues: a small run never waits for large ones, nor the steps for an analysis.
        self._large_jobs, self._small_jobs = BackgroundJobs(), BackgroundJobs()
        self._step_jobs = BackgroundJobs()
        self._part_jobs = BackgroundJobs(max_concurrent=1)
        self._runs: SharedResults[None, tuple[RunSummary, ...]] = SharedResults(max_results=1)
        self._histories: SharedResults[str, RunHistory | None] = SharedResults(
            max_results=MAX_HISTORIES
        )
        self._pictures = None if store is None else StepPictures(store)
        self._parts: OrderedDict[tuple[object, ...], StepTimeline | None] = OrderedDict()
        self._large_steps = None if store is None else LargeSteps(store, source, self._large_jobs)
        self._replays = StepReplays(source, self._small_jobs)
        self._steps: dict[str, MarkedSteps] = {}
        self._store = store
        self._alerting = alerting
        self._source = source
        self._reports = reports
        self._lock = threading.Lock()
        self._liveness_lock = threading.Lock()
        self._liveness: dict[str, tuple[int, RankLiveness | None]] = {}
        self._timelines: OrderedDict[tuple[str, int, int, int], StepTimeline] = OrderedDict()
        self._kind_times: SharedResults[tuple[str, int], MeanKindTimes] = SharedResults(
            max_results=MAX_KIND_TIMES
        )
        self._infos: SharedResults[RunSummary, RunInfo] = SharedResults(max_results=1)
        self._last_places: tuple[
            tuple[str, int | None, int], tuple[dict[int, Coords], dict[int, str]]
        ] = ("", 0, 0), ({}, {})

    def runs(self, *, max_age_ns: int = RUNS_AGE_NS) -> tuple[RunSummary, ...]:
        """Return every run, the newest first, as of ``max_age_ns`` ago at most."""
        return self._runs.get(None, self._list_runs, max_age_ns=max_age_ns)

    def _list_runs(self) -> tuple[RunSummary, ...]:
        return tuple(
            replace(run, warnings=(*run.warnings, *self._failures_of(run.run_id)))
            for run in self._source.runs()
        )

    def _failures_of(self, run_id: str) -> tuple[str, ...]:
        return () if self._failures is None else self._failures.of_run(run_id)

    def _info(self, run_id: str) -> RunInfo:
        """Return the description of a run. That of the last requested one is cached.

        Its queries take as long as those of a step's spans.
        """
        run = self._run(run_id)  # it changes with the number of spans
        return self._infos.get(run, lambda: self._source.run_info(run_id))

    def _run(self, run_id: str) -> RunSummary:
        """Return the summary of a run, as of `runs`.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        found = next((run for run in self.runs() if run.run_id == run_id), None)
        return find_run(self._source, run_id) if found is None else found

    def report(self, run_id: str) -> RunReport | AnalysisInProgress | AnalysisFailed | None:
        """Return the diagnosis; None if the run has no step to analyse yet.

        The first diagnosis of a run is a background job. While it runs, and if it fails, the result
        is what is known without it.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        if self._reports.has_report(run_id):
            self._steps.pop(run_id, None)
            return self._with_failures(self._reports.get(run_id))
        run = self._run(run_id)
        key = ("report", run_id)
        jobs = self._jobs_for(run)
        done = jobs.result(key, lambda: self._reports.get(run_id), timeout_s=self._timeout_s)
        if done is None:
            self._start_reading_steps(run_id)
            return self._in_progress(run, key)
        error = done.exception()
        if isinstance(error, UnknownRunError):
            raise error
        if isinstance(error, Exception):
            self._start_reading_steps(run_id)
            return AnalysisFailed(
                run=run, reason=_format_failure(error), steps=self._steps.get(run_id)
            )
        return self._with_failures(done.result())

    def _with_failures(self, report: RunReport | None) -> RunReport | None:
        """Return a report that says what could not be done for its run since it was made."""
        failures = () if report is None else self._failures_of(report.run)
        if report is None or not failures:
            return report
        warnings = (*report.quality.warnings, *failures)
        return replace(report, quality=replace(report.quality, warnings=warnings))

    def _jobs_for(self, run: RunSummary) -> BackgroundJobs:
        return self._small_jobs if run.num_spans <= SMALL_SPANS else self._large_jobs

    def _in_progress(self, run: RunSummary, key: tuple[str, str]) -> AnalysisInProgress:
        jobs, store = self._jobs_for(run), self._store
        activity = Activity.READING if jobs.is_running(key) else Activity.WAITING
        return AnalysisInProgress(
            run=run,
            progress=self._reports.progress(run.run_id) or Progress(activity=activity),
            elapsed_s=jobs.age_ns(key) / NS_PER_S,
            steps=self._steps.get(run.run_id),
            earlier_findings=() if store is None else read_open_findings(store, run.run_id),
        )

    def _start_reading_steps(self, run_id: str) -> None:
        """Read the times of the steps in the background, once, while the analysis runs."""
        store = self._store
        if store is None or run_id in self._steps:
            return

        def read() -> None:
            self._steps[run_id] = read_marked_steps(store, self._source, run_id)

        self._step_jobs.result(("steps", run_id), read, timeout_s=0)

    def verdict(self, report: RunReport) -> str:
        """Return the diagnosis in one sentence."""
        return verdict_sentence(report)

    def timeline(self, run_id: str, *, epoch: int, step: int) -> StepTimeline | None:
        """Return one step with all its spans; None while a background job reads it.

        Raises:
            UnknownRunError: The store holds no run of this name.
            EmptyRunError: The step holds no spans.
        """
        if self._large_steps is not None and self._has_large_steps(run_id):
            return None  # `picture` draws large steps
        key = (run_id, self._reports.revision(run_id), epoch, step)
        with self._lock:
            if key in self._timelines:
                self._timelines.move_to_end(key)
                return self._timelines[key]
        # In the queue of the analyses: a large step takes as much memory as one.
        done = self._jobs_for(self._run(run_id)).result(
            key,
            lambda: self._read_timeline(key, run_id, epoch=epoch, step=step),
            timeout_s=self._timeout_s,
        )
        timeline: StepTimeline | None = None if done is None else done.result()
        return timeline

    def _read_timeline(
        self, key: tuple[str, int, int, int], run_id: str, *, epoch: int, step: int
    ) -> StepTimeline:
        is_running = self._run(run_id).state == RUNNING
        events = () if self._store is None else map(to_event, read_events(self._store, run_id))
        timeline = read_timeline(
            self._source,
            run_id,
            epoch=epoch,
            step=step,
            info=self._info(run_id),
            events=events,
            now_ns=time.time_ns() if is_running else None,
        )
        with self._lock:
            self._timelines[key] = timeline
            while len(self._timelines) > MAX_TIMELINES:
                self._timelines.popitem(last=False)
        return timeline

    def picture(
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        order: RowOrder,
        viewport: Viewport | None = None,
    ) -> StepPicture | None:
        """Return the picture of a step; None if it must be drawn from `timeline`, or is not ready.

        The picture comes from stored tiles, the finest that there are. A large step without tiles
        is drawn whole, by a background job.

        Raises:
            UnknownRunError: The store holds no run of this name.
            EmptyRunError: The step is large and holds no spans.
        """
        if self._pictures is None or self._large_steps is None:
            return None
        place = StepId(run_id=run_id, epoch=epoch, step=step)
        picture = self._pictures.picture(
            place,
            order=order,
            read_coords=lambda num_described: self._places(run_id, epoch, num_described)[0],
            viewport=viewport,
        )
        if picture is not None:
            hosts = self._places(run_id, epoch, None)[1]
            return replace(picture, hosts=hosts)
        if not self._has_large_steps(run_id):
            return None
        return self._large_steps.picture(place, order=order, timeout_s=self._timeout_s)

    def _has_large_steps(self, run_id: str) -> bool:
        run = self._run(run_id)
        return records_groups(run) and run.num_spans > LARGE_STEP_SPANS * max(run.num_steps, 1)

    def viewport_spans(self, picture: StepPicture) -> ViewportSpans:
        """Return the spans of a picture's viewport, if bars show them or its tiles are too coarse.

        They are read by a background job: among all ranks that takes a pass over the step.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        store, viewport = self._store, picture.viewport
        if store is None or viewport is None or not (is_few(picture) or needs_spans(picture)):
            return NO_SPANS
        info = self._info(picture.run)
        if not records_groups(info):
            return NO_SPANS
        revision = self._reports.revision(picture.run)
        portion = SpanSelection(
            run_id=picture.run,
            epoch=picture.epoch,
            step=picture.step,
            ranks=picture.ranks,
            after_ns=picture.begin_ns + viewport.begin_ns,
            before_ns=picture.begin_ns + viewport.end_ns,
        )
        bounds_ns = (picture.begin_ns, picture.end_ns)
        key = (revision, portion, bounds_ns)
        with self._lock:
            if key in self._parts:
                self._parts.move_to_end(key)
                return ViewportSpans(found=self._parts[key])
        if self._part_jobs.num_unfinished() >= MAX_READING_PARTS:
            return ViewportSpans(is_pending=True)
        done = self._part_jobs.result(
            key,
            lambda: self._read_part(store, info, portion, bounds_ns, key),
            timeout_s=PART_TIMEOUT_RATIO * self._timeout_s,
        )
        return (
            ViewportSpans(is_pending=True) if done is None else ViewportSpans(found=done.result())
        )

    def _read_part(
        self,
        store: Store,
        info: RunInfo,
        portion: SpanSelection,
        bounds_ns: tuple[int, int],
        key: tuple[object, ...],
    ) -> StepTimeline | None:
        """Return a part of a step; None if it has no spans or too many."""
        part = None
        if 0 < count_selected_spans(store, portion) <= MAX_REDRAWN_SPANS:
            part = read_part(store, info, portion, bounds_ns=bounds_ns)
        with self._lock:
            self._parts[key] = part
            while len(self._parts) > MAX_PARTS:
                self._parts.popitem(last=False)
        return part

    def rank_spans(self, picture: StepPicture, ranks: Sequence[int]) -> StepTimeline | None:
        """Return the spans of some ranks of a picture's whole step.

        None if there are none, or the run's format does not record groups.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        if self._store is None:
            return None
        portion = SpanSelection(
            run_id=picture.run, epoch=picture.epoch, step=picture.step, ranks=ranks
        )
        info = self._info(picture.run)
        if not records_groups(info) or not count_selected_spans(self._store, portion):
            return None
        bounds_ns = (picture.begin_ns, picture.end_ns)
        return read_part(self._store, info, portion, bounds_ns=bounds_ns)

    def step_replay(self, recorded: StepTimeline | StepPicture) -> StepReplay | None:
        """Return the replay of a step; None while a background job makes it.

        Raises:
            UnknownRunError: The store holds no run of this name.
            AnalysisError: The step cannot be replayed, or has too many spans.
        """
        return self._replays.replay(
            self._run(recorded.run),
            recorded,
            revision=self._reports.revision(recorded.run),
            timeout_s=self._timeout_s,
        )

    def picture_revision(self, run_id: str, *, epoch: int, step: int) -> int:
        """Return a number that changes whenever the stored picture of a step does."""
        if self._pictures is None:
            return 0
        kept = self._pictures.kept(StepId(run_id=run_id, epoch=epoch, step=step))
        return 0 if kept is None else kept.revision

    def _places(
        self, run_id: str, epoch: int, num_described: int | None
    ) -> tuple[dict[int, Coords], dict[int, str]]:
        """Return coordinates and hosts of the ranks. Those of the last requested run are cached.

        Reading the descriptions of 12,288 ranks takes longer than the picture, and they change only
        at the start of a run. Without a number of descriptions, the cached ones are taken.
        """
        key = (run_id, num_described, epoch)
        with self._lock:
            (known_run, known_number, known_epoch), places = self._last_places
            is_known = (known_run, known_epoch) == (run_id, epoch)
            if is_known and num_described in (None, known_number):
                return places
        epochs = [info for info in self._info(run_id).epochs if info.epoch == epoch]
        ranks = [rank for info in epochs for rank in info.ranks]
        places = (
            {rank.rank: rank.coords for rank in ranks},
            {rank.rank: rank.host for rank in ranks if rank.host},
        )
        with self._lock:
            self._last_places = (key, places)
        return places

    def kind_times(self, run_id: str) -> MeanKindTimes | None:
        """Return the mean times of the newest closed steps by kind; None if no step is closed."""
        store = self._store
        if store is None:
            return None
        newest = read_newest_rolled_up(store, run_id, most=MAX_STEPS)
        if not newest:
            return None
        # Steps are closed, computed again and deleted: each changes this number.
        revision = hash(tuple(tuple(row.values()) for row in newest))

        def read() -> MeanKindTimes:
            num_ranks = max(row["num_ranks"] for row in newest)
            first = newest[-max(1, MAX_ROLLUP_ROWS // (num_ranks * len(KINDS))) :][0]
            rows = read_mean_times(store, run_id, since=(first["epoch"], first["step"]))
            return make_kind_times(rows, revision=revision)

        return self._kind_times.get((run_id, revision), read)

    def history(self, run_id: str) -> RunHistory | None:
        """Return loss, epochs and goodput of the newest steps; None if no step has ended."""
        store = self._store
        if store is None:
            return None

        def read() -> RunHistory | None:
            rows = read_step_marks(store, run_id, most=MAX_STEPS)
            return summarize_history(StepMark(**row) for row in rows)

        return self._histories.get(run_id, read, max_age_ns=HISTORY_AGE_NS)

    def rank_details(self, report: RunReport, rank: int) -> RankDetails | None:
        """Return what is stored of a rank; None if it is unknown.

        No process of a lost run is running: its last record says so, and no other came.
        """
        if self._store is None:
            return None
        found = read_rank_details(self._store, report.run, rank, report.coords)
        if found and found.exit_state == RUNNING and self._run(report.run).state == LOST:
            return replace(found, exit_state=LOST)
        return found

    def rank_values(
        self, report: RunReport, quantity: RankQuantity, *, steps: tuple[int, int] | None
    ) -> RankValues | None:
        """Return a quantity of all ranks, mean of closed steps; None if there is none."""
        if self._store is None:
            return None
        return read_quantity(self._store, report, quantity=quantity, steps=steps)

    def liveness(self, run_id: str) -> RankLiveness | None:
        """Return the liveness of a live run's ranks; None if it has no heartbeats."""
        if self._store is None:
            return None
        now_ns = time.time_ns()
        with self._liveness_lock:
            until_ns, found = self._liveness.get(run_id, (0, None))
            if now_ns >= until_ns:
                found = read_liveness(self._store, run_id, now_ns=now_ns)
                took_ns = time.time_ns() - now_ns
                age_ns = max(LIVENESS_AGE_NS, LIVENESS_AGE_FACTOR * took_ns)
                self._liveness = {run_id: (now_ns + age_ns, found)}
        return found

    def silence(self, run_id: str) -> StepSilence | None:
        """Return since when a running job has ended no step; None if it goes on, or has ended.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        if self._store is None or not self._reports.has_report(run_id):
            return None
        report = self._reports.get(run_id)
        if report is None or report.step_time_s.actual is None or not report.steps:
            return None
        if self._run(run_id).state != RUNNING:
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

    def alerts(self) -> AlertList:
        """Return the alerts of all runs, the newest first, and the silences in force."""
        return AlertList() if self._alerting is None else list_alerts(self._alerting)

    def acknowledge_alert(self, name: str) -> str:
        """Note that a person takes care of an alert; return what was done, or why not."""
        return change(self._alerting, AlertChange(what="acknowledge", name=name, by="the page"))

    def silence_alert(self, name: str, *, for_s: float) -> str:
        """Silence an alert's run and cause for a time; return what was done, or why not."""
        return silence_like(self._alerting, name, for_s=for_s)

    def run_lines(self) -> tuple[RunLine, ...]:
        """Return every run with what is known of it without an analysis, the newest first."""
        if self._store is None:
            return tuple(RunLine(run=run) for run in self._source.runs())
        return tuple(map(self._complete_live, read_run_lines(self._store)))

    def _complete_live(self, line: RunLine) -> RunLine:
        """Return a running job's line with its last diagnosis, its newest loss and its silence."""
        if line.run.state != RUNNING:
            return line
        if (report := self._reports.peek(line.run.run_id)) is not None:
            mfu = None if report.mfu is None else report.mfu.mean
            top = report.top_finding
            line = replace(
                line,
                cause=top.cause,
                severity=top.severity or "",
                ranks=top.ranks[:MAX_RANKS],
                is_closed=False,
                verdict=verdict_sentence(report),
                step_s=report.step_time_s.actual,
                mfu=mfu,
            )
            if self._store is not None and report.steps:
                loss = read_last_loss(self._store, report.run, first=report.steps[0])
                line = replace(line, loss=loss)
        with suppress(UnknownRunError):  # deleted meanwhile
            return replace(line, is_silent=self.silence(line.run.run_id) is not None)
        return line

    def strip(self, run_id: str) -> RunStrip | None:
        """Return the state of a run in one line; None if there is no such run."""
        run = next((run for run in self.runs() if run.run_id == run_id), None)
        if run is None or self._store is None:
            return None
        report = self._reports.find_made(run)
        liveness = self.liveness(run_id) if run.state == RUNNING else None
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
        runs = [self._run(run_id) for run_id in (first, second)]
        asked = (first, second, first_steps, second_steps)

        def compute() -> RunComparison:
            reports = [
                self._report_of(first, first_steps),
                self._report_of(second, second_steps),
            ]
            found = compare_finished(self._source, reports[0], reports[1])
            with self._lock:
                self._comparisons[self._comparison_key(*asked)] = found
                while len(self._comparisons) > MAX_COMPARISONS:
                    self._comparisons.popitem(last=False)
            return found

        key = self._comparison_key(*asked)
        with self._lock:
            if key in self._comparisons:
                return self._comparisons[key]
        jobs = self._jobs_for(max(runs, key=lambda run: run.num_spans))
        done = jobs.result(key, compute, timeout_s=self._timeout_s)
        if done is None:
            return None
        error = done.exception()
        if isinstance(error, Exception):
            return AnalysisFailed(run=runs[0], reason=_format_failure(error), steps=None)
        found: RunComparison = done.result()
        return found

    def _comparison_key(
        self, first: str, second: str, first_steps: Steps | None, second_steps: Steps | None
    ) -> tuple[object, ...]:
        revisions = [self._reports.revision(run_id) for run_id in (first, second)]
        return ("comparison", first, second, first_steps, second_steps, *revisions)

    def _report_of(self, run_id: str, steps: Steps | None) -> RunReport:
        """Return the report of a run, or of a range of its steps.

        Raises:
            EmptyRunError: It has no step to analyse.
        """
        found = analyze_steps(self._source, run_id, steps) if steps else self._reports.get(run_id)
        if found is None:
            raise EmptyRunError(f"run {run_id!r} has no step to analyse")
        return found

    def startup(self, run_id: str) -> Startup | None:
        """Return the start-up of a run's newest epoch; None if no span is outside the steps.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        self._run(run_id)
        return None if self._store is None else read_startup(self._store, run_id)

    def step_trace(
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        ranks: tuple[int, ...],
        window_ns: tuple[int, int] | None = None,
    ) -> str:
        """Return the spans of a step, or of some of its ranks or time, as a file for Perfetto.

        Raises:
            UnknownRunError: The store holds no run of this name.
            EmptyRunError: There are no such spans, or too many.
        """
        self._run(run_id)
        if self._store is None:
            raise EmptyRunError("no spans are stored")
        return write_step_trace(
            self._store, run_id, epoch=epoch, step=step, ranks=ranks, window_ns=window_ns
        )

    def health(self) -> Health | None:
        """Return the state of the server; None if it is unknown."""
        return None if self._health is None else self._health.read()

    def revision(self, run_id: str) -> int:
        """Return a number that changes whenever the run has a new diagnosis."""
        return self._reports.revision(run_id)


def _format_failure(error: Exception) -> str:
    """Return an error in one line; for a defect of rankscope, with its type."""
    line = format_error(error)
    return line if find_exit_code(error) is not None else f"{type(error).__name__}: {line}"


def read_liveness(store: Store, run_id: str, *, now_ns: int) -> RankLiveness | None:
    """Return the liveness of a run's ranks; None if the store has no heartbeats of them.

    ``now_ns`` is the Unix time of the collector's clock.
    """
    rows = read_oldest_heartbeats(
        store,
        run_id,
        recent_ns=now_ns - RECENT_NS,
        silent_ns=now_ns - SILENT_NS,
        most=MAX_SHOWN,
    )
    if not rows:
        return None
    return RankLiveness(
        num_ranks=rows[0]["num_ranks"],
        num_recent=rows[0]["num_recent"],
        num_silent=rows[0]["num_silent"],
        silent=tuple(
            SilentRank(
                rank=row["rank"],
                host=row["host"],
                state=row["state"],
                step=row["step"] if row["step"] >= 0 else None,
                age_ns=now_ns - row["newest_ns"],
            )
            for row in rows
            if row["newest_ns"] < now_ns - SILENT_NS
        ),
    )


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
