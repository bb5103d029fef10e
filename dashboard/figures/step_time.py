"""Draw step time and MFU by step, one above the other, every step as it was."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard.theme import IDEAL, MFU, SLOW, STEP_TIME, dressed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from analysis.report import RunReport

_MOST_MARKED = 150


def step_time_figure(report: RunReport) -> go.Figure:
    """Draw actual and ideal step time in seconds over MFU in percent, on one axis of steps.

    Lines break where step numbers are not adjacent. The steps of the top
    finding are shaded; start-up steps are hollow. Without MFU, step time has
    the figure to itself.
    """
    rows = 1 if report.mfu is None else 2
    figure = make_subplots(
        rows=rows,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        row_heights=[1.0] if rows == 1 else [0.58, 0.42],
    )
    _add_step_time(figure, report)
    if report.mfu is not None:
        _add_mfu(figure, report.mfu.by_step, report.warmup_steps)
    _shade(figure, report.top_finding.steps if report.top_finding.ranks else None)
    dressed(figure, height=340, keep=f"steps {report.run}")
    figure.update_layout(hovermode="x unified", margin={"l": 62, "r": 16, "t": 28, "b": 44})
    figure.update_xaxes(title_text="step", row=rows, col=1)
    figure.update_yaxes(title_text="step time (s)", rangemode="tozero", row=1, col=1)
    return figure


def _add_step_time(figure: go.Figure, report: RunReport) -> None:
    warmup = set(report.warmup_steps)
    ideal, _ = _broken(report.ideal_s_by_step)
    actual, seconds = _broken(report.actual_s_by_step)
    if report.ideal_s_by_step:
        figure.add_trace(
            go.Scatter(
                name="ideal",
                x=ideal,
                y=_broken(report.ideal_s_by_step)[1],
                mode="lines",
                line={"color": IDEAL, "width": 1.5, "dash": "dash"},
                hovertemplate="%{y:.3f} s",
            ),
            row=1,
            col=1,
        )
    figure.add_trace(
        go.Scatter(
            name="step time",
            x=actual,
            y=seconds,
            mode=_mode(actual),
            line={"color": STEP_TIME, "width": 2},
            marker={"size": 5, "symbol": _symbols(actual, warmup), "color": STEP_TIME},
            hovertemplate="%{y:.3f} s",
        ),
        row=1,
        col=1,
    )


def _add_mfu(figure: go.Figure, by_step: Mapping[int, float], warmup: Sequence[int]) -> None:
    steps, ratios = _broken(by_step)
    figure.add_trace(
        go.Scatter(
            name="MFU",
            x=steps,
            y=ratios,
            mode=_mode(steps),
            line={"color": MFU, "width": 2},
            marker={"size": 5, "symbol": _symbols(steps, set(warmup)), "color": MFU},
            hovertemplate="%{y:.1%}",
        ),
        row=2,
        col=1,
    )
    figure.update_yaxes(title_text="MFU (%)", tickformat=".3~%", rangemode="tozero", row=2, col=1)


def _broken(by_step: Mapping[int, float]) -> tuple[list[int], list[float | None]]:
    """Return the series in step order with a hole between steps that are not adjacent."""
    steps: list[int] = []
    values: list[float | None] = []
    ordered = sorted(by_step)
    for step, following in pairwise([*ordered, None]):
        if step is None:
            continue
        steps.append(step)
        values.append(by_step[step])
        if following is not None and following != step + 1:
            steps.append(step + 1)
            values.append(None)
    return steps, values


def _symbols(steps: Sequence[int], warmup: set[int]) -> list[str]:
    return ["circle-open" if step in warmup else "circle" for step in steps]


def _mode(steps: Sequence[int]) -> str:
    return "lines+markers" if len(steps) <= _MOST_MARKED else "lines"


def _shade(figure: go.Figure, steps: tuple[int, int] | None) -> None:
    if steps is None:
        return
    figure.add_vrect(
        x0=steps[0] - 0.5,
        x1=steps[1] + 0.5,
        fillcolor=SLOW,
        opacity=0.1,
        line_width=0,
        layer="below",
        row="all",
        col=1,
    )
