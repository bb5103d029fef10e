"""The timeline page: one step of one run, with a row for each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dash import Dash, Input, Output, State, dcc, html

from rankscope.analysis.causes import slow_link, stage_imbalance
from rankscope.analysis.causes.detector import ShownIn
from rankscope.analysis.causes.order import CAUSES
from rankscope.analysis.drawing.selection import compare_proof, find_alike
from rankscope.analysis.drawing.timeline import select_ranks
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.report.text import format_count, format_duration, format_ranks
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.dashboard.records.progress import AnalysisInProgress
from rankscope.tracer.span import KINDS, NS_PER_MS

from ..address import LAYERS, TIMELINE, WHOLE, View, write_address, write_query
from ..callback_checks import Number, checked
from ..figures.timeline import hover_texts
from ..figures.timeline_axes import Marks
from ..text import escape
from .components import QUIET_MS, SOON_MS, poll_interval_ms, register_canvas, run_in_browser
from .page import Content, Page
from .placeholders import drawing_step, no_data, no_steps, reading_steps
from .timeline_content import (
    StepContent,
    draw_beneath,
    show_card,
    show_ended,
    show_replay,
    show_step,
    step_parts,
)
from .timeline_controls import (
    Revisions,
    Shown,
    StepChoices,
    choices_from_marks,
    choices_from_report,
)
from .timeline_overview import register_around
from .timeline_selection import find_selected, show_selection, slack_words
from .timeline_step import (
    NO_REPLAY,
    find_fatal,
    find_framed,
    find_replay,
    go_to_proof,
    read_shown,
    read_step,
    show_timeline,
)

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.drawing.selection import AlikeSpan
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.report import Finding, Proof

    from ..provider import ReportProvider
    from .timeline_selection import Selected
    from .timeline_step import Analysed, ShownStep, StepReading


MAX_ALIKE_STEPS, MAX_ALIKE_RANKS = 40, 15
"""Steps and other ranks whose spans are read to be held against a selected one."""

REFINE_MS = 500
"""Pause before a page asks again for a step, spans or a replay that were not ready."""

STATE_AGE_NS = QUIET_MS * NS_PER_MS
"""Age of the state of the run, which sets when the page asks again."""


def register(app: Dash, provider: ReportProvider) -> None:
    """Follow selection, layers, step and zoom, which change the address."""
    register_around(app, provider)
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

    run_in_browser(app, "canvas.describe", Input("timeline-graph-texts", "data"))
    run_in_browser(
        app,
        "rankscope.toggleLayer",
        Output("url", "search", allow_duplicate=True),
        *(Input(f"timeline-{layer}", "n_clicks") for layer in LAYERS),
    )
    run_in_browser(
        app,
        "timeline.chooseStep",
        Output("url", "search", allow_duplicate=True),
        Input("timeline-choose-step", "value"),
        State("timeline-shown", "data"),
    )
    run_in_browser(
        app,
        "timeline.openPoint",
        Output("url", "search", allow_duplicate=True),
        Input("timeline-alike", "clickData"),
    )
    for function, source in (
        ("selectBox", Input("timeline-graph", "selectedData")),
        ("jump", Input("timeline-selection", "children")),
    ):
        run_in_browser(app, f"timeline.{function}", source)
    for function, *parts in (
        ("zoomAddress", Input("timeline-graph", "relayoutData"), State("timeline-shown", "data")),
        ("foldGroup", Input("timeline-graph", "clickAnnotationData")),
    ):
        run_in_browser(
            app,
            f"timeline.{function}",
            Output("url", "search", allow_duplicate=True),
            Output("url", "href", allow_duplicate=True),
            *parts,
        )


def _show(provider: ReportProvider, view: View) -> Content:
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
        step = _show_step(provider, chosen, choices, report)
    except EmptyRunError as error:
        return Content(problem=_no_spans(view, error))
    if step is None:
        problem = drawing_step(run_id, chosen.step)
        return Content(problem=problem, view=chosen, interval_ms=REFINE_MS, is_unfinished=True)
    if isinstance(report, AnalysisInProgress):
        interval_ms = SOON_MS
    return Content(
        children=step_parts(
            step,
            None if step.is_pending else revisions,
            zoom_key=write_address(replace(_choose(view, choices), find=None, span=None, box=None)),
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
    return write_query(view)


def _revisions(provider: ReportProvider, view: View) -> Revisions:
    run_id, picture = str(view.run), 0
    run = provider.revision(run_id)
    if view.epoch is not None and view.step is not None:
        picture = provider.picture_revision(run_id, epoch=view.epoch, step=view.step)
    return Revisions(run=run, picture=picture)


PAGE = Page(name=TIMELINE, title="Timeline", show=_show, revision=_revisions, register=register)


def _show_step(
    provider: ReportProvider, view: View, choices: StepChoices, report: Analysed
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
        # A transfer over a slow link, or the work of a stage, takes as long on all of its ranks.
        is_of_all = framed.cause in (slow_link.CAUSE.name, stage_imbalance.CAUSE.name)
        on_ranks = framed.ranks if is_of_all else (proof.rank,)
        excess = f"{format_duration(proof.excess_ns)} too long"
        # Spans of a transfer also have the wait for the last member, which is of another cause.
        is_transfer = CAUSES[framed.cause].shown_in is ShownIn.TRANSFERS
        if reading.shown.spans is not None and not is_transfer:
            excess = _compare_proof(reading.shown.spans, framed, proof) or excess
        about = f"; framed: {framed.cause} of {format_ranks(on_ranks)}, {excess}{about}"
    if reading.related is not None and isinstance(report, RunReport):
        num_others = report.world_size - len(reading.related.all)
        about = f"; {num_others:,} others are folded{about}"
    selected = find_selected(reading.shown)
    is_pending = reading.is_pending or replayed.is_pending
    slack = ""
    over_steps: tuple[AlikeSpan, ...] = ()
    if selected.facts is not None and reading.shown.spans is not None:
        of_span = find_replay(provider, reading.shown.spans)
        slack, is_pending = slack_words(of_span, selected.facts), is_pending or of_span.is_pending
        over_steps = _alike_of_other_steps(provider, reading.shown, selected, choices)
    peers = () if reading.related is None else reading.related.all
    is_of_stages = framed is not None and framed.cause == stage_imbalance.CAUSE.name
    if is_of_stages or find_fatal(report, view):  # all others are the comparison
        peers = reading.shown.rows.ranks
    marks = Marks(
        ranks=view.ranks,
        peers=peers,
        path=replayed.path_of(view.layers),
        proof=proof,
        framed=on_ranks,
        stops=reading.stops,
        span=selected.span,
        arrows=() if selected.facts is None else selected.facts.arrows,
        box=selected.box,
        sought=selected.sought,
    )
    ended = _last_ended(provider, reading, report)
    window = reading.shown.view.viewport
    if window is not None and find_fatal(report, view):
        about = f"; shown: {format_duration(window.end_ns - window.begin_ns)} of it{about}"
    if ended is not None:
        about = f"; step {ended.step.step}, the last that ended, is beneath{about}"
    content = show_step(reading.shown, choices, marks, about=about)
    ideal = None
    if replayed.replay is not None and "ideal" in view.layers:
        timeline = replayed.replay.ideal
        if reading.timeline is not None:
            timeline = replace(timeline, ranking=reading.timeline.ranking)
            timeline = select_ranks(timeline, set(reading.timeline.spans.rank.tolist()))
        shown = show_timeline(reading.shown.view, timeline)
        ideal = draw_beneath(shown, reading.shown, marks)
    return replace(
        content,
        note=" ".join([*reading.notes, content.note]).strip(),
        beneath=[
            *(
                show_replay(replayed, ideal)
                if ended is None
                else show_ended(ended, draw_beneath(ended, reading.shown, marks))
            ),
            *(
                []
                if framed is None or not isinstance(report, RunReport)
                else show_card(report, framed)
            ),
        ],
        selection=show_selection(reading.shown, selected, slack=slack, over_steps=over_steps),
        is_pending=is_pending,
    )


def _compare_proof(timeline: StepTimeline, finding: Finding, proof: Proof) -> str:
    """Return the span of a proof and alike ones in words; "" if it is none, or has none."""
    found = compare_proof(timeline, proof, finding.ranks)
    if found is None:
        return ""
    others = format_count(found.num_alike, "alike one")
    return (
        f"its {found.kind} takes {format_duration(found.duration_ns)}, the median of {others}"
        f" {format_duration(found.median_ns)}"
    )


def _last_ended(
    provider: ReportProvider, reading: StepReading, report: Analysed
) -> ShownStep | None:
    """Return the last step that ended before the one in which the job came to a stop.

    It has the rows and the time of that one. None if the job did not stop in it, or the step is
    still being read.
    """
    view = reading.shown.view
    if not isinstance(report, RunReport) or not find_fatal(report, view):
        return None
    step = max((step for step in report.steps if step < (view.step or 0)), default=None)
    if step is None:
        return None
    try:
        ended = read_step(provider, replace(view, step=step), report)
    except EmptyRunError:
        return None
    if ended is None or reading.timeline is None or ended.timeline is None:
        return None if ended is None else ended.shown
    timeline = replace(ended.timeline, ranking=reading.timeline.ranking)
    return show_timeline(replace(view, step=step), timeline)


def _alike_of_other_steps(
    provider: ReportProvider, shown: ShownStep, selected: Selected, choices: StepChoices
) -> tuple[AlikeSpan, ...]:
    """Return spans like the selected one in the steps around, of its rank and some others."""
    timeline, span = shown.spans, selected.span
    if timeline is None or span is None:
        return ()
    spans = timeline.spans
    rank = int(spans.rank[span])
    alike = sorted({one.rank for one in find_alike(timeline, span)} - {rank})
    every = len(alike) // MAX_ALIKE_RANKS + 1
    steps = sorted(choices.steps, key=lambda step: abs(step - timeline.step))[:MAX_ALIKE_STEPS]
    return provider.alike_spans(
        timeline.run,
        epoch=timeline.epoch,
        steps=tuple(step for step in steps if step != timeline.step),
        ranks=(rank, *alike[::every]),
        kind=KINDS[int(spans.kind[span])],
        name=spans.names[int(spans.name[span])],
        microbatch=int(spans.microbatch[span]),
    )


def _choose(view: View, choices: StepChoices) -> View:
    newest = choices.epochs[-1] if choices.epochs else 0
    return replace(
        view,
        epoch=newest if view.epoch is None else view.epoch,
        step=choices.best if view.step is None else view.step,
    )


def _no_spans(view: View, error: EmptyRunError) -> Component:
    reason = f"{escape(str(error))}."
    if view.step is None:  # the page chose the step: a link without one would lead back here
        return html.Div(no_data("the step to show has no spans", reason))
    other = write_address(replace(view, step=None, epoch=None))
    return html.Div(
        [
            no_data(f"step {view.step} of epoch {view.epoch or 0} has no spans", reason),
            html.P(dcc.Link("Show a step of this run that has spans", href=other)),
        ]
    )
