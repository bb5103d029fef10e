"""The overview page: the verdict on one run, and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import plotly.graph_objects as go
from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.exceptions import PreventUpdate
from pydantic import Field

from rankscope.analysis.report.report import RunReport
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.dashboard.records.progress import AnalysisInProgress

from ..address import MAX_DIGITS, OVERVIEW, TIMELINE, View, write_address
from ..callback_checks import Post, Ticks, takes
from ..exports import FINDINGS_PATH, REPORT_PATH
from ..figures.excess import (
    excess_figure,
    excess_note,
    excess_title,
    ranks_of_row,
    shown_excess,
)
from ..figures.step_time import kind_times_figure, marked_steps_figure, step_time_figure
from ..figures.workers import worker_figure, worker_title
from ..theme import blank_figure
from .components import (
    FALLBACK_TIMER,
    LIVE_MS,
    LOST,
    RUNNING,
    SOON_MS,
    announced,
    card,
    graph,
    graph_style,
    next_tick,
    poll_interval_ms,
    poll_timer,
    register_graph,
    with_code,
)
from .overview_cards import (
    early_figures,
    findings_table,
    key_figures,
    liveness_card,
    quality_list,
    starved_list,
    steps_note,
    verdict_card,
)
from .placeholders import (
    AFTER_ANALYSIS,
    NEEDS_ANALYSIS,
    missing_run,
    no_runs,
    no_steps,
    no_verdict,
    no_verdict_yet,
)
from .shell import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.report.liveness import RankLiveness, StepSilence
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.dashboard.records.progress import AnalysisFailed, MeanKindTimes

    from ..provider import ReportProvider


class Shown(Post):
    """The shown state, which the page keeps in the browser."""

    run: str | None
    revision: int | None
    is_silent: bool
    open_step: Annotated[int, Field(ge=0, lt=10**MAX_DIGITS)] | None = None


class RefreshPost(Post):
    """The values that `refresh` and `refresh_liveness` take."""

    num_ticks: Ticks
    fallback_ticks: Ticks
    shown: Shown


class LivePost(Post):
    """The values that `refresh_live_parts` takes."""

    num_ticks: Ticks
    fallback_ticks: Ticks
    shown: Shown
    kinds_revision: str | None


class Cell(Post, extra="ignore"):
    """A cell of the excess figure: x is one step, or the first and last of several, y its row."""

    x: (
        Annotated[str, Field(pattern=f"^[0-9]{{1,{MAX_DIGITS}}}(-[0-9]+)?$")]
        | Annotated[int, Field(ge=0, lt=10**MAX_DIGITS)]
    )
    y: Annotated[str, Field(max_length=100)] | Annotated[int, Field(ge=0, lt=10**MAX_DIGITS)]


class Click(Post, extra="ignore"):
    """A click on the excess figure; without points if nothing was clicked yet."""

    points: Annotated[list[Cell], Field(min_length=1)] | None = None


class ClickPost(Post):
    """The values that `open_step` takes."""

    click: Click | None
    shown: Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """The parts of the page, which are the outputs of every refresh."""

    run: str | None
    revision: int | None
    is_silent: bool = False
    open_step: int | None = None
    """As in `RunReport`."""

    problem: list[Component] = field(default_factory=list)
    """A card that says why there is no report; it hides the rest."""

    verdict: list[Component] = field(default_factory=list)
    key_figures: list[Component] = field(default_factory=list)
    steps: go.Figure = field(default_factory=go.Figure)
    steps_note: list[Component | str] = field(default_factory=list)
    workers: go.Figure = field(default_factory=go.Figure)
    workers_title: tuple[str, str] = ("Slowdown by worker", "")
    excess: go.Figure = field(default_factory=go.Figure)
    excess_title: str = "Excess by rank and step"
    excess_about: str = ""
    excess_note: str = ""
    starved: list[Component] = field(default_factory=list)
    findings: list[Component] = field(default_factory=list)
    quality: list[Component] = field(default_factory=list)
    interval_ms: int = LIVE_MS
    """Pause before the page asks again."""

    def shown(self) -> Shown:
        """Return what the page keeps in the browser."""
        return Shown(
            run=self.run,
            revision=self.revision,
            is_silent=self.is_silent,
            open_step=self.open_step,
        )

    def outputs(self, num_ticks: int | None = 0) -> tuple[Any, ...]:
        """Return the parts in the order of `_OUTPUTS`, after so many ticks of their timer."""
        return (
            self.shown().model_dump(),
            self.problem,
            "hidden" if self.problem else "",
            self.verdict,
            self.key_figures,
            self.steps,
            self.steps_note,
            self.workers,
            *self.workers_title,
            self.excess,
            graph_style(self.excess),
            self.excess_title,
            self.excess_about,
            self.excess_note,
            self.starved,
            self.findings,
            self.quality,
            self.interval_ms,
            next_tick(num_ticks),
        )


_OUTPUTS = (
    Output("overview-shown", "data"),
    Output("overview-problem", "children"),
    Output("overview-report", "className"),
    Output("overview-verdict", "children"),
    Output("overview-figures", "children"),
    Output("overview-steps-fresh", "data"),
    Output("overview-steps-note", "children"),
    Output("overview-workers-fresh", "data"),
    Output("overview-workers-title", "children"),
    Output("overview-workers-about", "children"),
    Output("overview-excess-fresh", "data"),
    Output("overview-excess", "style"),
    Output("overview-excess-title", "children"),
    Output("overview-excess-about", "children"),
    Output("overview-excess-note", "children"),
    Output("overview-starved", "children"),
    Output("overview-findings", "children"),
    Output("overview-quality", "children"),
    Output("overview-timer", "interval"),
    Output("overview-timer", "max_intervals"),
)


def overview_page(provider: ReportProvider, view: View, *, base_path: str) -> Component:
    """Return the page of one run, or of the newest one if the view names none."""
    content = _request(provider, view.run, base_path)
    shown, problem, hidden, *_ = content.outputs()
    liveness = _live_parts(provider, content.run, base_path)
    liveness_ms = poll_interval_ms(provider.runs(), content.run)
    times = None if content.run is None else provider.kind_times(content.run)
    return html.Div(
        [
            dcc.Store(id="overview-shown", data=shown),
            poll_timer("overview-timer", interval_ms=content.interval_ms),
            dcc.Store(id="overview-kinds-shown", data=_kinds_revision(times, content.open_step)),
            poll_timer("liveness-timer", interval_ms=liveness_ms),
            html.Div(problem, id="overview-problem", **announced()),
            html.Div(content.verdict, id="overview-verdict", **announced()),
            html.Div(liveness, id="overview-liveness", **announced()),
            html.Div(_report(content, times, base_path), id="overview-report", className=hidden),
        ]
    )


def register(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
    """Refresh the page while its run trains, and open a step when its cell is clicked."""
    for part in ("overview-steps", "overview-workers", "overview-excess", "overview-kinds"):
        register_graph(app, part)

    @app.callback(
        *_OUTPUTS,
        Input("overview-timer", "n_intervals"),
        Input(FALLBACK_TIMER, "n_intervals"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    @takes(RefreshPost)
    def refresh(post: RefreshPost) -> tuple[Any, ...]:
        shown = post.shown
        unchanged = *(no_update,) * (len(_OUTPUTS) - 1), next_tick(post.num_ticks)
        revision = _revision(provider, shown.run)
        is_silent = _silence(provider, shown.run) is not None
        if revision is not None and (revision, is_silent) == (shown.revision, shown.is_silent):
            return unchanged
        content = _request(provider, shown.run, base_path)
        is_final = content.interval_ms != SOON_MS
        if is_final and content.shown() == shown:
            return unchanged
        return content.outputs(post.num_ticks)

    # A callback of its own: a run that hangs has no new revision, but its ranks fall silent; and
    # steps are rolled up after they were analysed.
    @app.callback(
        Output("overview-liveness", "children"),
        Output("overview-kinds-about", "children"),
        Output("overview-kinds-fresh", "data"),
        Output("overview-kinds-shown", "data"),
        Output("liveness-timer", "interval"),
        Output("liveness-timer", "max_intervals"),
        Input("liveness-timer", "n_intervals"),
        Input(FALLBACK_TIMER, "n_intervals"),
        Input("overview-shown", "data"),  # with the step that never ended, once it is known
        State("overview-kinds-shown", "data"),
        prevent_initial_call=True,
    )
    @takes(LivePost)
    def refresh_live_parts(post: LivePost) -> tuple[Any, ...]:
        run_id = post.shown.run
        interval_ms = poll_interval_ms(provider.runs(), run_id)
        liveness = _live_parts(provider, run_id, base_path)
        times = None if run_id is None else provider.kind_times(run_id)
        open_step = post.shown.open_step
        revision = _kinds_revision(times, open_step)
        kinds: tuple[Any, ...] = no_update, no_update, no_update
        if run_id is not None and revision != post.kinds_revision:
            figure = kind_times_figure(run_id, times, open_step)
            kinds = _kinds_about(times, open_step), figure, revision
        return liveness, *kinds, interval_ms, next_tick(post.num_ticks)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("overview-excess", "clickData"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    @takes(ClickPost)
    def open_step(post: ClickPost) -> str:
        if post.click is None or post.click.points is None:
            raise PreventUpdate
        cell = post.click.points[0]
        found = provider.report(post.shown.run) if post.shown.run else None
        ranks: tuple[int, ...] = ()
        if isinstance(found, RunReport):
            ranks = ranks_of_row(shown_excess(found), str(cell.y))
        step = int(str(cell.x).partition("-")[0])
        view = View(page=TIMELINE, run=post.shown.run, step=step, ranks=ranks)
        return write_address(view, base_path=base_path)


PAGE = Page(name=OVERVIEW, title="Overview", build=overview_page, register=register)


def _revision(provider: ReportProvider, run_id: str | None) -> int | None:
    """Return the run's revision; None if there is no such run."""
    if run_id is None:
        return None
    try:
        return provider.revision(run_id)
    except UnknownRunError:
        return None


def _kinds_revision(times: MeanKindTimes | None, open_step: int | None) -> str | None:
    # As text: JavaScript rounds above 2^53.
    return None if times is None else f"{times.revision} {open_step}"


def _liveness(provider: ReportProvider, run_id: str | None) -> RankLiveness | None:
    """Return the liveness of a run that trains or was lost; None for any other."""
    state = _state(provider.runs(), run_id)
    return provider.liveness(run_id) if run_id and state in (RUNNING, LOST) else None


def _silence(provider: ReportProvider, run_id: str | None) -> StepSilence | None:
    """Return the silence of a running job; None if there is no such run."""
    if run_id is None:
        return None
    try:
        return provider.silence(run_id)
    except UnknownRunError:
        return None


def _live_parts(provider: ReportProvider, run_id: str | None, base_path: str) -> list[Component]:
    liveness, silence = _liveness(provider, run_id), _silence(provider, run_id)
    return liveness_card(liveness, silence, run=run_id, base_path=base_path)


def _state(runs: Sequence[RunSummary], run_id: str | None) -> str:
    return next((run.state for run in runs if run.run_id == run_id), "")


def _request(provider: ReportProvider, run_id: str | None, base_path: str) -> _Content:
    """Return the page's content as the provider has it now."""
    runs = provider.runs()
    if run_id is None:
        if not runs:
            return _Content(run=None, revision=None, problem=[no_runs()])
        run_id = runs[0].run_id
    interval_ms = poll_interval_ms(runs, run_id)
    revision = _revision(provider, run_id)

    def show(problem: Component) -> _Content:
        return _Content(run=run_id, revision=revision, problem=[problem], interval_ms=interval_ms)

    try:
        report = provider.report(run_id)
    except UnknownRunError as error:
        return show(missing_run(error))
    if report is None:
        return show(no_steps(run_id, state=_state(runs, run_id)))
    if not isinstance(report, RunReport):
        return _without_report(report)
    num_spans = next((run.num_spans for run in runs if run.run_id == run_id), None)
    silence = _silence(provider, run_id)
    excess = shown_excess(report)
    return _Content(
        run=run_id,
        revision=revision,
        is_silent=silence is not None,
        open_step=report.open_step,
        verdict=verdict_card(
            report,
            provider.verdict(report),
            base_path=base_path,
            num_spans=num_spans,
            silence=silence,
            is_lost=_state(runs, run_id) == LOST,
        ),
        key_figures=key_figures(report, base_path=base_path),
        steps=step_time_figure(report),
        steps_note=with_code(steps_note(report)),
        workers=worker_figure(report),
        workers_title=worker_title(report),
        excess=excess_figure(report),
        excess_title=excess_title(excess),
        excess_about=f"Time above {excess.baseline}, without waiting. Blank: unknown."
        " Click a cell to open its step with its ranks marked.",
        excess_note=excess_note(excess),
        starved=starved_list(report, base_path=base_path),
        findings=[findings_table(report, base_path=base_path)],
        quality=quality_list(report, base_path=base_path),
        interval_ms=interval_ms,
    )


def _without_report(found: AnalysisInProgress | AnalysisFailed) -> _Content:
    """Show what is known without a diagnosis, each part in its final place."""
    if isinstance(found, AnalysisInProgress):
        reason, verdict = AFTER_ANALYSIS, no_verdict_yet(found)
    else:
        reason, verdict = NEEDS_ANALYSIS, no_verdict(found)
    run_id = found.run.run_id
    blank = blank_figure(reason, height=340)
    text: list[Component] = [html.P(reason, className="quiet")]
    return _Content(
        run=run_id,
        revision=None,
        verdict=verdict,
        key_figures=early_figures(found),
        steps=blank if found.steps is None else marked_steps_figure(run_id, found.steps),
        workers=blank,
        excess=blank_figure(reason, height=220),
        starved=text,
        findings=text,
        quality=text,
        interval_ms=SOON_MS,
    )


def _downloads(run_id: str | None, base_path: str) -> list[Component]:
    """Return links to the files that this page offers."""
    files = {
        FINDINGS_PATH: ("CSV", "The findings as a table for a spreadsheet"),
        REPORT_PATH: ("Report to send", "One HTML file without scripts, which needs no server"),
    }
    query = urlencode({"run": run_id or ""})
    return [
        html.A(text, href=f"{base_path}{path}?{query}", title=title, className="button small")
        for path, (text, title) in files.items()
    ]


def _kinds_about(times: MeanKindTimes | None, open_step: int | None) -> str:
    about = (
        "Mean per rank. Communication: the time that no compute hides, waiting included. Kinds"
        " overlap, so they do not add up to the step time."
    )
    known = {step for by_step in times.busy_s.values() for step in by_step} if times else set()
    if open_step is None or max(known, default=-1) < open_step:
        return about  # Of a running job, the step that hangs is not summed up.
    return f"{about} Step {open_step:,} never ended: a triangle is a time beyond the axis."


def _report(content: _Content, times: MeanKindTimes | None, base_path: str) -> list[Component]:
    return [
        html.Div(content.key_figures, id="overview-figures", className="figures"),
        html.Div(
            [
                _figure_card(
                    "overview-steps",
                    content.steps,
                    title="Step time and MFU",
                    about="Shaded: steps of the top finding. Hollow points: warm-up.",
                    note=content.steps_note,
                ),
                _figure_card(
                    "overview-workers",
                    content.workers,
                    title=content.workers_title[0],
                    about=content.workers_title[1],
                ),
                _figure_card(
                    "overview-excess",
                    content.excess,
                    title=content.excess_title,
                    about=content.excess_about,
                    note=content.excess_note,
                ),
                card(
                    html.H2("Who waits for whom"),
                    html.P(
                        "Share of each step spent waiting, and the rank that caused it.",
                        className="about",
                    ),
                    html.Div(content.starved, id="overview-starved"),
                ),
            ],
            className="grid",
        ),
        card(
            html.Div(
                [html.H2("Findings"), *_downloads(content.run, base_path)], className="titled"
            ),
            html.Div(content.findings, id="overview-findings"),
        ),
        _figure_card(
            "overview-kinds",
            kind_times_figure(content.run or "", times, content.open_step),
            title="Time by kind of span",
            about=_kinds_about(times, content.open_step),
        ),
        card(html.H2("Data quality"), html.Div(content.quality, id="overview-quality")),
    ]


def _figure_card(
    part: str,
    figure: go.Figure,
    *,
    title: str,
    about: str,
    note: str | list[Component | str] = "",
) -> Component:
    return card(
        html.H2(title, id=f"{part}-title"),
        html.P(about, id=f"{part}-about", className="about"),
        graph(part, figure),
        html.P(note, id=f"{part}-note", className="note"),
        label=title,
    )
