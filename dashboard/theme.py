"""Colours and common style of all figures.

Figures have no background and take the colours of text and lines from `assets/rankscope.css`, so
light and dark differ by style sheet alone: changing the theme needs no request and keeps the zoom.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from rankscope.tracer.span import NS_PER_MS, NS_PER_S, SpanKind

_STANDOFF = 8
"""Pixels between an axis' labels and its title: without it, plotly puts the title at a place of its
own, and on wide labels."""

CLEAR = "rgba(0,0,0,0)"
INK = "#868e96"
"""Text and lines of a saved figure, outside the page: legible on white and on black."""

SLOW = "#d9480f"
FAST = "#1c7ed6"
PATH = "#e0218a"
"""The critical path: no kind of span has this hue."""

IDEAL = "#868e96"
MFU = "#9c6ade"
STEP_TIME = "#1c7ed6"

KIND_COLORS: dict[SpanKind, str] = {
    SpanKind.FORWARD: "#70a2d6",
    SpanKind.BACKWARD: "#6fcc95",
    SpanKind.OPTIMIZER: "#ac579a",
    SpanKind.TP_COMM: "#e2b800",
    SpanKind.CP_COMM: "#ba8e09",
    SpanKind.EP_COMM: "#842b14",
    SpanKind.DP_COMM: "#ae4200",
    SpanKind.PP_SEND: "#5b60d7",
    SpanKind.PP_RECV: "#8a97ff",
    SpanKind.WAIT: "#abb6c7",
    SpanKind.HOST: "#42485e",
    SpanKind.DATA: "#63a753",
    SpanKind.GC: "#a5414a",
    SpanKind.CHECKPOINT: "#6e3995",
    SpanKind.OTHER: "#888983",
}
"""The colour of each kind on every page. Hue and lightness differ, so that readers without red or
green cones distinguish any two (a test measures it); each contrasts with white and near-black."""

PART_COLORS: dict[str, str] = {
    "useful_compute": "#70a2d6",
    "slow_compute": "#d9480f",
    "exposed_transfer": "#e2b800",
    "waiting": "#abb6c7",
    "bubble_warm_up": "#8a97ff",
    "bubble_steady": "#5b60d7",
    "bubble_cool_down": "#3d3fa3",
    "input": "#63a753",
    "host_gap": "#42485e",
    "gc": "#a5414a",
    "checkpoint": "#6e3995",
    "evaluation": "#2f8f8b",
    "unknown": "#888983",
}
"""The colour of each part of a waterfall: that of its kind of span, if it has one."""

GOODPUT_COLORS: dict[str, str] = {
    "productive": "#70a2d6",
    "repeated": "#a5414a",
    "detection": "#e2b800",
    "restart": "#5b60d7",
    "startup": "#8a97ff",
    "checkpoint": "#6e3995",
    "evaluation": "#2f8f8b",
    "findings": "#d9480f",
    "unknown": "#888983",
}
"""The colour of each part of a run's goodput."""

DIVERGING: list[tuple[float, str]] = [
    (0.0, "rgba(28,126,214,1)"),
    (0.25, "rgba(66,146,218,0.75)"),
    (0.5, "rgba(134,142,150,0.22)"),
    (0.75, "rgba(240,140,60,0.8)"),
    (1.0, "rgba(217,72,15,1)"),
]
"""Faster, neutral, slower. Neutral is pale grey, so that it differs from a cell without data, which
is clear."""


_AXIS: dict[str, Any] = {
    "gridcolor": "rgba(134,142,150,0.22)",
    "zeroline": False,
    "linecolor": "rgba(134,142,150,0.5)",
    "tickcolor": "rgba(134,142,150,0.5)",
    "ticks": "outside",
    "ticklen": 4,
    "automargin": True,
}


def apply_style(figure: go.Figure, *, height: int, zoom_key: str) -> go.Figure:
    """Give a figure the common style.

    Args:
        figure: Changed in place and returned.
        height: Pixels.
        zoom_key: A redraw with an equal key keeps the reader's zoom.
    """
    figure.update_layout(base_layout(height=height, zoom_key=zoom_key), template="none")
    # Of every panel: the layout names the first pair of axes only.
    figure.update_xaxes(_AXIS)
    figure.update_yaxes(_AXIS, title_standoff=_STANDOFF)
    return figure


def base_layout(*, height: int, zoom_key: str) -> dict[str, Any]:
    """Return the common style as the layout of a figure with one pair of axes.

    Args:
        height: Pixels.
        zoom_key: A redraw with an equal key keeps the reader's zoom.
    """
    return {
        "height": height,
        "uirevision": zoom_key,
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "inherit", "size": 12, "color": INK},
        "margin": {"l": 56, "r": 16, "t": 8, "b": 44},
        "hoverlabel": {"align": "left", "namelength": -1},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.0,
            "yanchor": "bottom",
            "xanchor": "left",
            "itemwidth": 30,
            "font": {"size": 11.5},
        },
        "modebar": {"bgcolor": CLEAR, "color": INK, "activecolor": FAST},
        "xaxis": dict(_AXIS),
        "yaxis": dict(_AXIS),
    }


def blank_figure(text: str, *, height: int) -> go.Figure:
    """Return a figure without axes that shows a text.

    Args:
        text: Not from outside: plotly interprets some HTML.
        height: Pixels, as of the figure that will replace it.
    """
    figure = apply_style(go.Figure(), height=height, zoom_key=text)
    figure.add_annotation(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def rgba(color: str, alpha: float) -> str:
    """Return a colour "#rrggbb" with an opacity of 0 to 1."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def axis_unit(longest_ns: float) -> tuple[str, int]:
    """Return the unit of an axis of times, "s" or "ms", and its nanoseconds.

    It is that of `format_duration` for the longest one, but for short times, which are in ms.
    """
    return ("s", NS_PER_S) if longest_ns >= NS_PER_S else ("ms", NS_PER_MS)


def graph_config(*, selects: bool) -> dict[str, Any]:
    """Return plotly's settings; none of them contacts another host."""
    return {
        "displaylogo": False,
        "showSendToCloud": False,
        "plotlyServerURL": "",
        "responsive": True,
        "scrollZoom": False,  # the assets zoom, with Ctrl: without it the page scrolls
        "modeBarButtonsToRemove": ["lasso2d", "autoScale2d", *([] if selects else ["select2d"])],
        "toImageButtonOptions": {"format": "png", "filename": "rankscope", "scale": 2},
    }
