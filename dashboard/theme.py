"""Colours and the common dress of every figure.

Figures have no background and take the colour of text and lines from
`assets/rankscope.css`, so light and dark differ by style sheet alone: changing
the theme asks the server for nothing and keeps every zoom.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from rankscope.tracer.span import NS_PER_MS, NS_PER_S, SpanKind

_LEAST_S = 5

CLEAR = "rgba(0,0,0,0)"
INK = "#868e96"
"""Text and lines of a figure outside the page (a saved picture): legible on white and black."""

SLOW = "#d9480f"
FAST = "#1c7ed6"
IDEAL = "#868e96"
MFU = "#9c6ade"
STEP_TIME = "#1c7ed6"

KIND_COLORS: dict[SpanKind, str] = {
    SpanKind.FORWARD: "#3b8fd4",
    SpanKind.BACKWARD: "#12a184",
    SpanKind.OPTIMIZER: "#c774ad",
    SpanKind.TP_COMM: "#e8a317",
    SpanKind.CP_COMM: "#b5a61c",
    SpanKind.EP_COMM: "#a9744f",
    SpanKind.DP_COMM: "#dd5a1b",
    SpanKind.PP_SEND: "#7d6bd6",
    SpanKind.PP_RECV: "#a99bec",
    SpanKind.WAIT: "#909aa6",
    SpanKind.HOST: "#6c7a89",
    SpanKind.DATA: "#5c9c3f",
    SpanKind.GC: "#d6457f",
    SpanKind.CHECKPOINT: "#8a5fbf",
    SpanKind.OTHER: "#7f8790",
}
"""One colour a kind on every page, after Okabe and Ito's set, which the colour-blind tell apart;
each stands out from white and from near-black."""

# Neutral is a breath of grey, so that a cell without data (clear) differs from a cell at rest.
DIVERGING: list[tuple[float, str]] = [
    (0.0, "rgba(28,126,214,1)"),
    (0.25, "rgba(66,146,218,0.75)"),
    (0.5, "rgba(134,142,150,0.13)"),
    (0.75, "rgba(240,140,60,0.8)"),
    (1.0, "rgba(217,72,15,1)"),
]
"""Faster, neutral, slower; over the page's own background."""


def dressed(figure: go.Figure, *, height: int, keep: str) -> go.Figure:
    """Give a figure the common dress.

    Args:
        figure: Changed in place and returned.
        height: Pixels.
        keep: While this stays equal, a redraw keeps the reader's zoom.
    """
    figure.update_layout(plain_dress(height=height, keep=keep), template="none")
    return figure


def plain_dress(*, height: int, keep: str) -> dict[str, Any]:
    """Return the common dress of a figure with one pair of axes as a plain layout.

    Args:
        height: Pixels.
        keep: While this stays equal, a redraw keeps the reader's zoom.
    """
    return {
        "height": height,
        "uirevision": keep,
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "inherit", "size": 12, "color": INK},
        "margin": {"l": 56, "r": 16, "t": 8, "b": 44},
        "hoverlabel": {"align": "left", "namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "xanchor": "left"},
        "modebar": {"bgcolor": CLEAR, "color": INK, "activecolor": FAST},
        "xaxis": dict(_AXIS),
        "yaxis": dict(_AXIS),
    }


def axis_unit(longest_ns: float) -> tuple[str, float]:
    """Return the unit that suits an axis of times, s or ms, and how many ns it has."""
    return ("s", NS_PER_S) if longest_ns >= _LEAST_S * NS_PER_S else ("ms", NS_PER_MS)


def graph_config(*, wheel_zooms: bool) -> dict[str, Any]:
    """Return plotly's settings for a page: nothing of it leads to another host."""
    return {
        "displaylogo": False,
        "showSendToCloud": False,
        "plotlyServerURL": "",
        "responsive": True,
        "scrollZoom": wheel_zooms,
        "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
        "toImageButtonOptions": {"format": "png", "filename": "rankscope", "scale": 2},
    }


_AXIS: dict[str, Any] = {
    "gridcolor": "rgba(134,142,150,0.22)",
    "zeroline": False,
    "linecolor": "rgba(134,142,150,0.5)",
    "tickcolor": "rgba(134,142,150,0.5)",
    "ticks": "outside",
    "ticklen": 4,
    "automargin": True,
}


def blank_figure(said: str, *, height: int) -> go.Figure:
    """Return an empty figure that says in its middle why, without axes.

    Args:
        said: Plain words of ours.
        height: Pixels; that of the figure that will stand there.
    """
    figure = dressed(go.Figure(), height=height, keep=said)
    figure.add_annotation(text=said, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure
