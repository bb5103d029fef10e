"""Builders of span tables, reports and providers, for tests of the dashboard."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rankscope.analysis.drawing.timeline import (
    StepTimeline,
    ViewportSpans,
    read_timeline,
    select_ranks,
)
from rankscope.analysis.report.report import (
    Finding,
    Mfu,
    Quality,
    RankStepExcess,
    RunReport,
    Starved,
    StepTimes,
    WaitsOn,
)
from rankscope.analysis.trace.account import RecordAccount
from rankscope.analysis.trace.context import RunContext
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.analysis.trace.rows import make_span_table
from rankscope.analysis.trace.tables import (
    GroupInfo,
    RankInfo,
    RunInfo,
    RunSummary,
    SpanTable,
    StepTable,
)
from rankscope.dashboard.records.alert_list import AlertList
from rankscope.dashboard.records.page_results import RunAnnotations, RunLine, RunStrip
from rankscope.dashboard.records.progress import MeanKindTimes
from rankscope.tracer.span import KIND_CODES, Span, SpanKind, UnixNs
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.tables import one_epoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from rankscope.analysis.breakdown.run_history import RunHistory
    from rankscope.analysis.drawing.raster import StepPicture, Viewport
    from rankscope.analysis.drawing.rows import RowOrder
    from rankscope.analysis.drawing.selection import AlikeSpan
    from rankscope.analysis.drawing.step_replay import StepReplay
    from rankscope.analysis.goodput import Goodput
    from rankscope.analysis.report.liveness import RankLiveness, StepSilence
    from rankscope.analysis.what_if import RunPlay
    from rankscope.dashboard.records.incident import Incident, IncidentView
    from rankscope.dashboard.records.page_results import Health, RunComparison, Startup
    from rankscope.dashboard.records.progress import (
        AnalysisFailed,
        AnalysisInProgress,
    )
    from rankscope.dashboard.records.rank_details import RankDetails, RankQuantity, RankValues


def step_span(  # a span
    rank: int, kind: SpanKind, name: str, start_ns: int, end_ns: int, *, track: str = "main",
    **more: Any,  # noqa: ANN401  # of its other fields
) -> Span:  # fmt: skip
    """Return a span of step 3."""
    return Span(
        rank=rank, step=3, kind=kind, name=name, start_ns=UnixNs(start_ns),
        duration_ns=end_ns - start_ns, track=track, **more,
    )  # fmt: skip


def span_table(spans: Sequence[Span], *, epoch: int = 0, depths: Sequence[int] = ()) -> SpanTable:
    """Return spans as columns, in the order given."""
    names = tuple(sorted({span.name for span in spans}))
    tracks = tuple(sorted({span.track for span in spans}))
    name_codes = {name: code for code, name in enumerate(names)}
    track_codes = {track: code for code, track in enumerate(tracks)}
    num = len(spans)
    return make_span_table(
        epoch=np.full(num, epoch, dtype=np.int32),
        step=np.array([span.step for span in spans], dtype=np.int32),
        rank=np.array([span.rank for span in spans], dtype=np.int32),
        kind=np.array([KIND_CODES[span.kind] for span in spans], dtype=np.int8),
        name=np.array([name_codes[span.name] for span in spans], dtype=np.int32),
        track=np.array([track_codes[span.track] for span in spans], dtype=np.int32),
        start_ns=np.array([span.start_ns for span in spans], dtype=np.int64),
        duration_ns=np.array([span.duration_ns for span in spans], dtype=np.int64),
        group_id=np.array([span.group_id for span in spans], dtype=np.uint64),
        seq=np.array([span.seq for span in spans], dtype=np.int64),
        src_rank=np.array([span.src_rank for span in spans], dtype=np.int32),
        dst_rank=np.array([span.dst_rank for span in spans], dtype=np.int32),
        microbatch=np.array([span.microbatch for span in spans], dtype=np.int32),
        chunk=np.array([span.chunk for span in spans], dtype=np.int32),
        num_bytes=np.array([span.num_bytes for span in spans], dtype=np.int64),
        flags=np.array([int(span.flags) for span in spans], dtype=np.uint16),
        depth=np.array(depths or [0] * num, dtype=np.int16),
        names=names,
        tracks=tracks,
    )


@dataclass
class FakeProvider:
    """A provider of fixed results, and a source of fixed spans; a test may change both."""

    reports: dict[str, RunReport | None] = field(default_factory=dict)
    tables: dict[str, SpanTable] = field(default_factory=dict)
    groups: dict[str, tuple[GroupInfo, ...]] = field(default_factory=dict)
    sentence: str = "Rank 5 computes 1.80x slower than its peers; ranks 1, 4 and 7 wait for it."
    state: str = "ended"
    live: RankLiveness | None = None
    silent: StepSilence | None = None
    times: MeanKindTimes | None = None
    alert_list: AlertList = field(default_factory=AlertList)
    annotated: dict[str, RunAnnotations] = field(default_factory=dict)
    changed: list[tuple[str, str, str, bool]] = field(default_factory=list)
    """Changes of annotations: run, kind, text and whether it was removed."""

    past: RunHistory | None = None
    spent: Goodput | None = None
    details: dict[int, RankDetails] = field(default_factory=dict)
    values: dict[RankQuantity, RankValues] = field(default_factory=dict)
    unfinished: dict[str, AnalysisInProgress | AnalysisFailed] = field(default_factory=dict)
    """Runs whose diagnosis is not finished."""

    compared: RunComparison | AnalysisFailed | None = None
    started: Startup | None = None
    state_of_server: Health | None = None
    replays: dict[int, StepReplay] = field(default_factory=dict)
    run_play: RunPlay | None = None
    alike: tuple[AlikeSpan, ...] = ()
    """Spans of other steps like any selected one."""

    is_drawing: bool = False
    """Whether each step is still being read."""

    excluded: tuple[str, ...] = ()
    num_changes: int = 0
    num_reports: int = 0
    incident_views: dict[int, IncidentView] = field(default_factory=dict)
    notes: list[tuple[str, int, str, str]] = field(default_factory=list)
    """Run, incident, text and author of the notes that a page added."""

    def excluded_hosts(self, report: RunReport) -> tuple[str, ...]:
        return self.excluded

    def runs(self, *, max_age_ns: int = 0) -> tuple[RunSummary, ...]:
        return tuple(
            RunSummary(
                run_id=run_id,
                source_format="rankscope",
                state=self.state,
                world_size=report.world_size if report else 1,
                layout=report.layout if report else Layout(),
                num_spans=report.num_spans if report else 0,
                num_steps=len(report.steps) if report else 0,
                started_ns=None,
            )
            for run_id, report in self.reports.items()
        )

    def report(self, run_id: str) -> RunReport | AnalysisInProgress | AnalysisFailed | None:
        self._check(run_id)
        self.num_reports += 1
        if run_id in self.unfinished:
            return self.unfinished[run_id]
        return self.reports[run_id]

    def verdict(self, report: RunReport) -> str:
        return self.sentence

    def kind_times(self, run_id: str) -> MeanKindTimes | None:
        return self.times

    def history(self, run_id: str) -> RunHistory | None:
        return self.past

    def goodput(self, run_id: str) -> Goodput | None:
        return self.spent

    def rank_details(self, report: RunReport, rank: int) -> RankDetails | None:
        return self.details.get(rank)

    def rank_values(
        self, report: RunReport, quantity: RankQuantity, *, steps: tuple[int, int] | None
    ) -> RankValues | None:
        return self.values.get(quantity)

    def liveness(self, run_id: str) -> RankLiveness | None:
        return self.live

    def alerts(self) -> AlertList:
        return self.alert_list

    def acknowledge_alert(self, name: str) -> str:
        return f"acknowledged {name}"

    def silence_alert(self, name: str, *, for_s: float) -> str:
        return f"silenced {name} for {for_s:.0f} s"

    def incident(self, run_id: str, number: int) -> IncidentView | None:
        self._check(run_id)
        return self.incident_views.get(number)

    def incidents(self, run_id: str) -> tuple[Incident, ...]:
        self._check(run_id)
        return tuple(view.incident for view in self.incident_views.values())

    def incident_numbers(self, report: RunReport) -> tuple[int | None, ...]:
        return tuple(
            place if place in self.incident_views else None for place in range(len(report.findings))
        )

    def add_note(self, run_id: str, number: int, text: str, *, by: str) -> str:
        self.notes.append((run_id, number, text, by))
        return ""

    def annotations(self, run_id: str) -> RunAnnotations:
        self._check(run_id)
        return self.annotated.get(run_id, RunAnnotations())

    def annotate(
        self, run_id: str, kind: Literal["tag", "note"], text: str, *, is_removed: bool = False
    ) -> str:
        self.changed.append((run_id, kind, text, is_removed))
        return f"{'removed' if is_removed else 'added'} {kind} {text}: {run_id}"

    def request_of_rank(self, run_id: str, rank: int, level: str, *, steps: int) -> str:
        return f"{steps} steps of {level} requested of rank {rank} of {run_id}"

    def silence(self, run_id: str) -> StepSilence | None:
        self._check(run_id)
        return self.silent

    def run_lines(self) -> tuple[RunLine, ...]:
        return tuple(
            RunLine(
                run=run,
                cause=report.top_finding.cause if report else "",
                severity="critical" if report else "",
                ranks=report.top_finding.ranks if report else (),
                verdict=self.sentence if report else "",
                mfu=report.mfu.mean if report and report.mfu else None,
                is_silent=self.silent is not None,
                tags=self.annotations(run.run_id).tags,
            )
            for run, report in zip(self.runs(), self.reports.values(), strict=True)
        )

    def strip(self, run_id: str) -> RunStrip | None:
        found = [run for run in self.runs() if run.run_id == run_id]
        if not found:
            return None
        return RunStrip(
            run=found[0],
            report=self.reports[run_id],
            age_ns=None,
            is_silent=self.silent is not None,
            num_recent=None if self.live is None else self.live.num_recent,
        )

    def comparison(
        self,
        first: str,
        second: str,
        *,
        first_steps: tuple[int, int] | None = None,
        second_steps: tuple[int, int] | None = None,
    ) -> RunComparison | AnalysisFailed | None:
        self._check(first)
        self._check(second)
        return self.compared

    def startup(self, run_id: str) -> Startup | None:
        self._check(run_id)
        return self.started

    def step_trace(
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        ranks: tuple[int, ...],
        window_ns: tuple[int, int] | None = None,
    ) -> str:
        self._check(run_id)
        return json.dumps({"traceEvents": [epoch, step, *ranks, *(window_ns or ())]})

    def health(self) -> Health | None:
        return self.state_of_server

    def revision(self, run_id: str) -> int:
        self._check(run_id)
        return self.num_changes

    def timeline(self, run_id: str, *, epoch: int, step: int) -> StepTimeline | None:
        if self.is_drawing:
            return None
        return read_timeline(self, run_id, epoch=epoch, step=step)

    def alike_spans(self, run_id: str, **_alike: object) -> tuple[AlikeSpan, ...]:
        self._check(run_id)
        return self.alike

    def picture(
        self,
        run_id: str,
        *,
        epoch: int,
        step: int,
        order: RowOrder,
        viewport: Viewport | None = None,
    ) -> StepPicture | None:
        self._check(run_id)
        return None

    def viewport_spans(self, picture: StepPicture) -> ViewportSpans:
        raise NotImplementedError("no picture has a viewport here")

    def rank_spans(self, picture: StepPicture, ranks: Sequence[int]) -> StepTimeline | None:
        raise NotImplementedError("there is no picture here")

    def ranks_of_step(
        self, run_id: str, *, epoch: int, step: int, ranks: Sequence[int]
    ) -> ViewportSpans:
        whole = self.timeline(run_id, epoch=epoch, step=step)
        return ViewportSpans(found=None if whole is None else select_ranks(whole, ranks))

    def step_replay(self, recorded: StepTimeline | StepPicture) -> StepReplay | None:
        return self.replays.get(recorded.step)

    def play(self, run_id: str) -> RunPlay | None:
        return self.run_play

    def picture_revision(self, run_id: str, *, epoch: int, step: int) -> int:
        self._check(run_id)
        return 0

    def run_info(self, run_id: str) -> RunInfo:
        self._check(run_id)
        report = self.reports[run_id]
        layout = report.layout if report else Layout()
        coords = report.coords.items() if report else ()
        ranks = [RankInfo(rank=rank, coords=at) for rank, at in coords]
        size = report.world_size if report else 1
        return one_epoch(run_id, layout, ranks, self.groups.get(run_id, ()), world_size=size)

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        self._check(run_id)
        return self.tables.get(run_id) or span_table([])

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        raise NotImplementedError("the timeline reads no step rows")

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        return RunContext()

    def _check(self, run_id: str) -> None:
        if run_id not in self.reports:
            raise UnknownRunError(run_id, tuple(self.reports))


def grid_coords(layout: Layout) -> dict[int, Coords]:
    """Number the ranks with tp fastest, then dp, then pp."""
    return {
        (pp * layout.dp + dp) * layout.tp + tp: Coords(dp=dp, pp=pp, tp=tp)
        for pp in range(layout.pp)
        for dp in range(layout.dp)
        for tp in range(layout.tp)
    }


def report(
    *,
    run: str = "demo-42",
    layout: Layout | None = None,
    num_steps: int = 30,
    slow_rank: int | None = 5,
    factor: float = 1.8,
    onset: int = 10,
    mfu: bool = True,
    warnings: tuple[str, ...] = (),
    name: str = "",
) -> RunReport:
    """Return the report of a run in which ``slow_rank`` computes slowly from ``onset`` on."""
    layout = layout or Layout(pp=2, dp=2, tp=2)
    coords = grid_coords(layout)
    steps = tuple(range(num_steps))
    noise = np.random.default_rng(7)
    slow = {step: slow_rank is not None and step >= onset for step in steps}
    ideal = {step: 0.412 + 0.004 * float(noise.standard_normal()) for step in steps}
    actual = {
        step: ideal[step] * (1.02 + (0.62 * (factor - 1) if slow[step] else 0))
        + 0.003 * abs(float(noise.standard_normal()))
        for step in steps
    }
    excess = 1.1e6 * noise.standard_normal((len(coords), num_steps))
    if slow_rank is not None:
        excess[sorted(coords).index(slow_rank), onset:] += 2.4e8 * (factor - 1)
    mean = sum(actual.values()) / num_steps if num_steps else 0.0
    mean_ideal = sum(ideal.values()) / num_steps if num_steps else 0.0
    at_fault = coords[slow_rank] if slow_rank is not None else None
    workers = {
        (dp, pp): 1.0 + 0.01 * ((dp + pp) % 2) for dp in range(layout.dp) for pp in range(layout.pp)
    }
    if at_fault is not None:
        workers[at_fault.dp, at_fault.pp] = 1.38
    return RunReport(
        run=run,
        source_format="rankscope",
        epochs=(0,),
        world_size=layout.world_size,
        layout=layout,
        coords=coords,
        steps=steps,
        num_spans=1_240 * len(coords),
        step_time_s=StepTimes(actual=mean, replayed=0.99 * mean, ideal=mean_ideal),
        launch_slowdown=1.01,
        replay_error_ratio=0.004,
        slowdown=mean / mean_ideal if num_steps else None,
        waste_ratio=1 - mean_ideal / mean if num_steps else None,
        slowdown_by_kind={"forward": 1.1, "backward": 1.2},
        slowdown_by_dp=dict.fromkeys(range(layout.dp), 1.0),
        slowdown_by_stage=dict.fromkeys(range(layout.pp), 1.0),
        slowdown_by_worker=dict(workers),
        exact_slowdown_by_worker=dict(workers),
        slowdown_by_step={step: actual[step] / ideal[step] for step in steps},
        actual_s_by_step=actual,
        ideal_s_by_step=ideal,
        m_w=0.98,
        m_s=0.02,
        findings=_findings(slow_rank, factor, onset, num_steps, name, mean - mean_ideal),
        starved=_starved(slow_rank, coords),
        mfu=Mfu(
            convention="6 N per token, attention not halved, over 989 TFLOP/s a rank (bf16)",
            mean=0.38,
            by_step={step: 0.52 * ideal[step] / actual[step] for step in steps},
        )
        if mfu
        else None,
        quality=Quality(
            account=RecordAccount(produced=3_840, stored=3_840, buffered=0),
            account_by_rank={},
            clock_error_ns=1_800,
            coverage_ratio=1.0,
            warnings=warnings,
        ),
        excess=RankStepExcess(ranks=tuple(sorted(coords)), steps=steps, excess_ns=excess),
        missing_mfu="" if mfu else "peak of A100 at bfloat16 unknown: set RANKSCOPE_PEAK_FLOPS",
        paced=True,
        startup_s_by_step={0: 0.3} if num_steps else {},
    )


def mean_kind_times() -> MeanKindTimes:
    """Return the times of three steps: a forward, an all-reduce, and the wait inside it."""
    comm = SpanKind.DP_COMM
    return MeanKindTimes(
        revision=1,
        busy_s={
            comm: {3: 0.05, 4: 0.03, 5: 0.03},
            SpanKind.WAIT: {3: 0.02, 4: 0.01, 5: 0.01},
            SpanKind.FORWARD: {3: 0.24, 4: 0.25, 5: 0.245},
        },
        exposed_s={comm: {3: 0.03, 4: 0.01, 5: 0.012}},
        wait_s={comm: {3: 0.02, 5: 0.005}},
    )


def _findings(
    slow_rank: int | None, factor: float, onset: int, num_steps: int, name: str, lost_s: float
) -> tuple[Finding, ...]:
    if slow_rank is None:
        return (
            Finding(
                cause="healthy",
                ranks=(),
                steps=(0, num_steps - 1),
                slowdown=1.01,
                recoverable_ratio=None,
                confidence=0.95,
                evidence="No rank's compute is more than 1.2 % above its 7 peers in 29 steps.",
            ),
        )
    return (
        Finding(
            cause="slow-compute",
            ranks=(slow_rank,),
            steps=(onset, num_steps - 1),
            slowdown=1.38,
            recoverable_ratio=0.94,
            saved_s=0.94 * lost_s,
            confidence=0.98,
            evidence=name
            or f"Its forward takes 43.2 ms where its 3 peers take 24.0 ms ({factor:.2f}x, 61 robust"
            f" deviations) in {num_steps - onset} of {num_steps - onset} steps; it waits 2 % of"
            " each step while its TP partner waits 31 %.",
        ),
        Finding(
            cause="stage-imbalance",
            ranks=(4, 5, 6, 7),
            steps=(0, num_steps - 1),
            slowdown=1.03,
            recoverable_ratio=0.04,
            saved_s=0.04 * lost_s,
            confidence=0.41,
            evidence="Stage 1 computes 3.1 % longer than stage 0 (output layer).",
        ),
    )


def _starved(slow_rank: int | None, coords: dict[int, Coords]) -> tuple[Starved, ...]:
    if slow_rank is None:
        return ()
    waiting = [rank for rank in coords if rank != slow_rank][:12]
    return tuple(
        Starved(
            rank=rank,
            wait_ratio=0.34 - 0.02 * place,
            waits_on=(
                WaitsOn(rank=slow_rank, ratio=0.31 - 0.02 * place),
                WaitsOn(rank=waiting[0], ratio=0.02),
            ),
        )
        for place, rank in enumerate(waiting)
    )


def traces(figure: go.Figure) -> list[Any]:
    """Return the figure's traces, untyped: plotly's stubs lack the properties of each kind."""
    return list(figure.data)
