"""The timeline's choosers: the order of the rows, the epoch and the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import dcc, html

from rankscope.analysis.drawing.raster import Window
from rankscope.analysis.drawing.rows import GroupBy
from rankscope.tracer.span import NS_PER_MS

from ..address import View, write_address
from ..figures.timeline_raster import lines_per_block
from .components import labelled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import StepPicture
    from rankscope.analysis.report.progress import MarkedSteps
    from rankscope.analysis.report.report import RunReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps among which a reader chooses, with what is told of them."""

    steps: tuple[int, ...]
    """Ascending."""

    epochs: tuple[int, ...]
    best: int | None
    """The one that shows the top finding best, the newest where nothing was found."""

    ideal_s_by_step: Mapping[int, float]


def steps_of_report(report: RunReport) -> Steps:
    """Return the steps of a diagnosis and those before it; best is the top finding's last one."""
    finding = report.top_finding.steps
    shown = [step for step in report.steps if finding and step <= finding[1]]
    newest = report.steps[-1] if report.steps else None
    marked = () if report.mfu is None else report.mfu.by_step
    return Steps(
        steps=tuple(sorted({*report.steps, *marked})),
        epochs=report.epochs,
        best=shown[-1] if shown else newest,
        ideal_s_by_step=report.ideal_s_by_step,
    )


def steps_of_seen(seen: MarkedSteps | None) -> Steps:
    """Return the steps that are known without a diagnosis; best is the newest."""
    steps = () if seen is None else tuple(seen.actual_s_by_step)
    return Steps(
        steps=steps,
        epochs=(0,) if seen is None else seen.epochs,
        best=steps[-1] if steps else None,
        ideal_s_by_step={},
    )


def timeline_controls(view: View, known: Steps, base_path: str) -> list[Component]:
    """Return the choosers; each is a link, so the address always holds the view."""

    def to(**changes: object) -> str:
        whole = {
            "window": None,
            **changes,
        }  # another step has other times, another order other rows
        return write_address(replace(view, **whole), base_path=base_path)  # type: ignore[arg-type]

    earlier = [step for step in known.steps if step < (view.step or 0)]
    later = [step for step in known.steps if step > (view.step or 0)]
    steps = sorted({*known.steps, view.step or 0})
    parts: list[Component] = [
        _links(
            "rows by",
            [(by.value, to(group_by=by), by is view.group_by) for by in GroupBy],
        ),
    ]
    if view.window is not None:
        parts.insert(0, dcc.Link("whole step", href=to(), className="choice"))
    if len(known.epochs) > 1:
        choices = [(str(one), to(epoch=one), one == view.epoch) for one in known.epochs]
        parts.append(_links("epoch", choices))
    parts.append(
        html.Div(
            [
                _arrow("←", "previous step", to(step=earlier[-1]) if earlier else None),
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
                _arrow("→", "next step", to(step=later[0]) if later else None),
            ],
            className="stepper",
        )
    )
    return parts


def _links(label: str, choices: list[tuple[str, str, bool]]) -> Component:
    return html.Div(
        [
            html.Span(label, className="quiet"),
            html.Div(
                [
                    dcc.Link(word, href=href, className="choice chosen" if chosen else "choice")
                    for word, href, chosen in choices
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


WHOLE = Window(begin_ns=0, end_ns=0, first_row=0, end_row=0)
"""What a double-click asks for."""


def zooms_of(picture: StepPicture) -> list[float]:
    """Return what turns places of the figure into a window.

    These are the place of the uppermost rank, ranks per line, the lines, and the bounds in ms.
    """
    raster, window = picture.raster, picture.window
    num_lines = len(raster.rank_blocks) * lines_per_block(picture)
    # A window's first line may begin above it: lines of several ranks are shown whole.
    line_ranks = len(raster.rank_blocks[0])
    first_row = 0 if window is None else window.first_row // line_ranks * line_ranks
    bounds = raster.edges_ns[[0, -1]] / NS_PER_MS
    return [
        first_row, line_ranks / lines_per_block(picture), num_lines, float(bounds[0]),
        float(bounds[1]),
    ]  # fmt: skip


def zoomed(moved: dict[str, Any], zooms: list[float] | None) -> Window | None:
    """Return what a reader zoomed to in a picture; `WHOLE` on a double-click, None: nothing."""
    if zooms is None:
        return None
    if moved.get("xaxis.autorange") or moved.get("yaxis.autorange"):
        return WHOLE
    first_row, line_ranks, num_lines, left, right = zooms
    x = sorted((moved.get("xaxis.range[0]", left), moved.get("xaxis.range[1]", right)))
    y = sorted((moved.get("yaxis.range[0]", -0.5), moved.get("yaxis.range[1]", num_lines - 0.5)))
    lines = (max(math.floor(y[0] + 0.5), 0), min(math.ceil(y[1] + 0.5), num_lines))
    begin, end = max(x[0], left), min(x[1], right)
    whole = (lines[0] <= 0 and lines[1] >= num_lines) and (begin <= left and end >= right)
    if whole or begin >= end or lines[0] >= lines[1]:
        return None
    return Window(
        begin_ns=round(begin * NS_PER_MS),
        end_ns=max(round(end * NS_PER_MS), round(begin * NS_PER_MS) + 1),
        first_row=int(first_row + lines[0] * line_ranks),
        end_row=math.ceil(first_row + lines[1] * line_ranks),
    )
