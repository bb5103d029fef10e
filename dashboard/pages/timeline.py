"""The timeline page: one step of one run, with a row for each rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from dash import ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.exceptions import PreventUpdate

from rankscope.analysis.drawing.raster import MAX_BARS, Viewport, draw_picture
from rankscope.analysis.drawing.rows import RowOrder, rank_by_excess, row_order
from rankscope.analysis.drawing.timeline import cut_timeline
from rankscope.analysis.report.progress import AnalysisInProgress
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.report.text import format_count, format_duration, format_seconds
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.tracer.span import NS_PER_MS

from ..address import TIMELINE, View, read_address, write_address
from ..callback_checks import Post, Step, Ticks, takes
from ..figures.excess import shown_excess
from ..figures.timeline import timeline_figure
from ..figures.timeline_raster import raster_figure, raster_note
from ..text import escape
from .components import (
    FALLBACK_TIMER,
    LIVE_MS,
    SOON_MS,
    announced,
    card,
    graph,
    graph_style,
    next_tick,
    poll_interval_ms,
    poll_timer,
    register_graph,
)
from .placeholders import drawing_step, missing_run, no_data, no_runs, no_steps, reading_steps
from .shell import Page
from .timeline_controls import (
    WHOLE,
    Relayout,
    Revisions,
    Scale,
    Shown,
    StepChoices,
    bars_scale,
    choices_from_marks,
    choices_from_report,
    figure_scale,
    read_zoom,
    timeline_controls,
)
from .timeline_selection import register_selection, selection_controls

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import StepPicture
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.progress import AnalysisFailed

    from ..provider import ReportProvider
    from .components import Figure
    from .timeline_selection import ShownSpans


MAX_SLOWEST = 64
"""Ranks of a large step that are read when the slowest ones are on top."""


class RefreshPost(Post):
    """The values that `refresh` takes."""

    search: str | None
    num_ticks: Ticks
    fallback_ticks: Ticks
    shown: Shown
    zoomed: str | None
    """The query that the last zoom has written into the address."""


class StepPost(Post):
    """The values that `choose_step` takes."""

    chosen: Step | None
    search: str | None
    shown: Shown


class ZoomPost(Post):
    """The values that `zoom` takes."""

    relayout: Relayout | None
    search: str | None
    shown: Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """The parts of the page, which are the outputs of every refresh."""

    view: View
    revisions: Revisions | None = None
    problem: list[Component] = field(default_factory=list)
    """A card that says why there is no step; it hides the rest."""

    title: str = ""
    about: str = ""
    controls: list[Component] = field(default_factory=list)
    figure: Figure = field(default_factory=go.Figure)
    note: str = ""
    scale: Scale | None = None
    interval_ms: int = LIVE_MS
    """Pause before the page asks again."""

    num_views: int = 0

    def outputs(self, num_ticks: int | None = 0) -> tuple[Any, ...]:
        """Return the parts in the order of `_OUTPUTS`, after so many ticks of their timer."""
        layout = self.figure["layout"]
        layout["uirevision"] = f"{layout['uirevision']} {self.num_views}"
        shown = Shown(
            run=self.view.run,
            epoch=self.view.epoch,
            step=self.view.step,
            revisions=self.revisions,
            scale=self.scale,
            num_views=self.num_views,
        )
        return (
            shown.model_dump(),
            self.problem,
            "hidden" if self.problem else "",
            self.title,
            self.about,
            self.controls,
            self.figure,
            graph_style(self.figure),
            self.note,
            self.interval_ms,
            next_tick(num_ticks),
        )


_OUTPUTS = (
    Output("timeline-shown", "data"),
    Output("timeline-problem", "children"),
    Output("timeline-step", "className"),
    Output("timeline-title", "children"),
    Output("timeline-about", "children"),
    Output("timeline-controls", "children"),
    Output("timeline-graph-fresh", "data"),
    Output("timeline-graph", "style"),
    Output("timeline-note", "children"),
    Output("timeline-timer", "interval"),
    Output("timeline-timer", "max_intervals"),
)


def timeline_page(provider: ReportProvider, view: View, *, base_path: str) -> Component:
    """Return the page of the view's step; run, epoch and step are chosen if the view has none."""
    content = _request(provider, view, base_path)
    shown, problem, hidden, title, about, controls, figure, _, note, *_ = content.outputs()
    step = [
        html.Div(
            [
                html.Div(
                    [
                        html.H1(title, id="timeline-title"),
                        html.P(about, id="timeline-about", className="about"),
                    ]
                ),
                html.Div(controls, id="timeline-controls", className="controls"),
            ],
            className="timeline-head",
        ),
        selection_controls(),
        card(
            html.P(note, id="timeline-note", className="note"),
            html.P("", id="timeline-hover", className="about hover-line"),
            graph("timeline-graph", figure, selects=True),
            html.P(
                "Ctrl and the wheel zoom, drag to pan, double-click for the whole step; click a"
                " span for what it waited for, or select a box to measure and compare it."
                " Hatched or pale: waiting for the last member. Solid: transfer or work.",
                className="about",
            ),
            label="timeline of one step",
        ),
    ]
    return html.Div(
        [
            dcc.Store(id="timeline-shown", data=shown),
            dcc.Store(id="timeline-zoomed"),
            poll_timer("timeline-timer", interval_ms=content.interval_ms),
            html.Div(problem, id="timeline-problem", **announced()),
            html.Div(step, id="timeline-step", className=hidden),
        ]
    )


def register(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
    """Follow the address, refresh the step while its run trains, and follow step and zoom."""
    register_graph(app, "timeline-graph")
    register_selection(app, partial(_shown_spans, provider), base_path=base_path)
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("rankscope", "describeCell"),
        Output("timeline-hover", "children"),
        Input("timeline-graph", "hoverData"),
        prevent_initial_call=True,
    )

    @app.callback(
        *_OUTPUTS,
        Input("url", "search"),
        Input("timeline-timer", "n_intervals"),
        Input(FALLBACK_TIMER, "n_intervals"),
        State("timeline-shown", "data"),
        State("timeline-zoomed", "data"),
        prevent_initial_call=True,
    )
    @takes(RefreshPost)
    def refresh(post: RefreshPost) -> tuple[Any, ...]:
        view, shown = read_address(TIMELINE, post.search or ""), post.shown
        unchanged = *(no_update,) * (len(_OUTPUTS) - 1), next_tick(post.num_ticks)
        num_views = shown.num_views
        if ctx.triggered_id in ("timeline-timer", FALLBACK_TIMER):
            view = replace(view, run=shown.run)
            if view.step is None and shown.step is not None:
                # A job that trains on must not take the step away that a user looks at.
                view = replace(view, epoch=shown.epoch, step=shown.step)
            revisions = _revisions(provider, shown.run, shown.epoch, shown.step)
            if shown.revisions is not None and shown.revisions == revisions:
                return unchanged
        else:
            is_loaded = shown.scale is not None and shown.scale.is_whole
            if is_loaded and view.viewport is not None and post.search == post.zoomed:
                return unchanged  # the browser has zoomed already
            num_views += 1
        content = replace(_request(provider, view, base_path), num_views=num_views)
        return content.outputs(post.num_ticks)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("timeline-choose-step", "value"),
        State("url", "search"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    @takes(StepPost)
    def choose_step(post: StepPost) -> str:
        if post.chosen is None or post.chosen == str(post.shown.step):
            raise PreventUpdate
        view = replace(read_address(TIMELINE, post.search or ""), run=post.shown.run)
        changed = replace(view, step=int(post.chosen), viewport=None)
        return write_address(changed, base_path=base_path)

    @app.callback(
        Output("timeline-zoomed", "data"),
        Input("timeline-graph", "relayoutData"),
        State("url", "search"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    @takes(ZoomPost)
    def zoom(post: ZoomPost) -> str:
        shown = post.shown
        view = replace(read_address(TIMELINE, post.search or ""), run=shown.run)
        found = (
            None if post.relayout is None else read_zoom(post.relayout, shown.scale, view.viewport)
        )
        if found is None or found == view.viewport or (found is WHOLE and view.viewport is None):
            raise PreventUpdate
        viewport = None if found is WHOLE else found
        changed = replace(view, epoch=shown.epoch, step=shown.step, viewport=viewport)
        return "?" + write_address(changed, base_path=base_path).partition("?")[2]

    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("rankscope", "replaceAddress"),
        Output("url", "search", allow_duplicate=True),
        Output("url", "href", allow_duplicate=True),
        Input("timeline-zoomed", "data"),
        prevent_initial_call=True,
    )


PAGE = Page(name=TIMELINE, title="Timeline", build=timeline_page, register=register)


def _revisions(
    provider: ReportProvider, run_id: str | None, epoch: int | None, step: int | None
) -> Revisions | None:
    """Return the revisions of the run and of the step's picture; None if there is no such run."""
    if run_id is None:
        return None
    try:
        run = provider.revision(run_id)
    except UnknownRunError:
        return None
    if epoch is None or step is None:
        return Revisions(run=run, picture=0)
    picture = provider.picture_revision(run_id, epoch=epoch, step=step)
    return Revisions(run=run, picture=picture)


def _request(provider: ReportProvider, view: View, base_path: str) -> _Content:
    """Return the page's content as the provider has it now."""
    if view.run is None:
        runs = provider.runs()
        if not runs:
            return _Content(view=view, problem=[no_runs()])
        view = replace(view, run=runs[0].run_id)
    try:
        return _request_step(provider, view, str(view.run), base_path)
    except UnknownRunError as error:
        problem = [missing_run(error)]
    except EmptyRunError as error:
        problem = [_no_spans(view, error, base_path)]
    interval_ms = poll_interval_ms(provider.runs(), view.run)
    return _Content(view=view, problem=problem, interval_ms=interval_ms)


def _request_step(provider: ReportProvider, view: View, run_id: str, base_path: str) -> _Content:
    """Return the view's step as its spans, or as its stored picture.

    It needs no diagnosis: while that is being made, the step is shown without its ideal.
    """
    found = provider.report(run_id)
    runs = provider.runs()
    if found is None or (isinstance(found, RunReport) and not found.steps):
        state = next((run.state for run in runs if run.run_id == run_id), "")
        return _Content(
            view=view,
            revisions=_revisions(provider, run_id, None, None),
            problem=[no_steps(run_id, state=state)],
            interval_ms=poll_interval_ms(runs, run_id),
        )
    if isinstance(found, RunReport):
        choices = choices_from_report(found)
    else:
        choices = choices_from_marks(found.steps)
    view = _choose(view, choices)
    if view.step is None:
        return _Content(view=view, problem=[reading_steps(run_id)], interval_ms=SOON_MS)
    epoch, step = view.epoch or 0, view.step
    revisions = _revisions(provider, run_id, epoch, step)
    picture = provider.picture(
        run_id, epoch=epoch, step=step, order=view.order, viewport=view.viewport
    )
    ranking: tuple[int, ...] = ()
    if isinstance(found, RunReport):
        ranking = rank_by_excess(shown_excess(found), step)
    if picture is None:
        timeline = provider.timeline(run_id, epoch=epoch, step=step)
        if timeline is None:
            return _Content(view=view, problem=[drawing_step(run_id, step)], interval_ms=SOON_MS)
        timeline = replace(timeline, ranking=ranking)
        content = _show_timeline(view, choices, timeline, base_path)
    elif view.order is RowOrder.EXCESS and (
        timeline := provider.rank_spans(picture, ranking[:MAX_SLOWEST])
    ):
        content = _show_timeline(view, choices, replace(timeline, ranking=ranking), base_path)
        content = replace(content, note=f"{_slowest_note(timeline, picture)} {content.note}")
    elif (timeline := _viewport_spans(provider, picture)) is not None:
        content = _show_spans(view, choices, timeline, base_path, part=picture)
    else:
        view = view if picture.viewport else replace(view, viewport=None)
        content = _show_picture(view, choices, picture, base_path)
    is_pending = isinstance(found, AnalysisInProgress)
    return replace(
        content,
        revisions=revisions,
        about=f"{content.about}{_missing_analysis(found)}",
        interval_ms=SOON_MS if is_pending else poll_interval_ms(runs, run_id),
    )


def _missing_analysis(found: RunReport | AnalysisInProgress | AnalysisFailed) -> str:
    if isinstance(found, RunReport):
        return ""
    if isinstance(found, AnalysisInProgress):
        return "; analysis in progress"
    return "; analysis failed"


def _viewport_spans(provider: ReportProvider, picture: StepPicture) -> StepTimeline | None:
    """Return the spans of a viewport, if bars can show them and they are still stored."""
    if picture.viewport is None or picture.likely_spans() > 2 * MAX_BARS:
        return None
    return provider.viewport_spans(picture, max_spans=MAX_BARS)


def _choose(view: View, choices: StepChoices) -> View:
    """Choose epoch and step if the view has none."""
    newest = choices.epochs[-1] if choices.epochs else 0
    return replace(
        view,
        epoch=newest if view.epoch is None else view.epoch,
        step=choices.best if view.step is None else view.step,
    )


def _no_spans(view: View, error: EmptyRunError, base_path: str) -> Component:
    other = write_address(replace(view, step=None, epoch=None), base_path=base_path)
    return html.Div(
        [
            no_data(
                f"step {view.step} of epoch {view.epoch or 0} has no spans",
                f"{escape(str(error))}.",
            ),
            html.P(dcc.Link("Show a step of this run that has spans", href=other)),
        ]
    )


def _show_timeline(
    view: View, choices: StepChoices, timeline: StepTimeline, base_path: str
) -> _Content:
    """Show a step of which all spans were read: as bars, or as pixels if they are too many."""
    if len(timeline.spans) <= MAX_BARS:
        return _show_spans(view, choices, timeline, base_path)
    picture = draw_picture(timeline, view.order, view.viewport)
    part = cut_timeline(timeline, picture)
    if picture.viewport is not None and 0 < len(part.spans) <= MAX_BARS:
        return _show_spans(view, choices, part, base_path, part=picture)
    return _show_picture(replace(view, viewport=picture.viewport), choices, picture, base_path)


def _show_spans(
    view: View,
    choices: StepChoices,
    timeline: StepTimeline,
    base_path: str,
    *,
    part: StepPicture | None = None,
) -> _Content:
    """Show spans as bars; ``part`` is the picture whose viewport they fill, if not the step."""
    ranks = None if part is None else part.ranks
    num_ranks = len(set(timeline.spans.rank.tolist())) if ranks is None else len(ranks)
    viewport = part.viewport if part is not None else view.viewport
    if viewport is not None and part is None:
        viewport = viewport.clip(timeline.end_ns - timeline.begin_ns, num_ranks)
    return _Content(
        view=replace(view, viewport=viewport),
        title=f"Step {timeline.step}",
        about=_about(choices, timeline, num_spans=len(timeline.spans), num_ranks=num_ranks),
        controls=timeline_controls(view, choices, timeline, base_path),
        figure=timeline_figure(timeline, view.order, viewport, ranks, view.ranks),
        note="" if part is None else _viewport_note(viewport),
        scale=bars_scale(
            timeline,
            num_rows=num_ranks,
            num_ranks=num_ranks if part is None else part.num_ranks,
            first_row=None if part is None or viewport is None else viewport.first_row,
        ),
    )


def _shown_spans(provider: ReportProvider, search: str | None, shown: Shown) -> ShownSpans | None:
    """Return the spans that the page shows as bars; None if it shows none."""
    if shown.run is None or shown.step is None or shown.scale is None:
        return None
    run_id, epoch, step = shown.run, shown.epoch or 0, shown.step
    view = replace(read_address(TIMELINE, search or ""), run=run_id, epoch=epoch, step=step)
    found = provider.report(run_id)
    ranking: tuple[int, ...] = ()
    if isinstance(found, RunReport):
        ranking = rank_by_excess(shown_excess(found), step)
    picture = provider.picture(
        run_id, epoch=epoch, step=step, order=view.order, viewport=view.viewport
    )
    if picture is None:
        timeline = provider.timeline(run_id, epoch=epoch, step=step)
    elif view.order is RowOrder.EXCESS:
        timeline = provider.rank_spans(picture, ranking[:MAX_SLOWEST])
    else:
        timeline = _viewport_spans(provider, picture)
        return None if timeline is None else (view, timeline, picture.ranks)
    if timeline is None:
        return None
    timeline = replace(timeline, ranking=ranking)
    if len(timeline.spans) <= MAX_BARS:
        return view, timeline, row_order(timeline, view.order)
    picture = draw_picture(timeline, view.order, view.viewport)
    part = cut_timeline(timeline, picture)
    is_shown = picture.viewport is not None and 0 < len(part.spans) <= MAX_BARS
    return (view, part, picture.ranks) if is_shown else None


def _show_picture(
    view: View, choices: StepChoices, picture: StepPicture, base_path: str
) -> _Content:
    return _Content(
        view=view,
        title=f"Step {picture.step}",
        about=_about(choices, picture, num_spans=picture.num_spans, num_ranks=picture.num_ranks),
        controls=timeline_controls(view, choices, picture, base_path),
        figure=raster_figure(picture, view.order, view.ranks),
        note=f"{_viewport_note(picture.viewport)} {raster_note(picture)}"
        " Zoom in to see single spans.".strip(),
        scale=figure_scale(picture),
    )


def _slowest_note(timeline: StepTimeline, picture: StepPicture) -> str:
    num_shown = len(set(timeline.spans.rank.tolist()))
    return (
        f"The {num_shown:,} slowest of {format_count(picture.num_ranks, 'rank')},"
        " the slowest one on top."
    )


def _viewport_note(viewport: Viewport | None) -> str:
    if viewport is None:
        return ""
    begin_ms, end_ms = viewport.begin_ns / NS_PER_MS, viewport.end_ns / NS_PER_MS
    ranks = format_count(viewport.end_row - viewport.first_row, "rank")
    return f"Part of the step: {begin_ms:,.3f} to {end_ms:,.3f} ms, {ranks}."


def _about(
    choices: StepChoices, step: StepTimeline | StepPicture, *, num_spans: int, num_ranks: int
) -> str:
    ideal_s = choices.ideal_s_by_step.get(step.step)
    return (
        f"{format_duration(step.end_ns - step.begin_ns)}, ideal {format_seconds(ideal_s)};"
        f" {format_count(num_spans, 'span')} of {format_count(num_ranks, 'rank')},"
        f" epoch {step.epoch}"
    )
