"""Spans of the ranks' start-up on one axis of time, the slowest rank at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from rankscope.analysis.report.text import format_duration
from rankscope.tracer.span import SpanKind

from ..text import escape_for_plotly
from ..theme import KIND_COLORS, apply_style, axis_unit

if TYPE_CHECKING:
    from rankscope.dashboard.records.page_results import Startup, StartupSpan

_MAX_NAMED = 8
"""Parts with a colour of their own; the others are one."""

_OTHERS = "other parts"

_ROW_PX, _FRAME_PX, _LEGEND_PX = 20, 116, 20
_NUM_PER_LINE = 2
"""Names of parts in a line of the legend, on a phone."""


def start_up_figure(found: Startup) -> go.Figure:
    """Draw the spans of each of the slowest ranks where they were, the shorter ones in front."""
    unit, unit_ns = axis_unit(found.slowest[0].total_ns)
    labels = [f"rank {one.rank}" for one in found.slowest]
    figure = go.Figure()
    colors = _colors(found)
    spans_of: dict[str, list[tuple[str, StartupSpan]]] = {}
    for label, one in zip(labels, found.slowest, strict=True):
        for span in one.spans:
            name = span.name if span.name in colors else _OTHERS
            spans_of.setdefault(name, []).append((label, span))
    for name, color in [*colors.items(), (_OTHERS, KIND_COLORS[SpanKind.OTHER])]:
        spans = spans_of.get(name)
        if not spans:
            continue
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[label for label, _ in spans],
                base=[span.begin_ns / unit_ns for _, span in spans],
                x=[span.duration_ns / unit_ns for _, span in spans],
                name=escape_for_plotly(name),
                marker={"color": color},
                customdata=[
                    f"{escape_for_plotly(span.name)}, {format_duration(span.duration_ns)}"
                    for _, span in spans
                ],
                hovertemplate="%{y}: %{customdata}<extra></extra>",
            )
        )
    num_lines = -(-len(spans_of) // _NUM_PER_LINE)
    height = _FRAME_PX + _ROW_PX * len(labels) + _LEGEND_PX * max(num_lines - 1, 0)
    apply_style(figure, height=height, zoom_key="start-up")
    figure.update_layout(barmode="overlay", bargap=0.3, margin={"t": 40}, showlegend=True)
    figure.update_yaxes(autorange="reversed", type="category", categoryarray=labels, showgrid=False)
    figure.update_xaxes(title_text=f"time since the first span ({unit})", rangemode="tozero")
    return figure


def _colors(found: Startup) -> dict[str, str]:
    """Return the colour of each named part: of its kind, else one that no other part has."""
    named = found.parts[:_MAX_NAMED]
    colors = {kind: color for kind, color in KIND_COLORS.items() if kind is not SpanKind.OTHER}
    own: dict[SpanKind, str] = {}
    for part in named:
        own.setdefault(SpanKind(part.kind), part.name)
    first = {name: colors[kind] for kind, name in own.items() if kind in colors}
    free = iter([color for color in colors.values() if color not in first.values()])
    return {part.name: first.get(part.name) or next(free) for part in named}
