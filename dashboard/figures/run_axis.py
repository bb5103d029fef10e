"""The whole run on one axis: each step as a column, with lanes for what happened in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.report import Severity
from rankscope.analysis.report.text import format_range, format_ranges

from ..theme import INK, KIND_COLORS, MFU, PATH, SLOW, STEP_TIME, base_layout
from .timeline_axes import left_margin
from .timeline_canvas import PALE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.analysis.breakdown.run_history import RunHistory
    from rankscope.analysis.report.report import Finding, RunReport

STRIP_HEIGHT = 76
"""Pixels of the run, and of the whole step beside it: the same for all runs, so that nothing
beneath moves when they are drawn."""

MAX_LABELLED = 6
"""Steps up to which each has its number: plotly would label halves of them."""

MAX_FINDINGS = 2
"""Lanes of findings, of those that matter most."""

_LANE = 11
"""Pixels of a lane."""

_MARGINS = 26
_CHECKPOINT = next(color for kind, color in KIND_COLORS.items() if kind.value == "checkpoint")


def run_axis_figure(
    report: RunReport,
    history: RunHistory | None,
    *,
    step: int | None,
    links: Mapping[Finding, str],
) -> dict[str, Any]:
    """Draw step times as columns, and lanes of MFU, findings, planned pauses and restarts.

    Columns of steps that were not analysed, because the run is too large, are pale.

    Args:
        history: Its epochs; None: unknown.
        step: The step that is marked as shown.
        links: The query of the view that proves each finding; a click on its lane leads there. A
            click elsewhere leads to the step.

    Returns:
        The plain document that the browser gets.
    """
    analysed = report.actual_s_by_step
    recorded = {} if history is None else history.seconds_by_step
    seconds = {**recorded, **analysed}
    harmless = (Severity.MINOR, Severity.NONE)
    severe = [one for one in report.findings if one.severity not in harmless and one.steps]
    findings = severe[:MAX_FINDINGS]
    ranges = [each.steps for each in findings if each.steps is not None]
    late = {one for first, last in ranges for one in range(first, last + 1)}
    pauses = {one.step: one.name for one in report.common_pauses}
    pauses |= {one: pauses.get(one, "planned pause") for one in report.planned_steps}
    restarts = [] if history is None else [one.steps[0] for one in history.epochs[1:]]
    lanes: list[dict[str, Any]] = []
    names: list[str] = []

    def add(name: str, **trace: Any) -> None:  # noqa: ANN401  # plotly's properties
        heights = [len(names)] * len(trace["x"])
        lanes.append({"yaxis": "y2", "showlegend": False, **trace, "y": heights})
        names.append(name)

    for each in findings:
        first, last = each.steps or (0, 0)
        where = format_ranges(each.ranks, max_ranges=3) if each.ranks else "all ranks"
        add(
            each.cause,
            type="scatter",
            mode="lines+markers",
            x=[first, last],
            line={"color": SLOW, "width": 9},
            marker={"color": SLOW, "size": 9, "symbol": "square"},
            customdata=[links.get(each, "")] * 2,
            hovertemplate=f"{each.cause}, {where}, steps {format_range(each.steps)}<br>"
            "click for the proof<extra></extra>",
        )
    if pauses:
        add(
            "pauses",
            type="scatter",
            mode="markers",
            x=list(pauses),
            marker={"color": _CHECKPOINT, "size": 10, "symbol": "diamond"},
            text=list(pauses.values()),
            hovertemplate="step %{x}: %{text}<extra></extra>",
        )
    if restarts:
        add(
            "restarts",
            type="scatter",
            mode="markers",
            x=restarts,
            marker={"color": INK, "size": 11, "symbol": "triangle-right"},
            hovertemplate="restart before step %{x}<extra></extra>",
        )
    columns = {
        "type": "bar",
        "x": list(seconds),
        "y": list(seconds.values()),
        "marker": {
            "color": [SLOW if one in late else STEP_TIME for one in seconds],
            "opacity": [1 if one in analysed else PALE for one in seconds],
        },
        "showlegend": False,
        "text": ["" if one in analysed else ", not analysed" for one in seconds],
        "textposition": "none",
        "hovertemplate": "step %{x}: %{y:.3s}s%{text}<extra></extra>",
    }
    numbers = {*seconds, *({} if report.mfu is None else report.mfu.by_step)}
    curve = [] if report.mfu is None else [_mfu_curve(report.mfu.by_step)]
    layout = _layout(names, has_mfu=bool(curve), step=step, zoom_key=report.run)
    if len(numbers) <= MAX_LABELLED:
        layout["xaxis"].update(tickvals=sorted(numbers))
    return {"data": [columns, *curve, *lanes], "layout": layout}


def _mfu_curve(by_step: Mapping[int, float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(by_step),
        "y": list(by_step.values()),
        "yaxis": "y3",
        "line": {"color": MFU, "width": 2},
        "showlegend": False,
        "hovertemplate": "step %{x}: MFU %{y:.1%}<extra></extra>",
    }


def _layout(names: list[str], *, has_mfu: bool, step: int | None, zoom_key: str) -> dict[str, Any]:
    lanes = _LANE * len(names) / (STRIP_HEIGHT - _MARGINS)
    layout = base_layout(height=STRIP_HEIGHT, zoom_key=f"run {zoom_key}")
    layout.update(
        margin={"l": left_margin((), (*names, "0.25 s")), "r": 44, "t": 4, "b": _MARGINS - 4},
        dragmode="pan",
        bargap=0.15,
        hovermode="closest",
    )
    layout["xaxis"].update(showgrid=False, anchor="free", position=0, tickangle=0)
    layout["yaxis"].update(
        domain=[lanes + 0.08, 1],
        rangemode="tozero",
        ticksuffix=" s",
        nticks=2 if names[1:] else 3,
        fixedrange=True,
    )
    plain = {"showgrid": False, "zeroline": False, "fixedrange": True, "automargin": False}
    layout["yaxis2"] = {
        **plain,
        "domain": [0, max(lanes, 0.01)],
        "range": [len(names) - 0.5, -0.5],
        "tickvals": list(range(len(names))),
        "ticktext": names,
        "tickfont": {"size": 10},
        "anchor": "x",
    }
    layout["annotations"] = [
        {
            "text": "step",
            "x": 0,
            "y": 0,
            "xref": "paper",
            "yref": "paper",
            "xanchor": "right",
            "yanchor": "top",
            "xshift": -8,
            "yshift": -3,
            "showarrow": False,
        }
    ]
    if has_mfu:
        layout["yaxis3"] = {
            **plain,
            "domain": [lanes + 0.08, 1],
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "tickformat": ".0%",
            "tickmode": "auto",  # an axis over another would take the places of that one's ticks
            "nticks": 3,
        }
        # A title beside the labels would be over them on a phone.
        name = f'<span style="color:{MFU}">MFU</span>'
        right = {"text": name, "x": 1, "xanchor": "left", "xshift": 12}
        layout["annotations"].append({**layout["annotations"][0], **right})
    if step is not None:
        layout["shapes"] = [
            {
                "type": "rect",
                "name": "shown step",
                "x0": step - 0.5,
                "x1": step + 0.5,
                "xref": "x",
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "fillcolor": "rgba(134,142,150,0.2)",
                "line": {"color": PATH, "width": 1.5},
                "layer": "below",
            }
        ]
    return layout
