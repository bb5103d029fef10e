"""Gives the dashboard what it draws, from the diagnoses of one store."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from rankscope.analysis.breakdown.mfu import compute_mfu
from rankscope.analysis.drawing.raster import redraw_window
from rankscope.analysis.drawing.tiles import MAX_REDRAWN_SPANS, needs_spans
from rankscope.analysis.drawing.timeline import read_timeline, records_groups
from rankscope.analysis.report.liveness import (
    MAX_SHOWN,
    RECENT_NS,
    SILENT_NS,
    RankLiveness,
    SilentRank,
)
from rankscope.analysis.report.progress import (
    Activity,
    AnalysisFailed,
    AnalysisInProgress,
    MarkedSteps,
    Progress,
)
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.heartbeats import read_oldest_heartbeats
from rankscope.collector.read.pictures import StepId, read_kept_picture
from rankscope.collector.read.spans import SpanSelection, count_selected_spans
from rankscope.collector.read.steps import read_step_times
from rankscope.tracer.span import NS_PER_S

from ..errors import exit_code_of, plain_line
from .background_jobs import Aside
from .finding_tracker import tracked_finding
from .pictures import LargeSteps, read_part, read_picture

if TYPE_CHECKING:
    from rankscope.analysis.drawing.raster import StepPicture, Window
    from rankscope.analysis.drawing.rows import GroupBy
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.trace.tables import RunSummary, SpanSource
    from rankscope.collector.store.store import Store
    from rankscope.tracer.topology import Coords

    from .reports import Reports

MAX_TIMELINES = 8
"""Steps kept drawn up; a page asks for the same one at each zoom."""

HEARD_FOR_NS = 2_000_000_000

SMALL_SPANS = 500_000
"""Of a run whose analysis takes seconds."""

LARGE_STEP_SPANS = 5_000_000
"""Of a step that is read in portions to be drawn: it takes 250 bytes a span as a whole."""

PATIENCE_S = 0.4
"""How long a page waits for what is made aside before it is shown without: the analysis of a small
run, and the drawing of its steps, are done by then."""


class StoreProvider:
    """`dashboard.provider.ReportProvider` over one store.

    Args:
        source: The runs.
        reports: Their diagnoses.
        store: Where pictures of closed steps are kept; None: each is drawn from its spans.
        patience_s: How long a page waits for what takes long.
    """

    def __init__(
        self,
        source: SpanSource,
        reports: Reports,
        *,
        store: Store | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        self._large_aside, self._small_aside = Aside(), Aside()
        self._looks_aside = Aside()
        self._large_steps = None if store is None else LargeSteps(store, source, self._large_aside)
        self._seen: dict[str, MarkedSteps] = {}
        self._store = store
        self._source = source
        self._reports = reports
        self._lock = threading.Lock()
        self._heard_lock = threading.Lock()
        self._heard: dict[str, tuple[int, RankLiveness | None]] = {}
        self._timelines: OrderedDict[tuple[str, int, int, int], StepTimeline] = OrderedDict()
        self._last_coords: tuple[tuple[str, int, int], dict[int, Coords]] = (("", 0, 0), {})

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        return self._source.runs()

    def report(self, run_id: str) -> RunReport | AnalysisInProgress | AnalysisFailed | None:
        """Return the diagnosis; None while the run is known and has no step to analyse yet.

        The first one is made aside; until it is there, and where it can't be made, what is known
        without it.

        Raises:
            UnknownRunError: The store holds no run of that name.
        """
        if self._reports.is_made(run_id):
            self._seen.pop(run_id, None)
            return self._reports.get(run_id)
        run = self._summary(run_id)
        self._look_aside(run_id)
        key = ("report", run_id)
        aside = self._aside_of(run)
        done = aside.ask(key, lambda: self._reports.get(run_id), patience_s=self._patience_s)
        if done is None:
            return self._under_way(run, key)
        error = done.exception()
        if isinstance(error, UnknownRunError):
            raise error
        if isinstance(error, Exception):
            return AnalysisFailed(run=run, reason=_why(error), steps=self._seen.get(run_id))
        made: RunReport | None = done.result()
        return made

    def _aside_of(self, run: RunSummary) -> Aside:
        """Return where the run is analysed: a small one never waits for two large ones."""
        return self._small_aside if run.num_spans <= SMALL_SPANS else self._large_aside

    def _under_way(self, run: RunSummary, key: tuple[str, str]) -> AnalysisInProgress:
        aside = self._aside_of(run)
        begun = Activity.READING if aside.has_begun(key) else Activity.WAITING
        return AnalysisInProgress(
            run=run,
            progress=self._reports.progress(run.run_id) or Progress(activity=begun),
            elapsed_s=aside.age_ns(key) / NS_PER_S,
            steps=self._seen.get(run.run_id),
            earlier_findings=() if self._store is None else read_told(self._store, run.run_id),
        )

    def _look_aside(self, run_id: str) -> None:
        """Have the steps' times read while the analysis is made, once."""
        store = self._store
        if store is None or run_id in self._seen:
            return

        def look() -> None:
            self._seen[run_id] = read_seen(store, self._source, run_id)

        self._looks_aside.ask(("seen", run_id), look, patience_s=0)

    def _summary(self, run_id: str) -> RunSummary:
        found = self._source.runs()
        for run in found:
            if run.run_id == run_id:
                return run
        self._source.run_info(run_id)  # knows whether it was deleted
        raise UnknownRunError(run_id, tuple(run.run_id for run in found))

    def verdict(self, report: RunReport) -> str:
        """Return the diagnosis in one sentence."""
        return verdict_sentence(report)

    def timeline(self, run_id: str, *, epoch: int, step: int) -> StepTimeline | None:
        """Return one step; None while it is being drawn.

        Raises:
            UnknownRunError: The store holds no run of that name.
            EmptyRunError: The step holds no spans.
        """
        if self._large_steps is not None and self._has_large_steps(run_id):
            return None  # `picture` draws it
        key = (run_id, self._reports.revision(run_id), epoch, step)
        with self._lock:
            if key in self._timelines:
                self._timelines.move_to_end(key)
                return self._timelines[key]
        # With the analyses: a large step weighs as much as one.
        done = self._aside_of(self._summary(run_id)).ask(
            key,
            lambda: self._drawn(key, run_id, epoch=epoch, step=step),
            patience_s=self._patience_s,
        )
        drawn: StepTimeline | None = None if done is None else done.result()
        return drawn

    def _drawn(
        self, key: tuple[str, int, int, int], run_id: str, *, epoch: int, step: int
    ) -> StepTimeline:
        drawn = read_timeline(self._source, run_id, epoch=epoch, step=step)
        with self._lock:
            self._timelines[key] = drawn
            while len(self._timelines) > MAX_TIMELINES:
                self._timelines.popitem(last=False)
        return drawn

    def picture(
        self, run_id: str, *, epoch: int, step: int, group_by: GroupBy, window: Window | None = None
    ) -> StepPicture | None:
        """Return one step's pixels where these are kept; None: draw them from `timeline`.

        A window for which no fine enough level is kept is drawn from its spans, where these are
        few enough and still there. A large step whose pixels are not kept yet is drawn aside, as a
        whole whatever the window.

        Raises:
            UnknownRunError: The store holds no run of that name.
            EmptyRunError: The step is large, and holds no spans.
        """
        if self._store is None or self._large_steps is None:
            return None
        place = StepId(run_id=run_id, epoch=epoch, step=step)
        kept = read_picture(
            self._store,
            place,
            group_by=group_by,
            read_coords=lambda num_described: self._coords(run_id, epoch, num_described),
            window=window,
        )
        if kept is not None:
            return self._sharpened(kept)
        if not self._has_large_steps(run_id):
            return None
        return self._large_steps.ask(place, group_by=group_by, patience_s=self._patience_s)

    def _has_large_steps(self, run_id: str) -> bool:
        run = self._summary(run_id)
        return records_groups(run) and run.num_spans > LARGE_STEP_SPANS * max(run.num_steps, 1)

    def _sharpened(self, kept: StepPicture) -> StepPicture:
        if not needs_spans(kept):
            return kept
        part = self.window_spans(kept, max_spans=MAX_REDRAWN_SPANS)
        return kept if part is None else redraw_window(kept, part)

    def window_spans(self, picture: StepPicture, *, max_spans: int) -> StepTimeline | None:
        """Return the spans of a picture's window; None if there are none or too many.

        Raises:
            UnknownRunError: The store holds no run of that name.
        """
        if self._store is None or picture.window is None:
            return None
        portion = SpanSelection(
            run_id=picture.run,
            epoch=picture.epoch,
            step=picture.step,
            ranks=picture.ranks,
            after_ns=picture.begin_ns + picture.window.begin_ns,
            before_ns=picture.begin_ns + picture.window.end_ns,
        )
        info = self._source.run_info(picture.run)
        if (
            not records_groups(info)
            or not 0 < count_selected_spans(self._store, portion) <= max_spans
        ):
            return None
        bounds_ns = (picture.begin_ns, picture.end_ns)
        return read_part(self._store, info, portion, bounds_ns=bounds_ns)

    def picture_revision(self, run_id: str, *, epoch: int, step: int) -> int:
        """Return a number that changes whenever the kept picture of a step does."""
        if self._store is None:
            return 0
        kept = read_kept_picture(self._store, StepId(run_id=run_id, epoch=epoch, step=step))
        return 0 if kept is None else kept.revision

    def _coords(self, run_id: str, epoch: int, num_described: int) -> dict[int, Coords]:
        """Return where the ranks stand; kept for the run that was asked for last.

        Spans come all the time while a run trains, descriptions at its start: reading those of
        12,288 ranks takes longer than the picture.
        """
        key = (run_id, num_described, epoch)
        with self._lock:
            if self._last_coords[0] == key:
                return self._last_coords[1]
        incarnation = [
            found for found in self._source.run_info(run_id).epochs if found.epoch == epoch
        ]
        coords = {rank.rank: rank.coords for found in incarnation for rank in found.ranks}
        with self._lock:
            self._last_coords = (key, coords)
        return coords

    def liveness(self, run_id: str) -> RankLiveness | None:
        """Return how many ranks of a live run are heard of; None where nobody tells of any.

        Viewers of one run share an answer for `HEARD_FOR_NS`, and for ten times as long as it took.
        """
        if self._store is None:
            return None
        now_ns = time.time_ns()
        with self._heard_lock:
            until_ns, found = self._heard.get(run_id, (0, None))
            if now_ns >= until_ns:
                found = read_heard(self._store, run_id, now_ns=now_ns)
                took_ns = time.time_ns() - now_ns
                self._heard = {run_id: (now_ns + max(HEARD_FOR_NS, 10 * took_ns), found)}
        return found

    def revision(self, run_id: str) -> int:
        """Return a number that changes whenever new data of the run came."""
        return self._reports.revision(run_id)


def _why(error: Exception) -> str:
    """Return a failure in one line; a defect is named by its kind too."""
    line = plain_line(error)
    return line if exit_code_of(error) is not None else f"{type(error).__name__}: {line}"


def read_heard(store: Store, run_id: str, *, now_ns: int) -> RankLiveness | None:
    """Return how many ranks of a run are heard of; None where nobody tells of any.

    Args:
        store: The store.
        run_id: The run.
        now_ns: Unix time by the collector's clock.
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


MAX_STEPS = 2_000


MAX_MFU_ROWS = 250_000
"""Rows of steps, one a rank, that are read for the MFU: the newest 20 steps of 12,288 ranks."""


def read_seen(store: Store, source: SpanSource, run_id: str) -> MarkedSteps:
    """Return what the newest `MAX_STEPS` steps of a run tell of themselves.

    Raises:
        UnknownRunError: The store holds no run of that name.
    """
    rows = read_step_times(store, run_id, most=MAX_STEPS)
    seconds = {row["step"]: (row["last_ns"] - row["first_ns"]) / NS_PER_S for row in rows}
    steps = sorted(seconds)
    mfu = None
    if steps:
        num_ranks = max(row["num_ranks"] for row in rows)
        first = steps[-max(1, MAX_MFU_ROWS // num_ranks) :][0]
        mfu = compute_mfu(source.run_info(run_id), source.steps(run_id, first=first))
    return MarkedSteps(
        epochs=tuple(sorted({row["epoch"] for row in rows})),
        actual_s_by_step={step: seconds[step] for step in steps},
        mfu=mfu,
    )


def read_told(store: Store, run_id: str) -> tuple[Finding, ...]:
    """Return the findings of a run that stood when it was last analysed."""
    return tuple(
        tracked_finding(stored).finding
        for stored in read_findings(store, run_id)
        if stored.closed_ns is None
    )
