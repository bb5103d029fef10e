"""The timeline page: one step of one run, with a row for each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update

from rankscope.analysis.drawing.timeline import select_ranks
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.report.text import format_duration
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.dashboard.records.progress import AnalysisInProgress
from rankscope.tracer.span import NS_PER_MS

from ..address import LAYERS, TIMELINE, View, read_address, write_address
from ..callback_checks import Number, Ticks, checked
from ..figures.timeline import hover_texts
from ..figures.timeline_axes import Marks
from ..text import escape
from .components import (
    FALLBACK_TIMER,
    QUIET_MS,
    SOON_MS,
    announced,
    canvas,
    card,
    graph,
    labelled,
    next_tick,
    poll_interval_ms,
    poll_timer,
    register_canvas,
    register_graph,
)
from .page import Content as PageContent
from .page import Page
from .placeholders import drawing_step, missing_run, no_data, no_runs, no_steps, reading_steps
from .timeline_content import OUTPUTS, Content, draw_step, show_replay, show_step
from .timeline_controls import (
    Revisions,
    Shown,
    StepChoices,
    choices_from_marks,
    choices_from_report,
)
from .timeline_overview import around_step, minimap_place, register_around
from .timeline_selection import register_selection, selection_controls
from .timeline_step import (
    NO_REPLAY,
    find_framed,
    find_replay,
    go_to_proof,
    read_shown,
    read_step,
    show_timeline,
)

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.dashboard.records.progress import AnalysisFailed

    from ..provider import ReportProvider


REFINE_MS = 500
"""Pause before a page asks again for spans or a replay that were not ready."""

STATE_AGE_NS = QUIET_MS * NS_PER_MS
"""Age of the state of the run, which sets when the page asks again."""


def timeline_page(provider: ReportProvider, view: View, *, base_path: str) -> Component:
    """Return the page of the view's step; run, epoch and step are chosen if the view has none."""
    content = _request(provider, view, base_path)
    (
        shown, problem, hidden, title, about, stepper, controls, figure, on_canvas, _, note,
        beneath, *_,
    ) = content.outputs()  # fmt: skip
    part = "timeline-graph"
    step = [
        html.Div(
            [
                html.H1(title, id="timeline-title"),
                html.P(about, id="timeline-about", className="about"),
                html.Div(stepper, id="timeline-stepper", className="stepper"),
            ],
            className="timeline-head",
        ),
        around_step(),
        html.Div(
            [
                html.Div(controls, id="timeline-controls", className="controls"),
                *selection_controls(),
            ],
            className="controls timeline-bar",
        ),
        card(
            minimap_place(),
            html.Div(
                id="timeline-legend", className="legend", role="group", **labelled("kinds of spans")
            ),
            graph(part, figure, selects=True, beneath=canvas(part, on_canvas)),
            html.P(note, id="timeline-note", className="note"),
            html.P(
                "Times are since the step's first span. Ctrl and the wheel zoom, drag to pan,"
                " double-click for the whole step; click a span for what it waited for, or press M"
                " and drag a box to measure and compare it. Hatched or pale: waiting for the last"
                " member. Solid: transfer or work.",
                className="about",
            ),
            class_name="timeline-card",
            label="timeline of one step",
        ),
        html.Div(beneath, id="timeline-replay"),
    ]
    return html.Div(
        [
            dcc.Store(id="timeline-shown", data=shown),
            dcc.Store(id="timeline-asked"),
            dcc.Store(id="timeline-graph-pointed"),
            dcc.Store(id="timeline-graph-texts"),
            poll_timer("timeline-timer", interval_ms=content.interval_ms),
            html.Div(problem, id="timeline-problem", **announced()),
            html.Div(step, id="timeline-step", className=hidden),
        ]
    )


def register(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
    """Follow the address, refresh the step while its run trains, and follow step and zoom."""
    register_graph(app, "timeline-graph")
    register_selection(
        app,
        partial(read_shown, provider),
        partial(find_replay, provider),
        base_path=base_path,
    )
    register_around(app, provider, base_path=base_path)
    for part in ("timeline-graph", "timeline-ideal-graph", "timeline-minimap"):
        register_canvas(app, part)

    @app.callback(
        *OUTPUTS,
        Input("timeline-asked", "data"),
        Input("timeline-timer", "n_intervals"),
        Input(FALLBACK_TIMER, "n_intervals"),
        State("timeline-shown", "data"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    @checked
    def refresh(  # Dash calls it by position
        asked: str | None,
        num_ticks: Ticks,
        _fallback_ticks: Ticks,
        shown: Shown,
        search: str | None,
    ) -> tuple[Any, ...]:
        # ``asked`` is the query that the assets ask for: not that of a zoom of what is loaded.
        unchanged = *(no_update,) * (len(OUTPUTS) - 1), next_tick(num_ticks)
        num_views = shown.num_views
        # The answer to an address is dropped if a timer fires meanwhile: then that is the question.
        if asked == shown.asked:
            view = replace(read_address(TIMELINE, search or ""), run=shown.run)
            if view.step is None and shown.step is not None:
                # A job that trains on must not take the step away that a user looks at.
                view = replace(view, epoch=shown.epoch, step=shown.step)
            revisions = _revisions(provider, shown.run, shown.epoch, shown.step)
            if shown.revisions is not None and shown.revisions == revisions:
                return unchanged
        else:
            view = read_address(TIMELINE, asked or "")
            num_views += 1
        content = replace(_request(provider, view, base_path), num_views=num_views, asked=asked)
        if content.is_pending and shown.revisions is None and num_views == shown.num_views:
            return unchanged  # as before
        return content.outputs(num_ticks, before=shown)

    @app.callback(
        Output("timeline-graph-texts", "data"),
        Input("timeline-graph-pointed", "data"),
        State("url", "search"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    @checked
    def describe(picture: Number, search: str | None, shown: Shown) -> dict[str, Any]:
        """Return the texts of the picture that the assets have drawn, by its number."""
        step = read_shown(provider, search, shown)
        texts = [] if step is None or step.spans is None else hover_texts(step.spans)
        return {"picture": picture, "texts": texts}

    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("canvas", "describe"),
        Input("timeline-graph-texts", "data"),
        prevent_initial_call=True,
    )
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("rankscope", "toggleLayer"),
        Output("url", "search", allow_duplicate=True),
        *(Input(f"timeline-{layer}", "n_clicks") for layer in LAYERS),
        prevent_initial_call=True,
    )
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("timeline", "chooseStep"),
        Output("url", "search", allow_duplicate=True),
        Input("timeline-choose-step", "value"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    for function, *parts in (
        ("zoomAddress", Input("timeline-graph", "relayoutData"), State("timeline-shown", "data")),
        ("foldGroup", Input("timeline-graph", "clickAnnotationData")),
    ):
        app.clientside_callback(  # type: ignore[no-untyped-call]
            ClientsideFunction("timeline", function),
            Output("url", "search", allow_duplicate=True),
            Output("url", "href", allow_duplicate=True),
            *parts,
            prevent_initial_call=True,
        )
    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("timeline", "ask"),
        Output("timeline-asked", "data"),
        Input("url", "search"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )


def _show(provider: ReportProvider, view: View, *, base_path: str) -> PageContent:
    return PageContent(children=[timeline_page(provider, view, base_path=base_path)])


PAGE = Page(
    name=TIMELINE,
    title="Timeline",
    show=_show,
    revision=lambda _provider, _view: "it refreshes itself",
    register=register,
)


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


def _request(provider: ReportProvider, view: View, base_path: str) -> Content:
    """Return the page's content as the provider has it now."""
    if view.run is None:
        runs = provider.runs()
        if not runs:
            return Content(view=view, problem=[no_runs()])
        view = replace(view, run=runs[0].run_id)
    try:
        return _request_step(provider, view, str(view.run), base_path)
    except UnknownRunError as error:
        problem = [missing_run(error)]
    except EmptyRunError as error:
        problem = [_no_spans(view, error, base_path)]
    interval_ms = poll_interval_ms(provider.runs(), view.run)
    return Content(view=view, problem=problem, interval_ms=interval_ms)


def _request_step(provider: ReportProvider, view: View, run_id: str, base_path: str) -> Content:
    """Return the view's step as its spans, or as its stored picture.

    It needs no diagnosis: while that is being made, the step is shown without its ideal.
    """
    found = provider.report(run_id)
    runs = provider.runs(max_age_ns=STATE_AGE_NS)
    if found is None or (isinstance(found, RunReport) and not found.steps):
        state = next((run.state for run in runs if run.run_id == run_id), "")
        return Content(
            view=view,
            revisions=_revisions(provider, run_id, None, None),
            problem=[no_steps(run_id, state=state)],
            interval_ms=poll_interval_ms(runs, run_id),
        )
    if isinstance(found, RunReport):
        choices = choices_from_report(found)
    else:
        choices = choices_from_marks(found.steps)
    view = _choose(go_to_proof(view, found), choices)
    if view.step is None:
        return Content(view=view, problem=[reading_steps(run_id)], interval_ms=SOON_MS)
    epoch, step = view.epoch or 0, view.step
    revisions = _revisions(provider, run_id, epoch, step)
    content = _show_step(provider, view, choices, found, base_path)
    if content is None:
        return Content(view=view, problem=[drawing_step(run_id, step)], interval_ms=SOON_MS)
    is_analysing = isinstance(found, AnalysisInProgress)
    interval_ms = SOON_MS if is_analysing else poll_interval_ms(runs, run_id)
    return replace(
        content,
        revisions=None if content.is_pending else revisions,
        interval_ms=REFINE_MS if content.is_pending else interval_ms,
    )


def _show_step(
    provider: ReportProvider,
    view: View,
    choices: StepChoices,
    report: RunReport | AnalysisInProgress | AnalysisFailed,
    base_path: str,
) -> Content | None:
    """Return the step of a view that names run, epoch and step; None while it is being read."""
    reading = read_step(provider, view, report)
    if reading is None:
        return None
    replayed = find_replay(provider, reading.recorded) if view.layers else NO_REPLAY
    framed = find_framed(report, view)
    proof = None if framed is None else framed.proof
    about = _missing_analysis(report)
    if framed is not None and proof is not None:
        excess = format_duration(proof.excess_ns)
        about = f"; framed: {framed.cause} of rank {proof.rank}, {excess} too long{about}"
    marks = Marks(ranks=view.ranks, path=replayed.path_of(view.layers), proof=proof)
    content = show_step(reading.shown, choices, marks, about=about, base_path=base_path)
    ideal = None
    if replayed.replay is not None and "ideal" in view.layers:
        timeline = replayed.replay.ideal
        if reading.timeline is not None:
            timeline = replace(timeline, ranking=reading.timeline.ranking)
            timeline = select_ranks(timeline, set(reading.timeline.spans.rank.tolist()))
        shown = show_timeline(reading.shown.view, timeline)
        ideal = draw_step(shown, Marks(ranks=view.ranks), with_texts=True)
    return replace(
        content,
        note=" ".join([*reading.notes, content.note]).strip(),
        beneath=show_replay(replayed, ideal),
        is_pending=reading.is_pending or replayed.is_pending,
    )


def _missing_analysis(found: RunReport | AnalysisInProgress | AnalysisFailed) -> str:
    if isinstance(found, RunReport):
        return ""
    if isinstance(found, AnalysisInProgress):
        return "; analysis in progress"
    return "; analysis failed"


def _choose(view: View, choices: StepChoices) -> View:
    """Choose epoch and step if the view has none."""
    newest = choices.epochs[-1] if choices.epochs else 0
    return replace(
        view,
        epoch=newest if view.epoch is None else view.epoch,
        step=choices.best if view.step is None else view.step,
    )


def _no_spans(view: View, error: EmptyRunError, base_path: str) -> Component:
    reason = f"{escape(str(error))}."
    if view.step is None:  # the page chose the step: a link without one would lead back here
        return html.Div(no_data("the step to show has no spans", reason))
    other = write_address(replace(view, step=None, epoch=None), base_path=base_path)
    return html.Div(
        [
            no_data(f"step {view.step} of epoch {view.epoch or 0} has no spans", reason),
            html.P(dcc.Link("Show a step of this run that has spans", href=other)),
        ]
    )
