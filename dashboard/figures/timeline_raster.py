"""Draw one step with more spans than bars can carry: each pixel shows what filled most of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from analysis.raster import step_raster
from dashboard.figures.timeline_rows import row_order
from dashboard.text import ranks_text
from dashboard.theme import KIND_COLORS, NS_PER_MS, dressed
from tracer.span import KIND_CODES, KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.raster import KindCells
    from analysis.timeline import StepTimeline
    from dashboard.address import GroupBy

MAX_BARS = 10_000
"""Most spans drawn one by one; plotly pans 10,000 bars in 0.3 s (docs/benchmarks.md)."""

MAX_ROWS = 512
NUM_BINS = 900
_FAINT = 0.4
_HALF = 0.5
_HEIGHT = 860


def raster_figure(timeline: StepTimeline, group_by: GroupBy) -> go.Figure:
    """Draw the step as pixels: two lines per rank (or block of ranks), compute above communication.

    A cell has the colour of the kind with the largest share of its area, pale
    where less than half of the cell is covered.
    """
    ranks = row_order(timeline, group_by)
    raster = step_raster(timeline, ranks, max_rows=MAX_ROWS, num_bins=NUM_BINS)
    cells = np.empty((2 * len(raster.rank_blocks), NUM_BINS), dtype=np.float32)
    cells[0::2], cells[1::2] = _shades(raster.compute), _shades(raster.comm)
    labels = [
        f"{'rank' if len(block) == 1 else 'ranks'} {ranks_text(block, most=3)}{part}"
        for block in raster.rank_blocks
        for part in ("", ", communication")
    ]
    figure = go.Figure(
        go.Heatmap(
            x=(raster.edges_ns[:-1] + np.diff(raster.edges_ns) / 2) / NS_PER_MS,
            y=labels,
            z=cells,
            zmin=0,
            zmax=2 * len(KINDS),
            colorscale=_colorscale(),
            showscale=False,
            hoverongaps=False,
            hovertemplate="%{y}<br>%{x:,.3f} ms<extra></extra>",
        )
    )
    _add_legend(figure, np.unique(np.concatenate([raster.compute.kind, raster.comm.kind])))
    dressed(figure, height=_HEIGHT, keep=f"{timeline.run} {timeline.epoch} {timeline.step}")
    figure.update_layout(margin={"l": 132, "r": 16, "t": 40, "b": 48}, dragmode="zoom")
    figure.update_xaxes(title_text="time since the step's first span (ms)", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", nticks=32, showgrid=False)
    return figure


def _shades(cells: KindCells) -> NDArray[np.float32]:
    """Number the shades: two per kind, the pale one first; NaN where nothing is."""
    full = cells.filled_ratio >= _HALF
    shade = 2 * cells.kind.astype(np.float32) + full + 0.5
    return np.where(cells.kind < 0, np.float32(np.nan), shade)


def _colorscale() -> list[tuple[float, str]]:
    """Return the shades as steps, so that a code meets exactly one colour."""
    steps: list[tuple[float, str]] = []
    for code, kind in enumerate(KINDS):
        red, green, blue = (int(KIND_COLORS[kind][at : at + 2], 16) for at in (1, 3, 5))
        for part, alpha in enumerate((_FAINT, 1)):
            place = 2 * code + part
            color = f"rgba({red},{green},{blue},{alpha})"
            steps.append((place / (2 * len(KINDS)), color))
            steps.append(((place + 1) / (2 * len(KINDS)), color))
    return steps


def _add_legend(figure: go.Figure, codes: NDArray[np.int8]) -> None:
    present = set(codes.tolist())
    for kind in KINDS:
        if KIND_CODES[kind] in present:
            figure.add_trace(
                go.Scatter(
                    name=kind.value,
                    x=[None],
                    y=[None],
                    mode="markers",
                    marker={"symbol": "square", "size": 10, "color": KIND_COLORS[kind]},
                    hoverinfo="skip",
                )
            )
