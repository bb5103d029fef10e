"""Spans like a selected one: durations by rank in its step, and by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.text import format_duration

from ..theme import INK, SLOW, axis_unit, base_layout, rgba

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankscope.analysis.drawing.selection import AlikeSpan

HEIGHT = 180


def alike_figure(
    of_step: Sequence[AlikeSpan],
    of_others: Sequence[AlikeSpan],
    *,
    rank: int,
    step: int,
    query: Callable[[AlikeSpan], str],
) -> dict[str, Any] | None:
    """Draw the durations of alike spans as dots, those of the selected span's rank in colour.

    Args:
        of_step: The spans of the selected span's step.
        of_others: Those of other steps.
        rank: Rank of the selected span.
        step: Its step.
        query: Returns the query of the view that has a span selected, for a click on its dot.

    Returns:
        The plain document that the browser gets; None if there is one span alone.
    """
    if len(of_step) + len(of_others) <= 1:
        return None
    longest_ns = max(one.duration_ns for one in (*of_step, *of_others))
    unit, unit_ns = axis_unit(longest_ns)

    def dots(spans: Sequence[AlikeSpan], *, is_own: bool, axis: str) -> dict[str, Any]:
        shown = [one for one in spans if (one.rank == rank) == is_own]
        is_by_step = axis == "x2"
        return {
            "type": "scatter",
            "mode": "markers",
            "x": [one.step if is_by_step else one.rank for one in shown],
            "y": [one.duration_ns / unit_ns for one in shown],
            "xaxis": axis,
            "customdata": [query(one) for one in shown],
            "text": [
                f"rank {one.rank}, step {one.step}: {format_duration(one.duration_ns)}"
                for one in shown
            ],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": SLOW, "size": 8}
            if is_own
            else {"color": rgba(INK, 0.6), "size": 5},
            "showlegend": False,
        }

    by_step = [*of_step, *of_others] if of_others else []
    layout = base_layout(height=HEIGHT, zoom_key=f"alike {rank} {step}")
    layout.update(margin={"l": 48, "r": 8, "t": 8, "b": 38}, hovermode="closest", dragmode=False)
    layout["yaxis"].update(title={"text": unit, "standoff": 4}, rangemode="tozero", nticks=5)
    layout["xaxis"].update(title={"text": f"rank, in step {step}", "standoff": 4}, nticks=5)
    if by_step:
        layout["xaxis"]["domain"] = [0, 0.47]
        layout["xaxis2"] = {
            **layout["xaxis"],
            "domain": [0.53, 1],
            "title": {"text": "step", "standoff": 4},
            "tickformat": "d",
        }
    parts = [(of_step, "x"), *([(by_step, "x2")] if by_step else [])]
    return {
        "data": [
            dots(spans, is_own=is_own, axis=axis)
            for spans, axis in parts
            for is_own in (False, True)
        ],
        "layout": layout,
    }
