"""Drawing of a step on the timeline: as bars, or as pixels if it has too many spans for bars."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dash import Output, html, no_update

from rankscope.analysis.drawing.timeline import StepTimeline
from rankscope.analysis.report.text import (
    format_count,
    format_duration,
    format_range,
    format_seconds,
)

from ..address import write_address
from ..figures.timeline import hover_texts, timeline_figure
from ..figures.timeline_canvas import canvas_document
from ..figures.timeline_raster import raster_figure, raster_note
from ..text import escape, format_place
from .components import LIVE_MS, canvas, card, graph, graph_style, next_tick
from .timeline_controls import Shown, make_scale, step_chooser, timeline_controls

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import Viewport

    from ..address import View
    from ..figures.timeline_axes import Marks
    from .timeline_controls import Revisions, Scale, StepChoices
    from .timeline_step import Replayed, ShownStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The parts of the page, which are the outputs of every refresh."""

    view: View
    revisions: Revisions | None = None
    problem: list[Component] = field(default_factory=list)
    """A card that says why there is no step; it hides the rest."""

    title: str = ""
    about: str = ""
    stepper: list[Component] = field(default_factory=list)
    controls: list[Component] = field(default_factory=list)
    figure: dict[str, Any] = field(
        default_factory=lambda: {"data": [], "layout": {"uirevision": "", "height": 0}}
    )
    """Axes, legend and marks."""

    on_canvas: dict[str, Any] | None = None
    """What is drawn beneath them, as of `canvas_document`."""

    note: str = ""
    beneath: list[Component] = field(default_factory=list)
    """What the replay says, beneath the step."""

    is_pending: bool = False
    """Whether spans or a replay that are to be shown are still being read or made."""

    scale: Scale | None = None
    interval_ms: int = LIVE_MS
    """Pause before the page asks again."""

    num_views: int = 0
    asked: str | None = None
    """As in `Shown`."""

    def outputs(self, num_ticks: int | None = 0, *, before: Shown | None = None) -> tuple[Any, ...]:
        """Return the parts in the order of `OUTPUTS`, after so many ticks of their timer.

        Without those that are as they were ``before``: with a zoom, a browser takes longer for them
        than for the picture.
        """
        layout = self.figure["layout"]
        layout["uirevision"] = f"{layout['uirevision']} {self.num_views}"
        # The assets make the legend: plotly's takes twice the lines on a phone, and its time.
        layout["showlegend"] = False
        traces = self.figure["data"]
        legend = [
            one if _is_key(one) else {"name": one["name"], "line": one["line"]}
            for one in traces
            if one.get("showlegend", True)
        ]
        figure = {**self.figure, "data": [one for one in traces if not _is_key(one)]}
        shown = Shown(
            run=self.view.run,
            epoch=self.view.epoch,
            step=self.view.step,
            revisions=self.revisions,
            scale=self.scale,
            asked=self.asked,
            num_views=self.num_views,
            around=write_address(replace(self.view, viewport=None, show=None), base_path=""),
        )
        around: tuple[Any, ...] = (self.title, self.stepper, self.controls)
        if before is not None and _are_alike(before, shown):
            around = (no_update,) * 3
        title, stepper, controls = around
        return (
            shown.model_dump(),
            self.problem,
            "hidden" if self.problem else "",
            title,
            self.about,
            stepper,
            controls,
            figure,
            self.on_canvas
            and canvas_document("timeline-graph", {**self.on_canvas, "legend": legend}, layout),
            graph_style(figure),
            self.note,
            self.beneath,
            self.interval_ms,
            next_tick(num_ticks),
        )


def _is_key(trace: dict[str, Any]) -> bool:
    """Return whether a trace has no points, but an entry of the legend."""
    return bool(trace["x"] == [None])


def _are_alike(before: Shown, now: Shown) -> bool:
    """Return whether only the zoom differs."""
    is_step = before.scale is not None and now.scale is not None
    is_known = now.revisions is not None and now.revisions == before.revisions
    return is_step and is_known and now.around == before.around


OUTPUTS = (
    Output("timeline-shown", "data"),
    Output("timeline-problem", "children"),
    Output("timeline-step", "className"),
    Output("timeline-title", "children"),
    Output("timeline-about", "children"),
    Output("timeline-stepper", "children"),
    Output("timeline-controls", "children"),
    Output("timeline-graph-fresh", "data"),
    Output("timeline-graph-on-canvas", "data"),
    Output("timeline-graph", "style"),
    Output("timeline-note", "children"),
    Output("timeline-replay", "children"),
    Output("timeline-timer", "interval"),
    Output("timeline-timer", "max_intervals"),
)


def show_step(
    shown: ShownStep, choices: StepChoices, marks: Marks, *, about: str, base_path: str
) -> Content:
    """Show a step or a part of it.

    Args:
        shown: What is drawn.
        choices: The steps to choose from.
        marks: What is marked.
        about: What is said of the marks.
        base_path: Path of the application.
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
    return Content(
        view=view,
        title=f"Step {step.step}",
        about=f"{format_duration(length_ns)}, ideal {ideal};"
        f" {format_count(num_spans, 'span')} of {format_count(num_ranks, 'rank')},"
        f" epoch {step.epoch}{about}",
        stepper=step_chooser(view, choices, base_path),
        controls=timeline_controls(view, choices, step, base_path),
        figure=figure,
        on_canvas=on_canvas,
        note=note,
        scale=make_scale(rows, length_ns=length_ns, is_whole=shown.is_whole),
    )


def draw_step(
    shown: ShownStep, marks: Marks, *, with_texts: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figure of a step, and what is drawn beneath it.

    Args:
        shown: What is drawn.
        marks: What is marked.
        with_texts: Whether the texts of spans are sent with them, and not when the pointer is on
            one.
    """
    if isinstance(shown.step, StepTimeline):
        figure, bars = timeline_figure(
            shown.step, shown.rows, marks, viewport=shown.view.viewport, is_whole=shown.is_whole
        )
        texts = hover_texts(shown.step) if with_texts else None
        return figure, {"bars": [drawn.document() for drawn in bars], "texts": texts}
    figure, cells = raster_figure(shown.step, shown.rows, marks)
    return figure, {"cells": cells}


def _viewport_note(viewport: Viewport | None) -> str:
    if viewport is None:
        return ""
    begin, end = format_place(viewport.begin_ns), format_place(viewport.end_ns)
    ranks = format_count(viewport.end_row - viewport.first_row, "rank")
    return f"Part of the step: {begin} to {end}, {ranks}."


def show_replay(
    replayed: Replayed, ideal: tuple[dict[str, Any], dict[str, Any]] | None
) -> list[Component]:
    """Return what is shown beneath a step.

    Args:
        replayed: The replay.
        ideal: The figure of its ideal, and what is drawn beneath; None: it is not shown.
    """
    if replayed.reason:
        about = f"No critical path or usual step yet: {replayed.reason}."
        if not replayed.is_pending:
            about = f"No critical path or usual step: {replayed.reason}."
        return [card(html.P(escape(about), className="quiet"))]
    replay = replayed.replay
    if ideal is None or replay is None:
        return []
    figure, content = ideal
    layout = figure["layout"]
    layout["showlegend"] = False
    layout["dragmode"] = False
    word = "step" if replay.steps[0] == replay.steps[1] else "steps"
    title = f"With usual durations, the step takes {format_duration(replay.ideal_ns)}"
    about = (
        f"{format_duration(replay.actual_ns)} passed from the end of the step before to the end of"
        " this one. Beneath, each operation takes as long as alike ones usually do"
        f" ({word} {format_range(replay.steps)}), and no host is late: the waits that are left are"
        " the schedule's. The ideal at the top is less than that if steps as large took less."
    )
    part = "timeline-ideal-graph"
    drawn = graph(part, figure, beneath=canvas(part, canvas_document(part, content, layout)))
    return [card(html.H2(title), html.P(about, className="about"), drawn, label="usual step")]
