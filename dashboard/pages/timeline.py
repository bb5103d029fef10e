"""The timeline page: one step of one run, with a row for each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update

from rankscope.analysis.diagnose import ends_run
from rankscope.analysis.drawing.rows import RowOrder, rank_by_excess
from rankscope.analysis.drawing.selection import (
    choose_finding,
    find_proof,
    find_stop,
    frame_stop,
)
from rankscope.analysis.drawing.timeline import select_ranks
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.dashboard.records.progress import AnalysisInProgress
from rankscope.tracer.span import NS_PER_MS

from ..address import TIMELINE, WHOLE, View, read_address, view_finding, write_address
from ..callback_checks import Post, Ticks, takes
from ..figures.excess import shown_excess
from ..figures.timeline import bar_blocks, hover_texts
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
from .timeline_content import (
    OUTPUTS,
    Content,
    Drawing,
    choose_bars,
    fits_bars,
    show_part,
    show_timeline,
    slowest_note,
    stop_note,
    whole_note,
)
from .timeline_controls import (
    Revisions,
    Shown,
    StepChoices,
    choices_from_marks,
    choices_from_report,
)
from .timeline_layers import NO_REPLAY, find_replay, register_layers, show_replay
from .timeline_overview import around_step, minimap_place, register_around
from .timeline_selection import register_selection, selection_controls

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import StepPicture
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.dashboard.records.progress import AnalysisFailed

    from ..provider import ReportProvider
    from .timeline_selection import ShownSpans


REFINE_MS = 500
"""Pause before a page asks again for spans or a replay that were not ready."""

STATE_AGE_NS = QUIET_MS * NS_PER_MS
"""Age of the state of the run, which sets when the page asks again."""

MAX_STOPPED = 64
"""Ranks of a large step that are read for when it came to a stop."""

MAX_SLOWEST = 64
"""Ranks of a large step that are read when the slowest ones are on top."""


class DescribePost(Post):
    """The values that `describe` takes."""

    picture: int
    """Number of the picture that the assets have drawn."""

    search: str | None
    shown: Shown


class RefreshPost(Post):
    """The values that `refresh` takes."""

    asked: str | None
    """The query that the assets ask for: not that of a zoom of what is loaded."""

    num_ticks: Ticks
    fallback_ticks: Ticks
    shown: Shown
    search: str | None


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
        partial(_shown_spans, provider),
        partial(find_replay, provider),
        base_path=base_path,
    )
    register_layers(app)
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
    @takes(RefreshPost)
    def refresh(post: RefreshPost) -> tuple[Any, ...]:
        shown = post.shown
        unchanged = *(no_update,) * (len(OUTPUTS) - 1), next_tick(post.num_ticks)
        num_views = shown.num_views
        # The answer to an address is dropped if a timer fires meanwhile: then that is the question.
        if post.asked == shown.asked:
            view = replace(read_address(TIMELINE, post.search or ""), run=shown.run)
            if view.step is None and shown.step is not None:
                # A job that trains on must not take the step away that a user looks at.
                view = replace(view, epoch=shown.epoch, step=shown.step)
            revisions = _revisions(provider, shown.run, shown.epoch, shown.step)
            if shown.revisions is not None and shown.revisions == revisions:
                return unchanged
        else:
            view = read_address(TIMELINE, post.asked or "")
            num_views += 1
        content = replace(
            _request(provider, view, base_path), num_views=num_views, asked=post.asked
        )
        if content.is_pending and shown.revisions is None and num_views == shown.num_views:
            return unchanged  # as before
        return content.outputs(post.num_ticks, before=shown)

    @app.callback(
        Output("timeline-graph-texts", "data"),
        Input("timeline-graph-pointed", "data"),
        State("url", "search"),
        State("timeline-shown", "data"),
        prevent_initial_call=True,
    )
    @takes(DescribePost)
    def describe(post: DescribePost) -> dict[str, Any]:
        found = _shown_spans(provider, post.search, post.shown)
        texts = [] if found is None else hover_texts(found[1])
        return {"picture": post.picture, "texts": texts}

    app.clientside_callback(  # type: ignore[no-untyped-call]
        ClientsideFunction("canvas", "describe"),
        Input("timeline-graph-texts", "data"),
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
    view = _choose(_at_proof(view, found), choices)
    if view.step is None:
        return Content(view=view, problem=[reading_steps(run_id)], interval_ms=SOON_MS)
    epoch, step = view.epoch or 0, view.step
    revisions = _revisions(provider, run_id, epoch, step)
    findings = found.findings if isinstance(found, RunReport) else ()
    proof = find_proof(findings, epoch=epoch, step=step, ranks=view.ranks)
    content = _draw_step(provider, Drawing(view, choices, base_path, proof=proof), found)
    if content is None:
        return Content(view=view, problem=[drawing_step(run_id, step)], interval_ms=SOON_MS)
    is_analysing = isinstance(found, AnalysisInProgress)
    interval_ms = SOON_MS if is_analysing else poll_interval_ms(runs, run_id)
    return replace(
        content,
        revisions=None if content.is_pending else revisions,
        about=f"{content.about}{_missing_analysis(found)}",
        interval_ms=REFINE_MS if content.is_pending else interval_ms,
    )


def _draw_step(
    provider: ReportProvider,
    draw: Drawing,
    found: RunReport | AnalysisInProgress | AnalysisFailed,
) -> Content | None:
    """Return the step of a view that names run, epoch and step; None while it is being read."""
    read = _read_step(provider, draw.view, found)
    picture, timeline = read.picture, read.timeline
    recorded = picture or timeline
    replayed, notes = NO_REPLAY, []
    if draw.view.layers and recorded is not None:
        replayed = find_replay(provider, recorded)
    if picture is not None and timeline is not None:
        notes.append(slowest_note(timeline, picture))
    if read.stop_ns is not None and recorded is not None:
        notes.append(stop_note(read.stop_ns))
        if read.view != draw.view:
            notes.append(whole_note(recorded))
    draw = replace(draw, view=read.view)
    marked = replace(draw, path=replayed.path_of(draw.view.layers))
    if timeline is not None:
        content = show_timeline(marked, timeline)
    elif picture is not None:
        whole = read.view if picture.viewport else replace(read.view, viewport=None)
        part = provider.viewport_spans(picture)
        content = show_part(replace(marked, view=whole), picture, part)
    else:
        return None
    ideal = None
    if replayed.found is not None and "ideal" in draw.view.layers:
        drawn = replace(replayed.found.ideal, ranking=_ranking(found, draw.view))
        if timeline is not None:
            drawn = select_ranks(drawn, set(timeline.spans.rank.tolist()))
        shown = show_timeline(replace(draw, proof=None, with_texts=True), drawn)
        ideal = (shown.figure, shown.on_canvas)
    return replace(
        content,
        note=" ".join([*notes, content.note]).strip(),
        beneath=show_replay(replayed, ideal),
        is_pending=content.is_pending or replayed.is_pending,
    )


class _Read(NamedTuple):
    """A step as it was read for a view."""

    view: View
    """It shows the step until its stop, unless the address names a part or the whole of it."""

    picture: StepPicture | None
    timeline: StepTimeline | None
    """All spans, or those of a picture's slowest ranks; None: it is shown as the picture."""

    stop_ns: int | None
    """When it came to a stop, as of `find_stop`."""


def _read_step(
    provider: ReportProvider,
    view: View,
    found: RunReport | AnalysisInProgress | AnalysisFailed | None,
) -> _Read:
    """Return the step of a view that names run, epoch and step; nothing while it is being read."""
    run_id = str(view.run)
    place: Any = {"epoch": view.epoch or 0, "step": view.step or 0}
    picture = provider.picture(run_id, **place, order=view.order, viewport=view.viewport)
    ranking = _ranking(found, view)
    timeline = None
    if picture is None:
        timeline = provider.timeline(run_id, **place)
    elif view.order is RowOrder.EXCESS:
        timeline = provider.rank_spans(picture, ranking[:MAX_SLOWEST])
    seen = timeline
    if seen is None and picture is not None and _ends_in(found, view):
        seen = provider.rank_spans(picture, picture.ranks[:: len(picture.ranks) // MAX_STOPPED + 1])
    stop_ns = None if seen is None else find_stop(seen)
    frame = None if stop_ns is None else frame_stop(stop_ns)
    is_asked = view.show == WHOLE or view.viewport is not None
    if frame and seen and not is_asked and frame.end_ns < seen.end_ns - seen.begin_ns:
        view = replace(view, viewport=frame)
        if picture is not None and timeline is None:
            picture = provider.picture(run_id, **place, order=view.order, viewport=view.viewport)
    if timeline is not None:
        timeline = replace(timeline, ranking=ranking)
    return _Read(view, picture, timeline, stop_ns)


def _ends_in(found: RunReport | AnalysisInProgress | AnalysisFailed | None, view: View) -> bool:
    """Return whether the job ended in a view's step."""
    findings = found.findings if isinstance(found, RunReport) else ()
    return any(ends_run(one) and one.steps and one.steps[1] == view.step for one in findings)


def _ranking(
    found: RunReport | AnalysisInProgress | AnalysisFailed | None, view: View
) -> tuple[int, ...]:
    """Return the ranks by their excess in a view's step; empty if unknown or of no use.

    The rank of a framed proof is the first, then the marked ones.
    """
    if not isinstance(found, RunReport) or view.order is not RowOrder.EXCESS:
        return ()
    marked, step = set(view.ranks), view.step or 0
    framed = find_proof(found.findings, epoch=view.epoch or 0, step=step, ranks=view.ranks)
    first = framed.proof.rank if framed is not None and framed.proof is not None else None
    ranks = rank_by_excess(shown_excess(found), step)
    return tuple(sorted(ranks, key=lambda rank: (rank != first, rank not in marked)))


def _missing_analysis(found: RunReport | AnalysisInProgress | AnalysisFailed) -> str:
    if isinstance(found, RunReport):
        return ""
    if isinstance(found, AnalysisInProgress):
        return "; analysis in progress"
    return "; analysis failed"


def _at_proof(view: View, found: RunReport | AnalysisInProgress | AnalysisFailed | None) -> View:
    """Return the view at the proof of the finding that an address names, if it is known."""
    if not isinstance(found, RunReport) or view.show is None or view.viewport is not None:
        return view
    finding = choose_finding(found.findings, view.show, view.ranks)
    return view if finding is None else view_finding(view, finding)


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


def _shown_spans(provider: ReportProvider, search: str | None, shown: Shown) -> ShownSpans | None:
    """Return the spans that the page shows as bars; None if it shows none."""
    if shown.run is None or shown.step is None or shown.scale is None:
        return None
    run_id, epoch, step = shown.run, shown.epoch or 0, shown.step
    view = replace(read_address(TIMELINE, search or ""), run=run_id, epoch=epoch, step=step)
    found = provider.report(run_id)
    view = _at_proof(view, found)
    view, picture, timeline, _ = _read_step(provider, view, found)
    if timeline is None and picture is not None:
        part = provider.viewport_spans(picture).found
        if part is None or not fits_bars(view, part, picture):
            return None
        return view, part, bar_blocks(part, view.order, picture.ranks, view.folded)
    if timeline is None:
        return None
    chosen = choose_bars(view, timeline)
    if chosen is None:
        return None
    drawn, picture = chosen
    ranks = None if picture is None else picture.ranks
    return view, drawn, bar_blocks(drawn, view.order, ranks, view.folded)
