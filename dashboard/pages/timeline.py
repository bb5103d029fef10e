"""The timeline page: one step of one run, with a row for each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html

from rankscope.analysis.causes import slow_link
from rankscope.analysis.drawing.timeline import select_ranks
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.report.text import format_duration, format_ranks
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.dashboard.records.progress import AnalysisInProgress
from rankscope.tracer.span import NS_PER_MS

from ..address import LAYERS, TIMELINE, WHOLE, View, write_address
from ..callback_checks import Number, checked
from ..figures.timeline import hover_texts
from ..figures.timeline_axes import Marks
from ..text import escape
from .components import QUIET_MS, SOON_MS, poll_interval_ms, register_canvas
from .page import Content, Page
from .placeholders import drawing_step, no_data, no_steps, reading_steps
from .timeline_content import StepContent, draw_step, show_replay, show_step, step_parts
from .timeline_controls import (
    Revisions,
    Shown,
    StepChoices,
    choices_from_marks,
    choices_from_report,
)
from .timeline_overview import register_around
from .timeline_selection import register_selection
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


def register(app: Dash, provider: ReportProvider, *, base_path: str) -> None:
    """Follow selection, layers, step and zoom, which change the address."""
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


def _show(provider: ReportProvider, view: View, *, base_path: str) -> Content:
    """Show a step as its spans or as its stored picture; epoch and step are chosen if need be.

    It needs no diagnosis: while that is being made, the step is shown without its ideal.
    """
    run_id = str(view.run)
    try:
        report = provider.report(run_id)
        runs = provider.runs(max_age_ns=STATE_AGE_NS)
        interval_ms = poll_interval_ms(runs, run_id)
        if report is None or (isinstance(report, RunReport) and not report.steps):
            state = next((run.state for run in runs if run.run_id == run_id), "")
            return Content(problem=no_steps(run_id, state=state), interval_ms=interval_ms)
        if isinstance(report, RunReport):
            choices = choices_from_report(report)
        else:
            choices = choices_from_marks(report.steps)
        chosen = _choose(go_to_proof(view, report), choices)
        if chosen.step is None:
            problem = reading_steps(run_id)
            return Content(problem=problem, interval_ms=SOON_MS, is_unfinished=True)
        revisions = _revisions(provider, chosen)
        step = _show_step(provider, chosen, choices, report, base_path)
    except EmptyRunError as error:
        return Content(problem=_no_spans(view, error, base_path))
    if step is None:
        problem = drawing_step(run_id, chosen.step)
        return Content(problem=problem, view=chosen, interval_ms=SOON_MS, is_unfinished=True)
    if isinstance(report, AnalysisInProgress):
        interval_ms = SOON_MS
    return Content(
        children=step_parts(
            step,
            None if step.is_pending else revisions,
            zoom_key=write_address(_choose(view, choices), base_path=""),
            search=_search_of(view, step.view) if isinstance(report, RunReport) else "",
        ),
        view=step.view,
        interval_ms=REFINE_MS if step.is_pending else interval_ms,
        is_unfinished=step.is_pending,
    )


def _search_of(asked: View, shown: View) -> str:
    """Return the query of what is shown, if the address leaves it open; else ""."""
    names_finding = asked.show not in (None, WHOLE)
    if asked.step is not None and not names_finding:
        return ""
    view = replace(shown, show=None) if names_finding else shown
    return "?" + write_address(view, base_path="").partition("?")[2]


def _revisions(provider: ReportProvider, view: View) -> Revisions:
    """Return the revisions of a view's run and of its step's picture."""
    run_id, picture = str(view.run), 0
    run = provider.revision(run_id)
    if view.epoch is not None and view.step is not None:
        picture = provider.picture_revision(run_id, epoch=view.epoch, step=view.step)
    return Revisions(run=run, picture=picture)


PAGE = Page(name=TIMELINE, title="Timeline", show=_show, revision=_revisions, register=register)


def _show_step(
    provider: ReportProvider,
    view: View,
    choices: StepChoices,
    report: RunReport | AnalysisInProgress | AnalysisFailed,
    base_path: str,
) -> StepContent | None:
    """Return the step of a view that names run, epoch and step; None while it is being read."""
    reading = read_step(provider, view, report)
    if reading is None:
        return None
    replayed = find_replay(provider, reading.recorded) if view.layers else NO_REPLAY
    framed = find_framed(report, view)
    proof = None if framed is None else framed.proof
    about = ""
    on_ranks: tuple[int, ...] = ()
    if not isinstance(report, RunReport):
        state = "in progress" if isinstance(report, AnalysisInProgress) else "failed"
        about = f"; analysis {state}"
    if framed is not None and proof is not None:
        excess = format_duration(proof.excess_ns)
        # A transfer over a slow link takes as long on all of its ranks.
        on_ranks = framed.ranks if framed.cause == slow_link.CAUSE.name else (proof.rank,)
        about = f"; framed: {framed.cause} of {format_ranks(on_ranks)}, {excess} too long{about}"
    marks = Marks(
        ranks=view.ranks,
        peers=() if reading.related is None else reading.related.all,
        path=replayed.path_of(view.layers),
        proof=proof,
        framed=on_ranks,
        stops=reading.stops,
    )
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
