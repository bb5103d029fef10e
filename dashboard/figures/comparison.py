"""Step time of two runs, or of two ranges of steps, as two lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from rankscope.analysis.report.text import format_seconds
from rankscope.tracer.span import NS_PER_S

from ..text import escape_for_plotly
from ..theme import IDEAL, STEP_TIME, apply_style, axis_unit

if TYPE_CHECKING:
    from rankscope.dashboard.records.page_results import RunComparison


def steps_figure(found: RunComparison, names: tuple[str, str]) -> go.Figure:
    """Draw both, each from its first step on, so that ranges of one run lie over each other."""
    figure = go.Figure()
    both = (found.first.actual_s_by_step, found.second.actual_s_by_step)
    longest_s = max((seconds for one in both for seconds in one.values()), default=0.0)
    unit, unit_ns = axis_unit(longest_s * NS_PER_S)
    for seconds, name, color in zip(both, names, (IDEAL, STEP_TIME), strict=True):
        steps = sorted(seconds)
        figure.add_trace(
            go.Scatter(
                x=list(range(len(steps))),
                y=[seconds[step] * NS_PER_S / unit_ns for step in steps],
                mode="lines+markers",
                name=escape_for_plotly(name),
                line={"color": color, "width": 1.6},
                marker={"size": 4},
                customdata=[[step, format_seconds(seconds[step])] for step in steps],
                hovertemplate="step %{customdata[0]}: %{customdata[1]}<extra>%{fullData.name}"
                "</extra>",
            )
        )
    apply_style(figure, height=280, zoom_key=f"compare {names}")
    figure.update_layout(margin={"t": 34})
    figure.update_xaxes(title_text="steps from the first one")
    figure.update_yaxes(title_text=f"step time ({unit})", rangemode="tozero")
    return figure
