"""Lines over steps, without smoothing: step time above MFU, and time by kind of span."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rankscope.analysis.report.text import format_seconds
from rankscope.tracer.span import KINDS, NS_PER_S, SpanKind

from ..theme import (
    IDEAL,
    KIND_COLORS,
    MFU,
    SLOW,
    STEP_TIME,
    apply_style,
    axis_unit,
    blank_figure,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Sized

    from rankscope.analysis.report.report import RunReport
    from rankscope.dashboard.records.progress import MarkedSteps, MeanKindTimes

_MAX_MARKED = 150
"""Steps of an axis up to which each has a point."""

_BLANK_HEIGHT = 80
_KINDS_HEIGHT = 300

_BEYOND_RATIO, _MAX_BEYOND_RATIO = 0.08, 0.2
"""Distance between the marks of two kinds beyond the axis, and of all, as parts of the axis."""

NESTING = frozenset({SpanKind.WAIT, SpanKind.HOST})
"""Kinds whose spans contain others or lie in them: their time is part of another line."""

_Places = dict[str, "int | None"]
"""Labels on the axis of steps, in order, each with its step; None for steps that are missing."""


def step_time_figure(report: RunReport) -> go.Figure:
    """Draw the steps of a diagnosis; see `series_figure`."""
    top = report.top_finding
    return series_figure(
        report.run,
        report.actual_s_by_step,
        report.reachable_s_by_step,
        mfu_by_step=None if report.mfu is None else report.mfu.by_step,
        warmup_steps=report.warmup_steps,
        shaded=top.steps if top.ranks else None,
    )


def marked_steps_figure(run_id: str, steps: MarkedSteps) -> go.Figure:
    """Draw the steps that are known without a diagnosis; see `series_figure`."""
    mfu = None if steps.mfu is None else steps.mfu.by_step
    return series_figure(run_id, steps.actual_s_by_step, {}, mfu_by_step=mfu)


def open_marks(
    values: Sequence[float | None], *, lowest: float, highest: float
) -> tuple[list[float | None], list[str]]:
    """Return places and symbols of values of a step that never ended.

    The axis fits the steps that ended: what is beyond them is a triangle at its end.

    Args:
        values: On the axis of the figure; None if unknown.
        lowest: The smallest value that the axis has to show.
        highest: The largest one.
    """
    places = [None if one is None else min(max(one, lowest), highest) for one in values]
    symbols = [
        "circle-open" if one is None or lowest <= one <= highest
        else "triangle-up" if one > highest else "triangle-down"
        for one in values
    ]  # fmt: skip
    return places, symbols


def kind_times_figure(
    run_id: str, times: MeanKindTimes | None, open_step: int | None = None
) -> go.Figure:
    """Draw the mean time per rank of each kind of span in seconds or ms, on one axis of steps.

    Of communication, the time that no compute hides. Spans of the kinds in `NESTING` are left out.
    The times of a step that never ended are single marks, and the axis fits the other steps.
    """
    if times is None:
        return blank_figure(
            "Not summed up yet:<br>the server does so within minutes", height=_BLANK_HEIGHT
        )
    drawn = {
        kind: times.exposed_s.get(kind, by_step)
        for kind, by_step in times.busy_s.items()
        if kind not in NESTING
    }
    places = _places(step for by_step in drawn.values() for step in by_step)
    ended: dict[SpanKind, Mapping[int, float]] = {
        kind: {step: s for step, s in by_step.items() if open_step is None or step < open_step}
        for kind, by_step in drawn.items()
    }
    if not any(ended.values()):
        ended = drawn
    longest_s = max((max(by_step.values(), default=0.0) for by_step in ended.values()), default=0.0)
    unit, unit_ns = axis_unit(longest_s * NS_PER_S)
    figure = go.Figure()
    kinds = sorted(drawn, key=KINDS.index)
    # Beyond the axis, each above those of other kinds, which would hide it.
    beyond = [kind for kind in kinds if max(drawn[kind].values(), default=0.0) > longest_s]
    row_s = longest_s * min(_BEYOND_RATIO, _MAX_BEYOND_RATIO / max(len(beyond), 1))
    for kind in kinds:
        steps, seconds = _line(ended[kind], places)
        waits = times.wait_s.get(kind, {})
        figure.add_trace(
            go.Scatter(
                name=kind.value,
                x=steps,
                y=_in_unit(seconds, unit_ns),
                mode=_mode(steps),
                line={"color": KIND_COLORS[kind], "width": 2},
                marker={"size": 5, "color": KIND_COLORS[kind]},
                customdata=[
                    f", waiting {format_seconds(wait)}" if wait else ""
                    for wait in (_value(waits, places[step]) for step in steps)
                ],
                hovertemplate=f"%{{y:.3~g}} {unit}%{{customdata}}",
            )
        )
        opened = {step: s for step, s in drawn[kind].items() if step not in ended[kind]}
        marks, symbols = open_marks(list(opened.values()), lowest=0.0, highest=longest_s)
        if kind in beyond:
            end_s = longest_s + row_s * (1 + beyond.index(kind))
            marks = [
                end_s if symbol == "triangle-up" else place
                for place, symbol in zip(marks, symbols, strict=True)
            ]
        if opened:
            figure.add_trace(
                go.Scatter(
                    name=kind.value,
                    showlegend=False,
                    x=list(map(str, opened)),
                    y=_in_unit(marks, unit_ns),
                    mode="markers",
                    marker={"size": 9, "symbol": symbols, "color": KIND_COLORS[kind]},
                    cliponaxis=False,
                    customdata=_durations(opened.values()),
                    hovertemplate="%{customdata}, never ended",
                )
            )
    if open_step is not None and ended is not drawn:
        _shade(figure, (open_step, max(one or 0 for one in places.values())), places)
    apply_style(figure, height=_KINDS_HEIGHT, zoom_key=f"kinds {run_id}")
    figure.update_layout(hovermode="x unified", margin={"l": 62, "r": 16, "t": 28, "b": 44})
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(places))
    figure.update_xaxes(nticks=8, tickangle=0, title_text="step")
    figure.update_yaxes(title_text=f"time per rank ({unit})", rangemode="tozero")
    return figure


def series_figure(
    run: str,
    actual_s_by_step: Mapping[int, float],
    ideal_s_by_step: Mapping[int, float],
    *,
    mfu_by_step: Mapping[int, float] | None,
    warmup_steps: Sequence[int] = (),
    shaded: tuple[int, int] | None = None,
) -> go.Figure:
    """Draw actual and ideal step time in s or ms over MFU in percent, on one axis of steps.

    All known steps have the same width. Missing steps share one label, "(5-8)". A line breaks where
    its quantity is unknown. The steps of the top finding are shaded, the points of warm-up steps
    hollow. Without MFU, step time fills the figure.
    """
    rows = 1 if mfu_by_step is None else 2
    figure = make_subplots(
        rows=rows,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        row_heights=[1.0] if rows == 1 else [0.58, 0.42],
    )
    known = {*actual_s_by_step, *ideal_s_by_step, *(mfu_by_step or {})}
    # The step in which a run ends has no time, but it is the one that the finding is about.
    last = shaded[1] if shaded else None
    ended_in = [last] if known and last == max(known) + 1 else []
    places = _places([*known, *ended_in])
    times_s = [*actual_s_by_step.values(), *ideal_s_by_step.values()]
    unit, unit_ns = axis_unit(max(times_s, default=0.0) * NS_PER_S)
    _add_step_time(figure, actual_s_by_step, ideal_s_by_step, warmup_steps, places, unit_ns=unit_ns)
    if mfu_by_step is not None:
        _add_mfu(figure, mfu_by_step, warmup_steps, places)
    _shade(figure, shaded, places)
    apply_style(figure, height=340, zoom_key=f"steps {run}")
    figure.update_layout(hovermode="x unified", margin={"l": 62, "r": 16, "t": 28, "b": 44})
    # Otherwise plotly takes the labels of the first trace, and appends those of later ones.
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(places))
    figure.update_xaxes(nticks=8, tickangle=0)
    if ended_in:  # without values it would be outside
        figure.update_xaxes(range=[-0.5, len(places) - 0.5])
    figure.update_xaxes(title_text="step", row=rows, col=1)
    figure.update_yaxes(title_text=f"step time ({unit})", rangemode="tozero", row=1, col=1)
    return figure


def _add_step_time(
    figure: go.Figure,
    actual_s_by_step: Mapping[int, float],
    ideal_s_by_step: Mapping[int, float],
    warmup: Sequence[int],
    places: _Places,
    *,
    unit_ns: int,
) -> None:
    ideal, ideal_seconds = _line(ideal_s_by_step, places)
    actual, seconds = _line(actual_s_by_step, places)
    if ideal_s_by_step:
        figure.add_trace(
            go.Scatter(
                name="ideal",
                x=ideal,
                y=_in_unit(ideal_seconds, unit_ns),
                customdata=_durations(ideal_seconds),
                # A step without a neighbour would have no line.
                mode="lines" if len(ideal) > 1 and None not in ideal_seconds else "lines+markers",
                line={"color": IDEAL, "width": 1.5, "dash": "dash"},
                marker={"symbol": "line-ew-open", "size": 6, "color": IDEAL},
                hovertemplate="%{customdata}",
            ),
            row=1,
            col=1,
        )
    figure.add_trace(
        go.Scatter(
            name="step time",
            x=actual,
            y=_in_unit(seconds, unit_ns),
            customdata=_durations(seconds),
            mode=_mode(places),
            line={"color": STEP_TIME, "width": 2},
            marker={"size": 5, "symbol": _symbols(actual, warmup), "color": STEP_TIME},
            hovertemplate="%{customdata}",
        ),
        row=1,
        col=1,
    )


def _add_mfu(
    figure: go.Figure, by_step: Mapping[int, float], warmup: Sequence[int], places: _Places
) -> None:
    steps, ratios = _line(by_step, places)
    figure.add_trace(
        go.Scatter(
            name="MFU",
            x=steps,
            y=[None if ratio is None else 100 * ratio for ratio in ratios],
            mode=_mode(places),
            line={"color": MFU, "width": 2},
            marker={"size": 5, "symbol": _symbols(steps, warmup), "color": MFU},
            hovertemplate="%{y:.1f} %",
        ),
        row=2,
        col=1,
    )
    figure.update_yaxes(title_text="MFU (%)", tickformat=".3~g", rangemode="tozero", row=2, col=1)


def _places(known: Iterable[int]) -> _Places:
    """Return the labels of the axis of all known steps."""
    places: _Places = {}
    for step, following in pairwise([*sorted(set(known)), None]):
        if step is None:
            continue
        places[f"{step}"] = step
        if following is not None and following != step + 1:
            last = following - 1
            places[f"({last})" if last == step + 1 else f"({step + 1}-{last})"] = None
    return places


def _line(by_step: Mapping[int, float], places: _Places) -> tuple[list[str], list[float | None]]:
    """Return labels and values of a quantity from its first to its last step; None if unknown."""
    labels = list(places)
    known = [place for place, step in enumerate(places.values()) if step in by_step]
    if not known:
        return [], []
    shown = labels[known[0] : known[-1] + 1]
    return shown, [_value(by_step, places[label]) for label in shown]


def _value(by_step: Mapping[int, float], step: int | None) -> float | None:
    return None if step is None else by_step.get(step)


def _in_unit(seconds: Iterable[float | None], unit_ns: int) -> list[float | None]:
    return [None if value is None else value * NS_PER_S / unit_ns for value in seconds]


def _durations(seconds: Iterable[float | None]) -> list[str]:
    return [format_seconds(value) for value in seconds]


def _symbols(steps: Sequence[str], warmup: Sequence[int]) -> list[str]:
    hollow = set(map(str, warmup))
    return ["circle-open" if step in hollow else "circle" for step in steps]


def _mode(on_axis: Sized) -> str:
    return "lines+markers" if len(on_axis) <= _MAX_MARKED else "lines"


def _shade(figure: go.Figure, shaded: tuple[int, int] | None, places: _Places) -> None:
    if shaded is None:
        return
    first, last = shaded
    within = [
        place
        for place, step in enumerate(places.values())
        if step is not None and first <= step <= last
    ]
    if within:
        figure.add_vrect(
            x0=within[0] - 0.5,
            x1=within[-1] + 0.5,
            fillcolor=SLOW,
            opacity=0.1,
            line_width=0,
            layer="below",
        )
