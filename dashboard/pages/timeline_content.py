"""Drawing of a step on the timeline: as bars, or as pixels if it has too many spans for bars."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from dash import Output, no_update

from rankscope.analysis.drawing.raster import MAX_BARS, draw_picture, fold_picture, redraw_viewport
from rankscope.analysis.drawing.timeline import cut_timeline
from rankscope.analysis.report.text import format_count, format_duration, format_seconds

from ..address import write_address
from ..figures.timeline import bar_blocks, hover_texts, single_ranks, timeline_figure
from ..figures.timeline_canvas import canvas_document
from ..figures.timeline_marks import proof_frame
from ..figures.timeline_raster import block_lines, raster_figure, raster_note
from ..text import format_place
from .components import LIVE_MS, graph_style, next_tick
from .timeline_controls import Shown, make_scale, step_chooser, timeline_controls

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import StepPicture, Stretches, Viewport
    from rankscope.analysis.drawing.timeline import StepTimeline, ViewportSpans
    from rankscope.analysis.report.report import Finding

    from ..address import View
    from .timeline_controls import Revisions, Scale, StepChoices


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


@dataclass(frozen=True, slots=True)
class Drawing:
    """Parameters that every way of drawing a step takes."""

    view: View
    choices: StepChoices
    base_path: str
    path: Stretches | None = None
    """The critical path, if it is drawn."""

    proof: Finding | None = None
    """The finding whose proof is framed."""

    with_texts: bool = False
    """Whether the texts of spans are sent with them, and not when the pointer is on one."""


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


def show_timeline(draw: Drawing, timeline: StepTimeline) -> Content:
    """Show a step of which all spans were read: as bars, or as pixels if they are too many."""
    chosen = choose_bars(draw.view, timeline)
    if chosen is not None:
        part, picture = chosen
        return show_spans(draw, part, part=picture)
    picture = draw_picture(timeline, draw.view.order, draw.view.viewport)
    view = replace(draw.view, viewport=picture.viewport)
    return show_picture(replace(draw, view=view), picture)


def choose_bars(
    view: View, timeline: StepTimeline
) -> tuple[StepTimeline, StepPicture | None] | None:
    """Return the spans of a step that a view shows as bars; None if they are too many.

    Beside them is the picture whose viewport they fill, if they are not the whole step's.
    """
    if fits_bars(view, timeline):
        return timeline, None
    if view.viewport is None:
        return None
    picture = draw_picture(timeline, view.order, view.viewport)
    part = cut_timeline(timeline, picture)
    is_shown = picture.viewport is not None and len(part.spans) and fits_bars(view, part, picture)
    return (part, picture) if is_shown else None


def fits_bars(view: View, timeline: StepTimeline, picture: StepPicture | None = None) -> bool:
    """Return whether spans are few enough for bars: those of folded groups are not drawn."""
    num_bars = len(timeline.spans)
    if view.folded and num_bars > MAX_BARS:
        ranks = None if picture is None else picture.ranks
        blocks = bar_blocks(timeline, view.order, ranks, view.folded)
        num_bars = int(np.count_nonzero(np.isin(timeline.spans.rank, single_ranks(blocks))))
    return num_bars <= MAX_BARS


def show_part(draw: Drawing, picture: StepPicture, part: ViewportSpans) -> Content:
    """Show a picture from tiles, or the spans of its viewport, once they are read."""
    if part.found is None:
        return replace(show_picture(draw, picture), is_pending=part.is_pending)
    if fits_bars(draw.view, part.found, picture):
        return show_spans(draw, part.found, part=picture)
    return show_picture(draw, redraw_viewport(picture, part.found))


def show_spans(
    draw: Drawing, timeline: StepTimeline, *, part: StepPicture | None = None
) -> Content:
    """Show spans as bars; ``part`` is the picture whose viewport they fill, if not the step."""
    view, choices = draw.view, draw.choices
    ranks = None if part is None else part.ranks
    blocks = bar_blocks(timeline, view.order, ranks, view.folded)
    num_ranks = sum(map(len, blocks))
    viewport = part.viewport if part is not None else view.viewport
    if viewport is not None and part is None:
        viewport = viewport.clip(timeline.end_ns - timeline.begin_ns, num_ranks)
    figure, bars = timeline_figure(
        timeline, view.order, viewport, ranks, view.ranks, draw.path, view.folded
    )
    lines = range(len(blocks) + 1)
    figure["layout"]["shapes"] += proof_frame(draw.proof, blocks, lines)
    return Content(
        view=replace(view, viewport=viewport),
        title=f"Step {timeline.step}",
        about=_about(draw, timeline, num_spans=len(timeline.spans), num_ranks=num_ranks),
        stepper=step_chooser(view, choices, draw.base_path),
        controls=timeline_controls(view, choices, timeline, draw.base_path),
        figure=figure,
        on_canvas={
            "bars": [one.document() for one in bars],
            "texts": hover_texts(timeline) if draw.with_texts else None,
        },
        note="" if part is None else _viewport_note(viewport),
        scale=make_scale(
            blocks,
            lines,
            length_ns=timeline.end_ns - timeline.begin_ns,
            num_ranks=num_ranks if part is None else part.num_ranks,
            first_row=None if part is None else part.first_row,
        ),
    )


def show_picture(draw: Drawing, picture: StepPicture) -> Content:
    """Show a step or a part of it as pixels."""
    view, choices = draw.view, draw.choices
    picture = fold_picture(picture, view.order, view.folded)
    figure, cells = raster_figure(picture, view.order, view.ranks, draw.path, view.folded)
    blocks = picture.raster.rank_blocks
    lines = block_lines(picture, view.order, view.folded)
    figure["layout"]["shapes"] += proof_frame(draw.proof, blocks, lines)
    return Content(
        view=view,
        title=f"Step {picture.step}",
        about=_about(draw, picture, num_spans=picture.num_spans, num_ranks=picture.num_ranks),
        stepper=step_chooser(view, choices, draw.base_path),
        controls=timeline_controls(view, choices, picture, draw.base_path),
        figure=figure,
        on_canvas={"cells": cells},
        note=f"{_viewport_note(picture.viewport)} {raster_note(picture)}"
        " Zoom in to see single spans.".strip(),
        scale=make_scale(
            blocks,
            lines,
            length_ns=picture.end_ns - picture.begin_ns,
            num_ranks=picture.num_ranks,
            first_row=picture.first_row,
        ),
    )


def slowest_note(timeline: StepTimeline, picture: StepPicture) -> str:
    """Return which of a picture's ranks a timeline has, for a note beside the figure."""
    num_shown = len(set(timeline.spans.rank.tolist()))
    return (
        f"The {num_shown:,} slowest of {format_count(picture.num_ranks, 'rank')},"
        " the slowest one on top."
    )


def stop_note(stop_ns: int) -> str:
    """Return when a step came to a stop, for a note beside the figure."""
    when = format_duration(stop_ns)
    return f"No operation began after {when}, and some that ran then did not end."


def whole_note(step: StepTimeline | StepPicture) -> str:
    """Return how to see all of a step that is shown until it came to a stop."""
    return f'"Whole step" shows all {format_duration(step.end_ns - step.begin_ns)} of it.'


def _viewport_note(viewport: Viewport | None) -> str:
    if viewport is None:
        return ""
    begin, end = format_place(viewport.begin_ns), format_place(viewport.end_ns)
    ranks = format_count(viewport.end_row - viewport.first_row, "rank")
    return f"Part of the step: {begin} to {end}, {ranks}."


def _about(
    draw: Drawing, step: StepTimeline | StepPicture, *, num_spans: int, num_ranks: int
) -> str:
    ideal_s = draw.choices.ideal_s_by_step.get(step.step)
    framed = ""
    if draw.proof is not None and draw.proof.proof is not None:
        proof = draw.proof.proof
        excess = format_duration(proof.excess_ns)
        framed = f"; framed: {draw.proof.cause} of rank {proof.rank}, {excess} too long"
    return (
        f"{format_duration(step.end_ns - step.begin_ns)}, ideal {format_seconds(ideal_s)};"
        f" {format_count(num_spans, 'span')} of {format_count(num_ranks, 'rank')},"
        f" epoch {step.epoch}{framed}"
    )
