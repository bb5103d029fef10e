"""The timeline's controls: choosers of rows, epoch and step, and the zoom into a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import dcc, html
from pydantic import Field

from rankscope.analysis.drawing.raster import Viewport
from rankscope.analysis.drawing.rows import RowOrder, useful_orders
from rankscope.tracer.span import NS_PER_MS

from ..address import View, write_address
from ..callback_checks import AxisPlace, Post
from ..exports import TRACE_PATH
from ..figures.timeline_raster import lines_per_block
from .components import labelled
from .timeline_layers import layer_buttons

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import StepPicture
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.progress import MarkedSteps
    from rankscope.analysis.report.report import RunReport

_WORDS = {RowOrder.EXCESS: "slowest"}

WHOLE = Viewport(begin_ns=0, end_ns=0, first_row=0, end_row=0)
"""The viewport that a double-click asks for: the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoices:
    """The steps to choose from, with what is known of them."""

    steps: tuple[int, ...]
    """Ascending."""

    epochs: tuple[int, ...]
    best: int | None
    """The step that shows the top finding best; the newest one if nothing was found."""

    ideal_s_by_step: Mapping[int, float]
    has_excess: bool = False
    """Whether the excess of the ranks is known."""


class Scale(Post):
    """The relation of a picture's figure to the step: what turns a zoom into a viewport."""

    first_row: int
    """Row of the uppermost rank."""

    ranks_per_line: AxisPlace
    """A half if each rank has two lines."""

    num_lines: int
    num_ranks: int
    """Ranks of the whole step."""

    length_ms: AxisPlace
    """Length of the whole step."""

    is_whole: bool
    """Whether the figure has all spans of the step, so that a zoom needs no others."""


class Revisions(Post):
    """Revisions of what the page shows."""

    run: int
    picture: int
    """It follows the run's by some seconds: late spans show when the picture is drawn anew."""


class Shown(Post):
    """The shown state, which the page keeps in the browser."""

    run: str | None
    epoch: int | None
    step: int | None
    revisions: Revisions | None
    scale: Scale | None
    """None: there is no figure."""

    num_views: int
    """How often the address has changed what is shown: within one view, the zoom is kept."""


class Relayout(Post, extra="ignore"):
    """A change of a figure's axes, as plotly reports it: ends of ranges, or a reset."""

    x0: AxisPlace | None = Field(None, alias="xaxis.range[0]")
    x1: AxisPlace | None = Field(None, alias="xaxis.range[1]")
    y0: AxisPlace | None = Field(None, alias="yaxis.range[0]")
    y1: AxisPlace | None = Field(None, alias="yaxis.range[1]")
    x_reset: object = Field(None, alias="xaxis.autorange")
    y_reset: object = Field(None, alias="yaxis.autorange")


def choices_from_report(report: RunReport) -> StepChoices:
    """Return the steps of a diagnosis and earlier ones; best is the top finding's last step."""
    last_found = report.top_finding.steps[1] if report.top_finding.steps else None
    shown = [step for step in report.steps if last_found is not None and step <= last_found]
    newest = report.steps[-1] if report.steps else None
    marked = () if report.mfu is None else report.mfu.by_step
    best = shown[-1] if shown else newest
    if last_found is not None and newest is not None and last_found > newest:
        best = last_found  # no rank ends the step in which the job hangs
    return StepChoices(
        steps=tuple(sorted({*report.steps, *marked, *(() if best is None else (best,))})),
        epochs=report.epochs,
        best=best,
        ideal_s_by_step=report.ideal_s_by_step,
        has_excess=bool(report.excess.ranks),
    )


def choices_from_marks(marked: MarkedSteps | None) -> StepChoices:
    """Return the steps that are known without a diagnosis; best is the newest."""
    steps = () if marked is None else tuple(marked.actual_s_by_step)
    return StepChoices(
        steps=steps,
        epochs=(0,) if marked is None else marked.epochs,
        best=steps[-1] if steps else None,
        ideal_s_by_step={},
    )


def timeline_controls(
    view: View, choices: StepChoices, shown: StepTimeline | StepPicture, base_path: str
) -> list[Component]:
    """Return the choosers. Each choice is a link, so that the address holds the whole view.

    Args:
        view: The view.
        choices: The steps to choose from.
        shown: The step: rows are ordered by an axis or host if its ranks have several.
        base_path: Path of the application.
    """

    def link(
        *, order: RowOrder | None = None, epoch: int | None = None, step: int | None = None
    ) -> str:
        # No viewport: another step has other times, another order other rows.
        changed = replace(
            view,
            viewport=None,
            show=None,
            order=view.order if order is None else order,
            epoch=view.epoch if epoch is None else epoch,
            step=view.step if step is None else step,
        )
        return write_address(changed, base_path=base_path)

    earlier = [step for step in choices.steps if step < (view.step or 0)]
    later = [step for step in choices.steps if step > (view.step or 0)]
    steps = sorted({*choices.steps, view.step or 0})
    orders = useful_orders(
        shown.coords.values(), shown.hosts.values(), has_excess=choices.has_excess
    )
    parts: list[Component] = [
        dcc.Link("whole step", href=link(), className="whole-step"),
        layer_buttons(view.layers),
        _save_links(view, base_path),
        _links(
            "rows by",
            [(_WORDS.get(by, by.value), link(order=by), by is view.order) for by in orders],
        ),
    ]
    if len(choices.epochs) > 1:
        epochs = [(str(one), link(epoch=one), one == view.epoch) for one in choices.epochs]
        parts.append(_links("epoch", epochs))
    parts.append(
        html.Div(
            [
                _arrow("←", "previous step", link(step=earlier[-1]) if earlier else None),
                dmc.Select(
                    id="timeline-choose-step",
                    data=[{"value": str(step), "label": f"step {step}"} for step in steps],
                    value=str(view.step),
                    searchable=True,
                    allowDeselect=False,
                    size="sm",
                    w=130,
                    limit=500,
                    **labelled("step"),
                ),
                _arrow("→", "next step", link(step=later[0]) if later else None),
            ],
            className="stepper",
        )
    )
    return parts


def _save_links(view: View, base_path: str) -> Component:
    """Return the links that save what is shown as a file for Perfetto.

    The assets complete them by the zoom when they are clicked.
    """
    texts = {"window": "what is shown"} | ({"marked": "marked ranks"} if view.ranks else {})
    shown = write_address(replace(view, show=None, layers=()), base_path=base_path)
    href = f"{base_path}{TRACE_PATH}?{shown.partition('?')[2]}"
    links = [
        html.A(
            text,
            href=href,
            className="choice perfetto",
            target="_blank",
            rel="noopener",
            title="Save for Perfetto (ui.perfetto.dev) or chrome://tracing",
            **{"data-what": what},  # type: ignore[arg-type]
        )
        for what, text in texts.items()
    ]
    row = html.Div(links, className="choices plain", role="group", **labelled("save"))
    return html.Div([html.Span("Perfetto file of", className="quiet"), row], className="chooser")


def _links(label: str, choices: list[tuple[str, str, bool]]) -> Component:
    return html.Div(
        [
            html.Span(label, className="quiet"),
            html.Div(
                [
                    dcc.Link(text, href=href, className="choice chosen" if chosen else "choice")
                    for text, href, chosen in choices
                ],
                className="choices",
            ),
        ],
        className="chooser",
        role="group",
        **labelled(label),
    )


def _arrow(sign: str, label: str, href: str | None) -> Component:
    if href is None:
        return html.Span(sign, className="arrow disabled", title=f"no {label}")
    return dcc.Link(sign, href=href, title=label, className="arrow")


def figure_scale(picture: StepPicture) -> Scale:
    """Return the scale of a picture's figure."""
    blocks = picture.raster.rank_blocks
    line_ranks, num_lines = len(blocks[0]), lines_per_block(picture)
    # Lines of several ranks are shown whole, so the first one may begin above the viewport.
    first_row = (
        0 if picture.viewport is None else picture.viewport.first_row // line_ranks * line_ranks
    )
    return Scale(
        first_row=first_row,
        ranks_per_line=line_ranks / num_lines,
        num_lines=len(blocks) * num_lines,
        num_ranks=picture.num_ranks,
        length_ms=(picture.end_ns - picture.begin_ns) / NS_PER_MS,
        is_whole=False,
    )


def bars_scale(
    timeline: StepTimeline, *, num_rows: int, num_ranks: int, first_row: int | None
) -> Scale:
    """Return the scale of a figure of bars, in which each rank has a row.

    Args:
        timeline: Its spans; begin and end are the whole step's.
        num_rows: Its rows.
        num_ranks: Ranks of the whole step.
        first_row: Place of its uppermost rank; None: it has the whole step.
    """
    return Scale(
        first_row=first_row or 0,
        ranks_per_line=1.0,
        num_lines=num_rows,
        num_ranks=num_ranks,
        length_ms=(timeline.end_ns - timeline.begin_ns) / NS_PER_MS,
        is_whole=first_row is None,
    )


def read_zoom(relayout: Relayout, scale: Scale | None, shown: Viewport | None) -> Viewport | None:
    """Return the viewport that a reader zoomed or panned to, which may be beyond what is loaded.

    Args:
        relayout: The change of the axes.
        scale: Scale of the figure; None if there is none.
        shown: The viewport before; None: the whole step. An axis that did not change keeps it.

    Returns:
        `WHOLE` on a double-click, or if the whole step is in view; None if nothing changed.
    """
    if scale is None:
        return None
    if relayout.x_reset or relayout.y_reset:
        return WHOLE
    if relayout.x0 is None and relayout.y0 is None:
        return None
    before = shown or Viewport(
        begin_ns=0,
        end_ns=round(scale.length_ms * NS_PER_MS),
        first_row=0,
        end_row=scale.num_ranks,
    )
    x = _sorted(relayout.x0, relayout.x1, before.begin_ns / NS_PER_MS, before.end_ns / NS_PER_MS)
    begin_ms, end_ms = max(x[0], 0.0), min(x[1], scale.length_ms)
    first_row, end_row = before.first_row, before.end_row
    if relayout.y0 is not None or relayout.y1 is not None:
        y = _sorted(relayout.y0, relayout.y1, -0.5, scale.num_lines - 0.5)
        first, end = math.floor(y[0] + 0.5), math.ceil(y[1] + 0.5)
        first_row = max(int(scale.first_row + first * scale.ranks_per_line), 0)
        end_row = min(math.ceil(scale.first_row + end * scale.ranks_per_line), scale.num_ranks)
    if begin_ms >= end_ms or first_row >= end_row:
        return None
    if (begin_ms, end_ms) == (0.0, scale.length_ms) and (first_row, end_row) == (
        0,
        scale.num_ranks,
    ):
        return WHOLE
    begin_ns = round(begin_ms * NS_PER_MS)
    return Viewport(
        begin_ns=begin_ns,
        end_ns=max(round(end_ms * NS_PER_MS), begin_ns + 1),
        first_row=first_row,
        end_row=end_row,
    )


def _sorted(
    one: float | None, other: float | None, default_one: float, default_other: float
) -> tuple[float, float]:
    """Return the ends of a range ascending; an end that did not change has its default."""
    ends = default_one if one is None else one, default_other if other is None else other
    return min(ends), max(ends)
