"""Draw one step with more spans than bars can carry: each pixel shows what filled most of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from analysis.picture import picture_of
from dashboard.figures.timeline_rows import group_lines, group_names, group_starts, row_order
from dashboard.text import ranks_text
from dashboard.theme import INK, KIND_COLORS, NS_PER_MS, dressed
from tracer.span import KIND_CODES, KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.picture import StepPicture
    from analysis.raster import KindCells, StepRaster
    from analysis.timeline import StepTimeline
    from dashboard.address import GroupBy

MAX_BARS = 10_000
"""Most spans drawn one by one: plotly 7.1 pans 10,000 bars in 0.3 s, and slower beyond."""

MAX_ROWS = 512
MAX_PAIRED = 128
"""Most rows with two lines each: more would fall between the screen's pixels."""

NUM_BINS = 900
_FAINT = 0.4
_EMPTY = 0
_HALF = 0.5
_HEIGHT = 860


def raster_figure(timeline: StepTimeline, group_by: GroupBy) -> go.Figure:
    """Draw the step as pixels, a row for each rank or block of neighbouring ranks.

    A cell has the colour of the kind with the largest share of its area, pale
    where less than half of the cell is covered. Up to `MAX_PAIRED` rows stand
    compute above communication; beyond it one line shows compute, and
    communication where nothing was computed.
    """
    return picture_figure(
        picture_of(timeline, row_order(timeline, group_by), max_rows=MAX_ROWS, num_bins=NUM_BINS),
        group_by,
    )


def picture_figure(picture: StepPicture, group_by: GroupBy) -> go.Figure:
    """Draw what `raster_figure` does from pixels that are there already.

    Args:
        picture: The step, its rows in the order of ``group_by``.
        group_by: What the rows are gathered by.
    """
    raster, ranks = picture.raster, picture.ranks
    lines = ("", ", communication") if len(raster.rank_blocks) <= MAX_PAIRED else ("",)
    labels = [
        f"{'rank' if len(block) == 1 else 'ranks'} {ranks_text(block, most=3)}{line}"
        for block in raster.rank_blocks
        for line in lines
    ]
    cells = _cells(raster, num_lines=len(lines))
    figure = go.Figure(
        go.Heatmap(
            x=(raster.edges_ns[:-1] + np.diff(raster.edges_ns) / 2) / NS_PER_MS,
            y=labels,
            z=cells,
            zmin=-0.5,
            zmax=2 * len(KINDS) + 0.5,
            colorscale=_colorscale(),
            showscale=False,
            hovertemplate="%{y}<br>%{x:,.3f} ms<extra></extra>",
        )
    )
    _part_groups(figure, picture, group_by, len(labels) / len(ranks))
    _add_legend(figure, np.unique(np.concatenate([raster.compute.kind, raster.comm.kind])))
    dressed(figure, height=_HEIGHT, keep=f"{picture.run} {picture.epoch} {picture.step}")
    figure.update_layout(margin={"l": 132, "r": 16, "t": 40, "b": 48}, dragmode="zoom")
    figure.update_xaxes(
        title_text="time since the step's first span (ms)", tickformat=",", showgrid=False
    )
    figure.update_yaxes(type="category", range=[len(labels) - 0.5, -0.5], nticks=32, showgrid=False)
    return figure


def raster_note(timeline: StepTimeline) -> str:
    """Say what a pixel stands for; the page shows it beside the figure."""
    return pixel_note(len(timeline.spans), num_ranks=len(np.unique(timeline.spans.rank)))


def pixel_note(num_spans: int, *, num_ranks: int) -> str:
    """Say what a pixel stands for where so many spans of so many ranks share the picture."""
    per_row = -(-num_ranks // MAX_ROWS)
    said = [
        f"Showing {num_spans:,} spans as areas: more than {MAX_BARS:,} cannot be drawn one by one.",
        "A pixel has the colour of the kind that fills most of it, and is pale if half empty.",
    ]
    if per_row > 1:
        said.append(f"Each row averages up to {per_row} ranks.")
    if -(-num_ranks // per_row) <= MAX_PAIRED:
        said.append("The upper line of a rank is compute, the lower communication.")
    else:
        said.append("Communication shows where nothing was computed.")
    return " ".join(said)


def _cells(raster: StepRaster, *, num_lines: int) -> NDArray[np.uint8]:
    """Return the shades of all lines, shape (lines, bins)."""
    compute, comm = _shades(raster.compute), _shades(raster.comm)
    if num_lines == 1:
        return np.where(compute == _EMPTY, comm, compute)
    return np.stack([compute, comm], axis=1).reshape(-1, NUM_BINS)


def _part_groups(
    figure: go.Figure,
    picture: StepPicture,
    group_by: GroupBy,
    scale: float,
) -> None:
    """Name the groups in the margin and part them by lines; ``scale`` is lines per rank."""
    starts = group_starts(picture.ranks, picture.coords, group_by)
    groups = [(first * scale - 0.5, label) for first, label in starts]
    figure.update_layout(
        shapes=group_lines((at for at, _ in groups[1:]), {"color": INK, "width": 1}),
        annotations=group_names(groups, yanchor="top"),
    )


def _shades(cells: KindCells) -> NDArray[np.uint8]:
    """Number the shades: two per kind, the pale one first, after `_EMPTY`.

    Bytes: as 32-bit floats the picture of 512 rows weighed 2.5 MB on its way to the browser.
    """
    full = cells.filled_ratio >= _HALF
    shade = 1 + 2 * cells.kind.astype(np.int16) + full
    return np.where(cells.kind < 0, _EMPTY, shade).astype(np.uint8)


def _colorscale() -> list[tuple[float, str]]:
    """Return the shades as steps, so that a code meets exactly one colour."""
    colors = ["rgba(0,0,0,0)"]
    for kind in KINDS:
        red, green, blue = (int(KIND_COLORS[kind][at : at + 2], 16) for at in (1, 3, 5))
        colors += [f"rgba({red},{green},{blue},{alpha})" for alpha in (_FAINT, 1)]
    bands = [(band / len(colors), (band + 1) / len(colors)) for band in range(len(colors))]
    return [(edge, color) for band, color in zip(bands, colors, strict=True) for edge in band]


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
