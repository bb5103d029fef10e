"""The timeline's controls: choosers of rows, epoch and step, and the zoom into a picture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc  # type: ignore[import-untyped]
import numpy as np
from dash import dcc, html

from rankscope.analysis.drawing.rows import AXES, RowOrder, group_numbers, useful_orders
from rankscope.tracer.span import NS_PER_MS

from ..address import WHOLE, View, format_ranks, provable, view_proof, write_address, write_query
from ..callback_checks import AxisPlace, Posted
from ..exports import TRACE_PATH
from .components import labelled, pressed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dash.development.base_component import Component

    from rankscope.analysis.drawing.raster import StepPicture
    from rankscope.analysis.drawing.rows import RowLayout
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.dashboard.records.progress import MarkedSteps

_WORDS = {RowOrder.EXCESS: "slowest"}

TITLES = {
    "path": ("critical path", "Mark the operations that decide when the step ends (C)"),
    "ideal": ("usual step", "Show the step with usual durations and no delay, beneath (I)"),
}
"""Text and title of the button of each of `LAYERS`."""


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

    proof: Finding | None = None
    """The top finding, if a step shows it."""


class Scale(Posted):
    """The relation of a figure to the step: what turns a zoom into a viewport."""

    lines: list[int]
    """Lines of the figure from its top, ascending, between which each has as many ranks."""

    rows: list[int]
    """Ranks of the whole step above each of ``lines``."""

    num_ranks: int
    """Ranks of the whole step."""

    length_ms: AxisPlace
    """Length of the whole step."""

    is_whole: bool
    """Whether the figure has all spans of the step, so that a zoom needs no others."""


class Revisions(Posted):
    """Revisions of what the page shows."""

    run: int
    picture: int
    """It follows the run's by some seconds: late spans show when the picture is drawn anew."""


class Shown(Posted):
    """The shown state, which the page keeps in the browser."""

    run: str | None
    epoch: int | None
    step: int | None
    revisions: Revisions | None
    scale: Scale | None
    """None: there is no figure."""

    search: str = ""
    """The query of what is shown, which the address gets if it has no step; "": it is not final."""


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
        ideal_s_by_step=report.reachable_s_by_step,
        has_excess=bool(report.excess.ranks),
        proof=provable(report),
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
    view: View, choices: StepChoices, shown: StepTimeline | StepPicture
) -> list[Component]:
    """Return what chooses rows and layers. Each choice is a link: the address holds the view.

    Args:
        shown: The step: rows are ordered by an axis or host if its ranks have several.
    """
    orders = useful_orders(shown, has_excess=choices.has_excess)
    now = view.order if view.order in orders else RowOrder.RANK  # its rows are by rank too
    words = {by: _WORDS.get(by, by.value.upper() if by in AXES else by.value) for by in orders}
    rows = [(words[by], _link(view, order=by, folded=()), by is now) for by in orders]
    parts: list[Component] = [_menu(f"rows: {words[now]}", rows)]
    if len(choices.epochs) > 1:
        epochs = [(str(one), _link(view, epoch=one), one == view.epoch) for one in choices.epochs]
        parts.append(_menu(f"epoch {view.epoch}", epochs))
    numbers = group_numbers(shown, view.order)
    if len(numbers) > 1:
        folded = () if view.folded else numbers
        text, title = (
            ("unfold", "Show each rank (G)")
            if view.folded
            else ("fold", "One row for each group (G); a click on its name folds or unfolds it")
        )
        parts.append(
            html.Button(
                text,
                id="timeline-fold",
                title=title,
                className="button small",
                **{"data-fold": format_ranks(folded)},  # type: ignore[arg-type]
            )
        )
    parts.append(_layer_buttons(view.layers))
    if choices.proof is not None:
        name: list[Component | str] = [choices.proof.cause, html.Kbd("P")]
        href = write_address(view_proof(view, choices.proof))
        title = "Go to the proof of the top finding (P)"
        parts.append(dcc.Link(name, href=href, title=title, className="button small proof-link"))
    whole = _link(view, show=WHOLE)
    parts.append(dcc.Link("whole step", href=whole, title="Zoom out (0)", className="button small"))
    return [*parts, _save_menu(view)]


def _layer_buttons(layers: tuple[str, ...]) -> Component:
    return html.Div(
        [
            html.Button(
                text,
                id=f"timeline-{layer}",
                title=title,
                className="choice chosen" if layer in layers else "choice",
                **pressed(is_on=layer in layers),
            )
            for layer, (text, title) in TITLES.items()
        ],
        className="choices plain",
    )


def step_chooser(view: View, choices: StepChoices) -> list[Component]:
    """Return the chooser of the step, between links to the steps before and after it."""
    now = view.step or 0
    earlier = [step for step in choices.steps if step < now]
    later = [step for step in choices.steps if step > now]
    return [
        _arrow("←", "previous step", _link(view, step=earlier[-1]) if earlier else None),
        dmc.Select(
            id="timeline-choose-step",
            data=[
                {"value": str(step), "label": f"step {step}"}
                for step in sorted({*choices.steps, now})
            ],
            value=str(view.step),
            searchable=True,
            allowDeselect=False,
            size="xs",
            w=112,
            limit=500,
            **labelled("step"),
        ),
        _arrow("→", "next step", _link(view, step=later[0]) if later else None),
    ]


def _link(view: View, **changes: Any) -> str:  # noqa: ANN401  # fields of a view
    # No viewport: another step has other times, another order other rows.
    changes = {"viewport": None, "show": None, "span": None, "box": None, **changes}
    return write_address(replace(view, **changes))


def _save_menu(view: View) -> Component:
    """Return the links that save what is shown as a file for Perfetto.

    The assets complete them by the zoom when they are clicked.
    """
    texts = {"window": "what is shown"} | ({"marked": "marked ranks"} if view.ranks else {})
    rows = replace(view, viewport=None, show=None, layers=(), folded=())
    href = f"/{TRACE_PATH}{write_query(rows)}"
    links = [
        html.A(
            f"{text}, for Perfetto or chrome://tracing",
            href=href,
            className="perfetto",
            target="_blank",
            rel="noopener",
            **{"data-what": what},  # type: ignore[arg-type]
        )
        for what, text in texts.items()
    ]
    return html.Details(
        [html.Summary("save", className="button small"), html.Div(links, className="menu-list")],
        className="drop-down",
    )


def _menu(label: str, choices: list[tuple[str, str, bool]]) -> Component:
    links = [
        dcc.Link(text, href=href, className="chosen" if is_chosen else "")
        for text, href, is_chosen in choices
    ]
    return html.Details(
        [html.Summary(label, className="button small"), html.Div(links, className="menu-list")],
        className="drop-down",
    )


def _arrow(sign: str, label: str, href: str | None) -> Component:
    if href is None:
        return html.Span(sign, className="arrow disabled", title=f"no {label}")
    return dcc.Link(sign, href=href, title=label, className="arrow")


def make_scale(rows: RowLayout, *, length_ns: int, is_whole: bool) -> Scale:
    """Return the scale of a figure; ``length_ns`` is the whole step's."""
    sizes = np.array([0, *map(len, rows.blocks)])
    is_changed = (np.diff(sizes[1:]) != 0) | (np.diff(rows.lines, n=2) != 0)
    knots = np.unique([0, *(np.flatnonzero(is_changed) + 1).tolist(), len(rows.blocks)])
    return Scale(
        lines=[int(rows.lines[knot]) for knot in knots],
        rows=(rows.first_place + np.cumsum(sizes)[knots]).tolist(),
        num_ranks=rows.num_ranks,
        length_ms=length_ns / NS_PER_MS,
        is_whole=is_whole,
    )
