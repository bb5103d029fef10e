"""Matrix of transfers between hosts or ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from rankscope.analysis.report.text import format_percent, format_rate

from ..text import cut_middle, escape_for_plotly
from ..theme import DIVERGING, apply_style

if TYPE_CHECKING:
    from rankscope.analysis.report.network import LinkMatrix

_MIN_SPREAD = 0.1
_MIN_HEIGHT, _MAX_ROWS_PX, _PIXELS_PER_ROW = 240, 530, 22
_MAX_LABEL, _SLANTED_PX, _CHAR_PX = 24, 4, 7
"""Characters of a label, and the pixels of each in height below the matrix and in width beside."""

_BELOW_PX, _BESIDE_PX = 74, 140
"""Room for the title of the axis, and for that of the other one and the scale."""

_MAX_LEAST_PX = 560

_MAX_SPACED = 48
"""Rows up to which cells have a gap between them."""


def link_matrix_figure(matrix: LinkMatrix, *, run: str) -> go.Figure:
    """Draw the transfer time above that of alike pairs: y sender, x receiver, neutral at 0.

    A cell without a value has no transfer. The scale spans at least +-10 %, so that noise stays
    pale.
    """
    ends = {end: escape_for_plotly(end) for end in matrix.ends}
    names = list(ends.values())
    known = matrix.excess_ratio[np.isfinite(matrix.excess_ratio)]
    spread = max(_MIN_SPREAD, float(np.abs(known).max(initial=0.0)))
    word = "" if matrix.of_hosts else "rank "
    texts = [
        [
            ""
            if np.isnan(excess)
            else f"{format_percent(excess, digits=1)} above alike pairs<br>"
            + format_rate(None if np.isnan(rate) else rate)
            for excess, rate in zip(*rows, strict=True)
        ]
        for rows in zip(matrix.excess_ratio.tolist(), matrix.bytes_per_s.tolist(), strict=True)
    ]
    gap = int(len(names) <= _MAX_SPACED)
    figure = go.Figure(
        go.Heatmap(
            x=names,
            y=names,
            z=(100 * matrix.excess_ratio).astype(np.float32),
            customdata=texts,
            colorscale=DIVERGING,
            zmin=-100 * spread,
            zmax=100 * spread,
            xgap=gap,
            ygap=gap,
            hoverongaps=False,
            hovertemplate=f"{word}%{{y}} to {word}%{{x}}<br>%{{customdata}}<extra></extra>",
            colorbar={"title": {"text": "excess (%)", "side": "right"}, "thickness": 10},
        )
    )
    labels = {name: escape_for_plotly(cut_middle(end, _MAX_LABEL)) for end, name in ends.items()}
    rows_px = min(_PIXELS_PER_ROW * len(names), _MAX_ROWS_PX)
    height = max(rows_px + _SLANTED_PX * _label_chars(matrix) + _BELOW_PX, _MIN_HEIGHT)
    apply_style(figure, height=height, zoom_key=f"links {run}")
    figure.update_xaxes(labelalias=labels)
    figure.update_yaxes(labelalias=labels)
    what = "host" if matrix.of_hosts else "rank"
    figure.update_xaxes(type="category", title_text=f"receiving {what}", showgrid=False, nticks=32)
    figure.update_yaxes(
        type="category",
        title={"text": f"sending {what}", "standoff": 14},
        showgrid=False,
        autorange="reversed",
        nticks=32,
    )
    return figure


def least_width(matrix: LinkMatrix) -> int:
    """Return the width in pixels below which the figure scrolls: a phone shows a few ends whole."""
    labels_px = _CHAR_PX * _label_chars(matrix)
    return min(_PIXELS_PER_ROW * len(matrix.ends) + labels_px + _BESIDE_PX, _MAX_LEAST_PX)


def _label_chars(matrix: LinkMatrix) -> int:
    return min(max(map(len, matrix.ends)), _MAX_LABEL)
