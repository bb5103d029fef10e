"""Waterfalls side by side, and the curve of MFU and loss over steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rankscope.analysis.breakdown.waterfall import PARTS, Part
from rankscope.analysis.breakdown.waterfall_views import WaterfallBy
from rankscope.analysis.report.report import Severity
from rankscope.analysis.report.text import format_part, format_range
from rankscope.tracer.span import NS_PER_S

from ..text import escape_for_plotly
from ..theme import IDEAL, MFU, PART_COLORS, SLOW, apply_style, axis_unit, rgba
from .run_axis import MAX_LABELLED

if TYPE_CHECKING:
    from rankscope.analysis.breakdown.run_history import RunHistory
    from rankscope.analysis.breakdown.waterfall_views import WaterfallRows
    from rankscope.analysis.report.report import RunReport

PART_WORDS = {part: format_part(part.value) for part in Part}
"""Parts of a step in plain words."""

_HEIGHT = 360
_LABEL_PX = 13
_MAX_NAMED = 6
"""Findings with a label, each a line below the one before: they may begin in one step."""

_LATE = 0.75
"""Part of the axis beyond which a label is left of the end of its finding: it would be cut."""

_CURVE_HEIGHT = 300
_LOSS_HEIGHT = 170
_MAX_MARKED = 150
"""Steps up to which each has a point."""


def waterfall_figure(rows: WaterfallRows, *, run: str) -> go.Figure:
    """Draw a stacked bar for each step, position or rank, in seconds or ms of a mean step.

    A part that is nowhere as high as a pixel has no place in the legend.
    """
    tallest_s = float(rows.seconds.sum(axis=1).max(initial=0.0))
    unit, unit_ns = axis_unit(tallest_s * NS_PER_S)
    names = [str(number) for number in rows.numbers]
    word = "stage" if rows.by is WaterfallBy.STAGE else rows.by.value
    figure = go.Figure()
    for column, part in enumerate(PARTS):
        seconds = rows.seconds[:, column]
        if not seconds.any():
            continue
        figure.add_trace(
            go.Bar(
                name=PART_WORDS[part],
                x=names,
                y=(seconds * NS_PER_S / unit_ns).tolist(),
                marker={"color": PART_COLORS[part.value], "line": {"width": 0}},
                showlegend=bool(seconds.max() >= tallest_s / _HEIGHT),
                hovertemplate=(
                    f"{word} %{{x}}: {PART_WORDS[part]} %{{y:.3~g}} {unit}<extra></extra>"
                ),
            )
        )
    apply_style(figure, height=_HEIGHT, zoom_key=f"waterfall {run} {rows.by}")
    figure.update_layout(barmode="stack", bargap=0.15, margin={"l": 62, "r": 16, "t": 8, "b": 44})
    figure.update_layout(legend={"traceorder": "normal"})
    figure.update_xaxes(type="category", title_text=word, showgrid=False, nticks=6)
    figure.update_yaxes(title_text=f"time of a step ({unit})")
    return figure


def mfu_figure(report: RunReport, history: RunHistory | None) -> go.Figure:
    """Draw MFU in percent and, if it is known, loss over steps, with all that happened marked.

    Shaded: steps of findings that matter. Triangles below: checkpoints, evaluations and other
    common pauses. Dotted: restarts.
    """
    loss = {} if history is None else history.loss_by_step
    by_step = {} if report.mfu is None else report.mfu.by_step
    rows = [name for name, held in (("MFU (%)", by_step), ("loss", loss)) if held]
    heights = [_CURVE_HEIGHT if name == "MFU (%)" else _LOSS_HEIGHT for name in rows]
    figure = make_subplots(
        rows=max(len(rows), 1), cols=1, shared_xaxes=True, vertical_spacing=0.05,
        row_heights=[height / sum(heights) for height in heights] or None,
    )  # fmt: skip
    apply_style(figure, height=sum(heights) + 40, zoom_key=f"mfu {report.run}")
    for row, name in enumerate(rows, start=1):
        is_mfu = name == "MFU (%)"
        values = {step: 100 * value for step, value in by_step.items()} if is_mfu else dict(loss)
        steps, unit = sorted(values), "% MFU" if is_mfu else "loss"
        figure.add_trace(
            go.Scatter(
                name=name,
                x=steps,
                y=[values[step] for step in steps],
                mode="lines+markers" if len(steps) <= _MAX_MARKED else "lines",
                line={"color": MFU if is_mfu else IDEAL, "width": 2},
                marker={"size": 4},
                showlegend=False,
                hovertemplate=f"step %{{x}}: %{{y:.3~f}} {unit}<extra></extra>",
            ),
            row=row, col=1,
        )  # fmt: skip
        figure.update_yaxes(title_text=name, row=row, col=1, gridcolor=rgba(IDEAL, 0.22))
        if is_mfu:
            figure.update_yaxes(rangemode="tozero", row=row, col=1)
    opened = [] if report.open_step is None else [report.open_step]
    drawn = [*by_step, *loss, *opened]
    if rows:
        ends = min(drawn), max(drawn)
        # plotly would add room, and label steps in it
        figure.update_xaxes(range=[ends[0] - 0.5, ends[1] + 0.5])
        _mark_findings(figure, report, ends)
        _mark_pauses(figure, report)
        for step in () if report.mfu is None else report.mfu.restart_steps:
            figure.add_vline(
                x=step - 0.5, line_dash="dot", line_color=IDEAL, row="all", col=1,
                annotation_text=f"restart {format_range((step, step))}", annotation_font_size=11,
            )  # fmt: skip
    figure.update_layout(margin={"l": 62, "r": 16, "t": 30, "b": 44}, hovermode="closest")
    figure.update_xaxes(gridcolor=rgba(IDEAL, 0.22), zeroline=False, tickangle=0)
    if len({*by_step, *loss}) <= MAX_LABELLED:  # plotly would label halves of steps
        figure.update_xaxes(tickmode="linear", tick0=0, dtick=1)
    figure.update_xaxes(title_text="step", row=max(len(rows), 1), col=1)
    return figure


def _mark_findings(figure: go.Figure, report: RunReport, ends: tuple[int, int]) -> None:
    late = ends[0] + _LATE * (ends[1] - ends[0])
    shown: set[tuple[int, int]] = set()
    for finding in report.findings:
        if finding.steps is None or finding.severity in (Severity.NONE, Severity.MINOR):
            continue
        first, last = finding.steps
        is_named = finding.steps not in shown and len(shown) < _MAX_NAMED
        text = escape_for_plotly(finding.cause) if is_named else ""
        line = len(shown)
        shown.add(finding.steps)
        figure.add_vrect(
            x0=first - 0.5, x1=last + 0.5, fillcolor=rgba(SLOW, 0.08), line_width=0, row=1, col=1,
            annotation_text=text, annotation_position="top right" if first > late else "top left",
            annotation_font_size=11, annotation_yshift=-_LABEL_PX * line,
        )  # fmt: skip


def _mark_pauses(figure: go.Figure, report: RunReport) -> None:
    for name, color in (
        ("checkpoint", PART_COLORS["checkpoint"]),
        ("evaluation", PART_COLORS["input"]),
        ("pause", PART_COLORS["waiting"]),
        ("late input", SLOW),
    ):
        pauses = [pause for pause in report.common_pauses if pause.name == name]
        if pauses:
            figure.add_trace(
                go.Scatter(
                    name=name,
                    x=[pause.step for pause in pauses],
                    y=[0] * len(pauses),
                    mode="markers",
                    marker={"symbol": "triangle-up", "size": 11, "color": color},
                    customdata=[pause.seconds for pause in pauses],
                    hovertemplate=f"{name} in step %{{x}}: %{{customdata:.3~g}} s<extra></extra>",
                ),
                row=1, col=1,
            )  # fmt: skip
