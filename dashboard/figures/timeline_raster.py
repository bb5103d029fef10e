"""Draw one step with more spans than bars can carry: each pixel shows what filled most of it."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.drawing.rows import group_starts
from rankscope.analysis.report.text import format_ranges
from rankscope.tracer.span import KIND_CODES, KINDS, NS_PER_MS

from ..theme import INK, KIND_COLORS, plain_dress
from .timeline import MOST_NAMES, group_lines, group_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.analysis.drawing.raster import KindCells, StepPicture, StepRaster
    from rankscope.analysis.drawing.rows import GroupBy


MAX_PAIRED = 128
"""Most rows with two lines each: more would fall between the screen's pixels."""

_FAINT = 0.4
_EMPTY = 0
_HALF = 0.5
_HEIGHT = 860
_LEFT = 184
"""Room for the names of groups and, beside them, for those of lines of several ranks."""


def raster_figure(picture: StepPicture, group_by: GroupBy) -> dict[str, Any]:
    """Draw a step as pixels, a row for each rank or block of neighbouring ranks.

    A cell has the colour of the kind with the largest share of its area, pale
    where less than half of the cell is covered. Up to `MAX_PAIRED` rows stand
    compute above communication; beyond it one line shows compute, and
    communication where nothing was computed.

    Returns:
        The plain document that the browser gets: plotly's own objects check every label again,
        which took three times as long as reading and drawing the picture.
    """
    raster = picture.raster
    num_lines = lines_per_block(picture)
    lines = ("", ", communication")[:num_lines]
    labels = [
        f"{'rank' if len(block) == 1 else 'ranks'}"
        f" {format_ranges(sorted(block), max_ranges=3)}{line}"
        for block in raster.rank_blocks
        for line in lines
    ]
    cells = _cells(raster, num_lines=num_lines)
    heatmap = {
        "type": "heatmap",
        "x": ((raster.edges_ns[:-1] + np.diff(raster.edges_ns) / 2) / NS_PER_MS).tolist(),
        "y": labels,
        "z": {
            "dtype": "u1",
            "bdata": b64encode(cells.tobytes()).decode("ascii"),
            "shape": f"{cells.shape[0]}, {cells.shape[1]}",
        },
        "zmin": -0.5,
        "zmax": 2 * len(KINDS) + 0.5,
        "colorscale": _colorscale(),
        "showscale": False,
        "hovertemplate": "%{y}<br>%{x:,.3f} ms<extra></extra>",
    }
    codes = np.flatnonzero(
        np.bincount(raster.compute.kind.reshape(-1) + 1, minlength=len(KINDS) + 1)
        + np.bincount(raster.comm.kind.reshape(-1) + 1, minlength=len(KINDS) + 1)
    )
    return {
        "data": [heatmap, *_legend({code - 1 for code in codes.tolist()})],
        "layout": _layout(picture, group_by, num_labels=len(labels)),
    }


def lines_per_block(picture: StepPicture) -> int:
    """Return how many lines each block of ranks has in the figure."""
    return 2 if len(picture.raster.rank_blocks) <= MAX_PAIRED else 1


def _layout(picture: StepPicture, group_by: GroupBy, *, num_labels: int) -> dict[str, Any]:
    shown = "" if picture.window is None else f" {picture.window}"
    keep = f"{picture.run} {picture.epoch} {picture.step}{shown}"
    layout = plain_dress(height=_HEIGHT, keep=keep)
    layout.update(
        margin={"l": _LEFT, "r": 16, "t": 40, "b": 48},
        dragmode="zoom",
        **_groups(picture, group_by, num_labels / len(picture.ranks)),
    )
    layout["xaxis"].update(
        title={"text": "time since the step's first span (ms)"}, tickformat=",", showgrid=False
    )
    layout["yaxis"].update(
        type="category", range=[num_labels - 0.5, -0.5], nticks=32, showgrid=False
    )
    return layout


def raster_note(picture: StepPicture) -> str:
    """Say what a pixel stands for; the page shows it beside the figure."""
    line_ranks = len(picture.raster.rank_blocks[0])
    said = [
        f"{picture.num_spans:,} spans as a density picture.",
        "A pixel has the colour of the kind that fills most of it, and is pale if half empty.",
    ]
    if line_ranks > 1:
        said.append(f"Each row averages up to {line_ranks} ranks.")
    if lines_per_block(picture) > 1:
        said.append("The upper line of a rank is compute, the lower communication.")
    else:
        said.append("Communication shows where nothing was computed.")
    return " ".join(said)


def _cells(raster: StepRaster, *, num_lines: int) -> NDArray[np.uint8]:
    """Return the shades of all lines, shape (lines, bins)."""
    compute, comm = _shades(raster.compute), _shades(raster.comm)
    if num_lines == 1:
        return np.where(compute == _EMPTY, comm, compute)
    return np.stack([compute, comm], axis=1).reshape(-1, compute.shape[1])


def _groups(picture: StepPicture, group_by: GroupBy, scale: float) -> dict[str, Any]:
    """Name the groups in the margin and part them by lines; ``scale`` is lines per rank.

    More groups than have room for a name stand without lines too: these would hide the pixels.
    """
    starts = group_starts(picture.ranks, picture.coords, group_by)
    groups = [(first * scale - 0.5, label) for first, label in starts]
    apart = [at for at, _ in groups[1:]] if len(groups) <= MOST_NAMES else []
    return {
        "shapes": group_lines(apart, {"color": INK, "width": 1}),
        "annotations": group_names(groups, yanchor="top", xshift=6 - _LEFT),
    }


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


def _legend(codes: set[int]) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter",
            "name": kind.value,
            "x": [None],
            "y": [None],
            "mode": "markers",
            "marker": {"symbol": "square", "size": 10, "color": KIND_COLORS[kind]},
            "hoverinfo": "skip",
        }
        for kind in KINDS
        if KIND_CODES[kind] in codes
    ]
