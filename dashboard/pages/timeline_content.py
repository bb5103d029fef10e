"""Drawing of a step on the timeline: as bars, or as pixels if it has too many spans for bars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dash import dcc, html

from rankscope.analysis.drawing.timeline import StepTimeline
from rankscope.analysis.report.text import (
    format_count,
    format_duration,
    format_range,
    format_seconds,
)
from rankscope.tracer.span import NS_PER_MS

from ..figures.timeline import hover_texts, timeline_figure
from ..figures.timeline_axes import Marks
from ..figures.timeline_canvas import canvas_document
from ..figures.timeline_raster import raster_figure, raster_note
from ..text import escape, format_place
from .components import announced, canvas, card, graph, labelled
from .proof_picture import proof_picture
from .timeline_controls import Shown, make_scale, step_chooser, timeline_controls
from .timeline_overview import around_step
from .timeline_selection import selection_controls

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import Viewport
    from rankscope.analysis.report.report import Finding, RunReport

    from ..address import View
    from .timeline_controls import Revisions, Scale, StepChoices
    from .timeline_step import Replayed, ShownStep

    Drawn = tuple[dict[str, Any], dict[str, Any]]
    """The figure of a step, and what is drawn beneath it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContent:
    """A step as the page shows it."""

    view: View
    title: str
    about: str
    stepper: list[Component]
    controls: list[Component]
    figure: dict[str, Any]
    """Axes, legend and marks."""

    on_canvas: dict[str, Any]
    """What is drawn beneath them, as of `canvas_document`."""

    note: str
    scale: Scale
    beneath: list[Component] = field(default_factory=list)
    """What the replay says, or a step that ended, beneath the step."""

    selection: list[Component] = field(default_factory=list)
    """The card of what is selected."""

    is_pending: bool = False
    """Whether spans or a replay that are to be shown are still being read or made."""


def step_parts(
    content: StepContent, revisions: Revisions | None, *, zoom_key: str, search: str
) -> list[Component]:
    """Return the parts of the page.

    Args:
        revisions: Of what is shown; None: it is pending.
        zoom_key: A figure with the same one keeps a reader's zoom.
        search: As in `Shown`.
    """
    layout, traces = content.figure["layout"], content.figure["data"]
    layout["uirevision"] = f"{layout['uirevision']} {zoom_key}"
    # The assets make the legend: plotly's takes twice the lines on a phone, and its time.
    layout["showlegend"] = False
    legend = [
        trace if _is_key(trace) else {"name": trace["name"], "line": trace["line"]}
        for trace in traces
        if trace.get("showlegend", True)
    ]
    figure = {**content.figure, "data": [trace for trace in traces if not _is_key(trace)]}
    part = "timeline-graph"
    on_canvas = canvas_document(part, {**content.on_canvas, "legend": legend}, layout)
    shown = Shown(
        run=content.view.run,
        epoch=content.view.epoch,
        step=content.view.step,
        revisions=revisions,
        scale=content.scale,
        search=search,
    )
    return [
        dcc.Store(id="timeline-shown", data=shown.model_dump()),
        dcc.Store(id="timeline-graph-pointed"),
        dcc.Store(id="timeline-graph-texts"),
        html.Div(
            [
                html.H1(content.title, id="timeline-title"),
                html.Div(content.stepper, id="timeline-stepper", className="stepper"),
                html.Div(content.controls, id="timeline-controls", className="controls"),
                *selection_controls(),
            ],
            className="controls timeline-bar",
        ),
        html.P(content.about, id="timeline-about", className="about"),
        around_step(),
        html.Div(content.selection, id="timeline-selection", **announced()),
        card(
            html.Div(
                id="timeline-legend", className="legend", role="group", **labelled("kinds of spans")
            ),
            graph(part, figure, selects=True, beneath=canvas(part, on_canvas)),
            html.P(content.note, id="timeline-note", className="note"),
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
        html.Div(content.beneath, id="timeline-replay"),
    ]


def _is_key(trace: dict[str, Any]) -> bool:
    """Return whether a trace has no points, but an entry of the legend."""
    return bool(trace["x"] == [None])


def show_step(shown: ShownStep, choices: StepChoices, marks: Marks, *, about: str) -> StepContent:
    """Show a step or a part of it.

    Args:
        about: What is said of the marks.
    """
    step, view, rows = shown.step, shown.view, shown.rows
    figure, on_canvas = draw_step(shown, marks)
    note = "" if shown.is_whole else _viewport_note(view.viewport)
    num_spans, num_ranks = 0, len(rows.ranks)
    if isinstance(step, StepTimeline):
        num_spans = len(step.spans)
    else:
        num_spans, num_ranks = step.num_spans, step.num_ranks
        note = _viewport_note(step.viewport)
        note = f"{note} {raster_note(step, rows)} Zoom in to see single spans.".strip()
    length_ns = step.end_ns - step.begin_ns
    ideal = format_seconds(choices.ideal_s_by_step.get(step.step))
    return StepContent(
        view=view,
        title=f"Step {step.step}",
        about=f"{format_duration(length_ns)}, ideal {ideal};"
        f" {format_count(num_spans, 'span')} of {format_count(num_ranks, 'rank')},"
        f" epoch {step.epoch}{about}",
        stepper=step_chooser(view, choices),
        controls=timeline_controls(view, choices, step),
        figure=figure,
        on_canvas=on_canvas,
        note=note,
        scale=make_scale(rows, length_ns=length_ns, is_whole=shown.is_whole),
    )


def draw_step(shown: ShownStep, marks: Marks, *, with_texts: bool = False) -> Drawn:
    """Return a step as it is drawn.

    Args:
        with_texts: Whether the texts of spans are sent with them, and not when the pointer is on
            one.
    """
    if isinstance(shown.step, StepTimeline):
        figure, bars = timeline_figure(
            shown.step, shown.rows, marks, viewport=shown.view.viewport, is_whole=shown.is_whole
        )
        texts = hover_texts(shown.step) if with_texts else None
        ranks = [block[0] for block in shown.rows.blocks]
        documents = [drawn.document() for drawn in bars]
        return figure, {"bars": documents, "ranks": ranks, "texts": texts}
    figure, cells = raster_figure(shown.step, shown.rows, marks)
    return figure, {"cells": cells}


def _viewport_note(viewport: Viewport | None) -> str:
    if viewport is None:
        return ""
    begin, end = format_place(viewport.begin_ns), format_place(viewport.end_ns)
    ranks = format_count(viewport.end_row - viewport.first_row, "rank")
    return f"Part of the step: {begin} to {end}, {ranks}."


def show_replay(replayed: Replayed, ideal: Drawn | None) -> list[Component]:
    """Return what is shown beneath a step: why it has no replay, or its ideal if that is drawn."""
    if replayed.reason:
        about = f"No critical path or usual step yet: {replayed.reason}."
        if not replayed.is_pending:
            about = f"No critical path or usual step: {replayed.reason}."
        return [card(html.P(escape(about), className="quiet"))]
    replay = replayed.replay
    if ideal is None or replay is None:
        return []
    word = "step" if replay.steps[0] == replay.steps[1] else "steps"
    title = f"With usual durations, the step takes {format_duration(replay.ideal_ns)}"
    about = (
        f"{format_duration(replay.actual_ns)} passed from the end of the step before to the end of"
        " this one. Beneath, each operation takes as long as alike ones usually do"
        f" ({word} {format_range(replay.steps)}), and no host is late: the waits that are left are"
        " the schedule's. The ideal at the top has the usual delays of the hosts, and is less if"
        " steps as large took less."
    )
    return [_beneath_card(title, about, ideal, label="usual step")]


def show_card(report: RunReport, finding: Finding) -> list[Component]:
    """Return the picture of the finding whose proof is framed, as on the overview."""
    shown = proof_picture("timeline-proof", report, finding)
    return [] if shown is None else [card(html.H2(f"Proof of {finding.cause}"), shown)]


def show_ended(ended: ShownStep, drawn: Drawn) -> list[Component]:
    """Return the last step that ended, beneath the one in which the job came to a stop."""
    length_ns = ended.step.end_ns - ended.step.begin_ns
    title = f"Step {ended.step.step}, the last that ended, took {format_duration(length_ns)}"
    about = "On the same axis: what comes here after the marks above, the stopped step never did."
    return [_beneath_card(title, about, drawn, label="last step that ended")]


def draw_beneath(step: ShownStep, above: ShownStep, marks: Marks) -> Drawn:
    """Return a step as drawn for comparison, with the time and the marked ranks of another."""
    figure, content = draw_step(step, Marks(ranks=marks.ranks, peers=marks.peers), with_texts=True)
    viewport, length_ns = above.view.viewport, above.step.end_ns - above.step.begin_ns
    ends_ns = (0, length_ns) if viewport is None else (viewport.begin_ns, viewport.end_ns)
    figure["layout"]["xaxis"]["range"] = [at_ns / NS_PER_MS for at_ns in ends_ns]
    return figure, content


def _beneath_card(title: str, about: str, drawn: Drawn, *, label: str) -> Component:
    figure, content = drawn
    layout = figure["layout"]
    layout["showlegend"] = False
    layout["dragmode"] = False
    part = "timeline-ideal-graph"
    picture = graph(part, figure, beneath=canvas(part, canvas_document(part, content, layout)))
    return card(html.H2(title), html.P(about, className="about"), picture, label=label)
