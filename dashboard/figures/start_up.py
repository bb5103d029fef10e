"""Bars of the ranks' start-up by part, the slowest rank at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from rankscope.analysis.report.text import format_duration

from ..text import escape_for_plotly
from ..theme import KIND_COLORS, apply_style, axis_unit

if TYPE_CHECKING:
    from rankscope.analysis.report.page_results import Startup

_MAX_NAMED = 8
"""Parts with a colour of their own; the others are one."""

_ROW_PX, _FRAME_PX = 20, 96


def start_up_figure(found: Startup) -> go.Figure:
    """Draw a stacked bar for each of the slowest ranks."""
    unit, unit_ns = axis_unit(found.slowest[0].total_ns)
    labels = [f"rank {one.rank}" for one in found.slowest]
    figure = go.Figure()
    colors = list(KIND_COLORS.values())
    for place, part in enumerate(found.parts[:_MAX_NAMED]):
        times = [one.parts_ns.get(part.name, 0) for one in found.slowest]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=labels,
                x=[time / unit_ns for time in times],
                name=escape_for_plotly(part.name),
                marker={"color": colors[place % len(colors)]},
                customdata=[format_duration(time) for time in times],
                hovertemplate="%{y}: %{customdata}<extra>%{fullData.name}</extra>",
            )
        )
    height = _FRAME_PX + _ROW_PX * len(labels)
    apply_style(figure, height=height, zoom_key="start-up")
    figure.update_layout(barmode="stack", bargap=0.3, margin={"t": 40})
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(title_text=f"time of the spans ({unit})", rangemode="tozero")
    return figure
