"""The timeline: one step of one run, every rank below the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from dash import Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.exceptions import PreventUpdate

from rankscope.analysis.drawing.raster import MAX_BARS, Window, draw_picture
from rankscope.analysis.report.progress import AnalysisInProgress
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.report.text import format_count, format_duration, format_seconds
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.tracer.span import NS_PER_MS

from ..address import Page, View, read_address, write_address
from ..figures.timeline import timeline_figure
from ..figures.timeline_raster import raster_figure, raster_note
from ..text import visible
from .components import (
    LIVE_MS,
    RESCUE,
    SOON_MS,
    announced,
    card,
    clock,
    graph,
    graph_style,
    next_tick,
    pace_of,
    register_graph,
)
from .placeholders import drawing, missing_run, no_data, no_runs, no_steps, reading_steps
from .timeline_controls import (
    WHOLE,
    Steps,
    steps_of_report,
    steps_of_seen,
    timeline_controls,
    zoomed,
    zooms_of,
)

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import StepPicture
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.progress import AnalysisFailed

    from ..provider import ReportProvider
    from .components import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What stands on the page, part by part."""

    view: View
    revision: list[int] | None = None
    problem: list[Component] = field(default_factory=list)
    title: str = ""
    about: str = ""
    controls: list[Component] = field(default_factory=list)
    figure: Figure = field(default_factory=go.Figure)
    note: str = ""
    picture: StepPicture | None = None
    """What the figure shows, where it is pixels that were kept: zooming into it asks for finer
    ones."""

    pace_ms: int = LIVE_MS
    """When the page looks again."""

    def outputs(self, num_ticks: int | None = 0) -> tuple[Any, ...]:
        """Return the parts in the order of `_OUTPUTS`, after so many ticks of their clock."""
        return (
            {
                "run": self.view.run,
                "epoch": self.view.epoch,
                "step": self.view.step,
                "revision": self.revision,
                "zooms": None if self.picture is None else zooms_of(self.picture),
            },
            self.problem,
            "hidden" if self.problem else "",
            self.title,
            self.about,
            self.controls,
            self.figure,
            graph_style(self.figure),
            self.note,
            self.pace_ms,
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
    Output("timeline-clock", "interval"),
    Output("timeline-clock", "max_intervals"),
)


def timeline_page(provider: ReportProvider, view: View, *, base_path: str) -> Component:
    """Return the page of the view's step; what the view leaves open is chosen for it."""
    shown = _look(provider, view, base_path)
    data, problem, hidden, title, about, controls, figure, _, note, *_ = shown.outputs()
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
        card(
            html.P(note, id="timeline-note", className="note"),
            graph("timeline-graph", figure, wheel_zooms=True),
            html.P(
                "Scroll to zoom, drag to pan, double-click for the whole step."
                " Hatched: waiting for the last member; solid: transfer or work.",
                className="about",
            ),
            label="timeline of one step",
        ),
    ]
    return html.Div(
        [
            dcc.Store(id="timeline-shown", data=data),
            clock("timeline-clock", pace_ms=shown.pace_ms),
            html.Div(problem, id="timeline-problem", **announced()),
            html.Div(step, id="timeline-step", className=hidden),
        ]
    )


def register(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
    """Follow the address, and redraw the step while its run trains."""
    register_graph(app, "timeline-graph")

    @app.callback(
        *_OUTPUTS,
        Input("url", "search"),
        Input("timeline-clock", "n_intervals"),
        Input(RESCUE, "n_intervals"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    def draw(search: str, num_ticks: int, _rescues: int, shown: dict[str, Any]) -> tuple[Any, ...]:
        view = read_address(Page.TIMELINE, search or "")
        if ctx.triggered_id in ("timeline-clock", RESCUE):
            view = replace(view, run=shown["run"])
            place = (shown["epoch"], shown["step"])
            if shown["revision"] and shown["revision"] == _revision(provider, view.run, place):
                return *(no_update,) * (len(_OUTPUTS) - 1), next_tick(num_ticks)
        return _look(provider, view, base_path).outputs(num_ticks)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("timeline-choose-step", "value"),
        State("url", "search"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    def jump(chosen: str | None, search: str, shown: dict[str, Any]) -> str:
        view = replace(read_address(Page.TIMELINE, search or ""), run=shown["run"])
        if chosen is None or chosen == str(shown["step"]):
            raise PreventUpdate
        return write_address(replace(view, step=int(chosen), window=None), base_path=base_path)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("timeline-graph", "relayoutData"),
        State("url", "search"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    def zoom(moved: dict[str, Any] | None, search: str, shown: dict[str, Any]) -> str:
        view = replace(read_address(Page.TIMELINE, search or ""), run=shown["run"])
        found = zoomed(moved or {}, shown.get("zooms"))
        if found is None or found == view.window or (found is WHOLE and view.window is None):
            raise PreventUpdate
        window = None if found is WHOLE else found
        place = {"epoch": shown["epoch"], "step": shown["step"]}
        return write_address(replace(view, window=window, **place), base_path=base_path)


def _revision(
    provider: ReportProvider, run_id: str | None, place: tuple[int | None, int | None]
) -> list[int] | None:
    """Return the revisions of the run and of the step's picture; None where there is no such run.

    The second follows the first by some seconds: late spans change the picture when it is
    drawn anew.
    """
    if run_id is None:
        return None
    try:
        run = provider.revision(run_id)
    except UnknownRunError:
        return None
    epoch, step = place
    if epoch is None or step is None:
        return [run, 0]
    return [run, provider.picture_revision(run_id, epoch=epoch, step=step)]


def _look(provider: ReportProvider, view: View, base_path: str) -> _Shown:
    """Ask the provider anew."""
    if view.run is None:
        runs = provider.runs()
        if not runs:
            return _Shown(view=view, problem=[no_runs()])
        view = replace(view, run=runs[0].run_id)
    try:
        return _step(provider, view, str(view.run), base_path)
    except UnknownRunError as error:
        problem = [missing_run(error)]
    except EmptyRunError as error:
        problem = [_no_spans(view, error, base_path)]
    return _Shown(view=view, problem=problem, pace_ms=pace_of(provider.runs(), view.run))


def _step(provider: ReportProvider, view: View, run_id: str, base_path: str) -> _Shown:
    """Return the view's step: its spans, or the pixels that are kept of it.

    It needs no diagnosis: while that is made, the step is shown without its ideal.
    """
    found = provider.report(run_id)
    runs = provider.runs()
    if found is None or (isinstance(found, RunReport) and not found.steps):
        revision = _revision(provider, run_id, (None, None))
        state = next((run.state for run in runs if run.run_id == run_id), "")
        problem = [no_steps(run_id, state=state)]
        pace = pace_of(runs, run_id)
        return _Shown(view=view, revision=revision, problem=problem, pace_ms=pace)
    known = steps_of_report(found) if isinstance(found, RunReport) else steps_of_seen(found.steps)
    view = _settled(view, known)
    if view.step is None:
        return _Shown(view=view, problem=[reading_steps(run_id)], pace_ms=SOON_MS)
    place = {"epoch": view.epoch or 0, "step": view.step}
    revision = _revision(provider, run_id, (place["epoch"], place["step"]))
    picture = provider.picture(run_id, **place, group_by=view.group_by, window=view.window)
    if picture is None:
        timeline = provider.timeline(run_id, **place)
        if timeline is None:
            return _Shown(view=view, problem=[drawing(run_id, view.step)], pace_ms=SOON_MS)
        shown = _drawn(replace(view, window=None), known, timeline, base_path, revision)
    elif (part := _window_spans(provider, picture)) is not None:
        shown = _drawn(view, known, part, base_path, revision)
    else:
        view = view if picture.window else replace(view, window=None)
        shown = _pictured(view, known, picture, base_path, revision)
    pace = SOON_MS if isinstance(found, AnalysisInProgress) else pace_of(runs, run_id)
    return replace(shown, pace_ms=pace, about=f"{shown.about}{_not_yet(found)}")


def _not_yet(found: RunReport | AnalysisInProgress | AnalysisFailed) -> str:
    if isinstance(found, RunReport):
        return ""
    return (
        "; the analysis is under way" if isinstance(found, AnalysisInProgress) else "; no analysis"
    )


def _window_spans(provider: ReportProvider, picture: StepPicture) -> StepTimeline | None:
    """Return the spans of a window, if they can be drawn one by one and are still kept."""
    if picture.window is None or picture.likely_spans() > 2 * MAX_BARS:
        return None
    return provider.window_spans(picture, max_spans=MAX_BARS)


def _settled(view: View, known: Steps) -> View:
    """Choose the epoch and step that the view leaves open."""
    newest = known.epochs[-1] if known.epochs else 0
    return replace(
        view,
        epoch=newest if view.epoch is None else view.epoch,
        step=known.best if view.step is None else view.step,
    )


def _no_spans(view: View, error: EmptyRunError, base_path: str) -> Component:
    reason = f"{visible(str(error))}"
    other = write_address(replace(view, step=None, epoch=None), base_path=base_path)
    return html.Div(
        [
            no_data(f"step {view.step} of epoch {view.epoch or 0} holds no spans", f"{reason}."),
            html.P(dcc.Link("Show a step of this run that has some", href=other)),
        ]
    )


def _drawn(
    view: View,
    known: Steps,
    timeline: StepTimeline,
    base_path: str,
    revision: list[int] | None,
) -> _Shown:
    """Show spans one by one, or as pixels if they are too many."""
    if len(timeline.spans) > MAX_BARS:
        picture = draw_picture(timeline, view.group_by)
        return replace(_pictured(view, known, picture, base_path, revision), picture=None)
    num_ranks = len(set(timeline.spans.rank.tolist()))
    return _Shown(
        view=view,
        revision=revision,
        title=f"Step {timeline.step}",
        about=_about(known, timeline, num_spans=len(timeline.spans), num_ranks=num_ranks),
        controls=timeline_controls(view, known, base_path),
        figure=timeline_figure(timeline, view.group_by, view.window),
        note=_window_note(view.window),
    )


def _pictured(
    view: View, known: Steps, picture: StepPicture, base_path: str, revision: list[int] | None
) -> _Shown:
    """Show pixels."""
    return _Shown(
        view=view,
        revision=revision,
        title=f"Step {picture.step}",
        about=_about(known, picture, num_spans=picture.num_spans, num_ranks=picture.num_ranks),
        controls=timeline_controls(view, known, base_path),
        figure=raster_figure(picture, view.group_by),
        note=f"{_window_note(picture.window)} {raster_note(picture)}".strip(),
        picture=picture,
    )


def _window_note(window: Window | None) -> str:
    if window is None:
        return ""
    begin, end = (at / NS_PER_MS for at in (window.begin_ns, window.end_ns))
    return f"A part of the step: {begin:,.3f} to {end:,.3f} ms, {_rows(window)}."


def _rows(window: Window) -> str:
    num = window.end_row - window.first_row
    return f"{num:,} ranks" if num > 1 else "one rank"


def _about(
    known: Steps, step: StepTimeline | StepPicture, *, num_spans: int, num_ranks: int
) -> str:
    ideal = known.ideal_s_by_step.get(step.step)
    return (
        f"{format_duration(step.end_ns - step.begin_ns)}, ideal {format_seconds(ideal)};"
        f" {format_count(num_spans, 'span')} of {format_count(num_ranks, 'rank')}, epoch"
        f" {step.epoch}"
    )
