"""Pixels of a step that has too many spans for bars: each shows what filled most of it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.drawing.raster import fold_raster
from rankscope.analysis.drawing.rows import lay_out_rows
from rankscope.analysis.report.text import format_ranges
from rankscope.tracer.span import COMM_KINDS, KIND_CODES, KINDS, NS_PER_MS

from ..theme import INK, base_layout
from .run_axis import STRIP_HEIGHT
from .timeline import raster_shades
from .timeline_axes import (
    BELOW,
    MAX_GROUP_NAMES,
    NO_MARKS,
    TOP,
    RowStyle,
    legend_entries,
    not_loaded,
    path_trace,
    step_layout,
)
from .timeline_canvas import cells_document

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankscope.analysis.drawing.raster import StepPicture, StepRaster
    from rankscope.analysis.drawing.rows import RowLayout, RowOrder

    from .timeline_axes import FindPlace, Marks

MAX_PAIRED = 128
"""Blocks of ranks up to which each has two lines; the lines of more would be thinner than a
screen's pixels."""

MINIMAP_LINES, MINIMAP_BINS = 38, 450
"""A line for each two pixels, and a bin for each two."""

_HEIGHT = 832
"""Pixels of the figure."""

_ROOM = _HEIGHT - TOP - BELOW
"""Pixels of its lines."""

_NAME_PX = 14
"""Height of a group's name."""

_MAX_TICKS = 32


def raster_figure(
    picture: StepPicture, rows: RowLayout, marks: Marks = NO_MARKS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a picture, a line for each rank or block of neighbouring ranks.

    A cell has the colour of the kind with the largest share of its area, pale if less than half of
    the cell is covered. Up to `MAX_PAIRED` rows have a line of compute above one of communication;
    more have one line of compute, with communication where the rank computed nothing or was
    blocked. A folded group is as high as its name.

    Args:
        picture: The picture.
        rows: Its rows, as of `raster_rows`.
        marks: What is marked.

    Returns:
        Axes, legend and marks as the plain document that the browser gets (plotly's own objects
        check every label again, which took three times as long as reading and drawing the
        picture), and the cells as of `cells_document`.
    """
    raster = fold_raster(picture.raster, rows)
    num_lines = _lines_per_row(rows)
    labels = [
        f"{_name_row(block)}{line}"
        for block in rows.blocks
        for line in ("", ", communication")[:num_lines]
    ]
    begin_ms, end_ms = (raster.edges_ns[[0, -1]] / NS_PER_MS).tolist()
    shades = raster_shades(raster, num_lines=num_lines)
    if rows.lines[-1] > len(labels):
        times = np.repeat(np.diff(rows.lines) // num_lines, num_lines)
        shades = np.repeat(shades, times, axis=0)
        labels = np.repeat(labels, times).tolist()
    cells = cells_document(shades, (begin_ms, end_ms), labels=labels)
    codes = {*np.unique(raster.compute.kind).tolist(), *np.unique(raster.comm.kind).tolist()}
    traces = legend_entries(kind for kind in KINDS if KIND_CODES[kind] in codes)
    if marks.path is not None:
        traces.append(path_trace(marks.path, _places(rows)))
    style = RowStyle(
        height=_HEIGHT,
        max_ticks=_MAX_TICKS,
        # Lines between more groups than can be named would hide the pixels.
        separator=INK if len(rows.groups) <= MAX_GROUP_NAMES else "",
        name_offset=-0.5,
        name_px=_NAME_PX,
        name_place={"yanchor": "top", "yshift": 4},
    )
    layout = step_layout(picture, rows, marks, style)
    if picture.viewport is not None:
        shown_ns = (picture.viewport.begin_ns, picture.viewport.end_ns)
        layout["xaxis"]["range"] = [at_ns / NS_PER_MS for at_ns in shown_ns]
        layout["shapes"] += not_loaded(picture, (begin_ms, end_ms), num_lines=rows.lines[-1])
    return {"data": traces, "layout": layout}, cells


@lru_cache(maxsize=4096)
def _name_row(block: tuple[int, ...]) -> str:
    return f"{'rank' if len(block) == 1 else 'ranks'} {format_ranges(block, max_ranges=3)}"


def minimap_cells(raster: StepRaster) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a whole step as cells without axes, for the place of what is shown in it.

    Beside them is the layout that fills the minimap with them.
    """
    shades = raster_shades(raster)
    begin_ms, end_ms = (raster.edges_ns[[0, -1]] / NS_PER_MS).tolist()
    layout = base_layout(height=STRIP_HEIGHT, zoom_key="minimap")
    layout.update(margin=dict.fromkeys("lrtb", 0))
    layout["xaxis"]["range"] = [begin_ms, end_ms]
    layout["yaxis"]["range"] = [len(shades) - 0.5, -0.5]
    return layout, cells_document(shades, (begin_ms, end_ms))


def _places(rows: RowLayout) -> FindPlace:
    """Return the lines of ranks in a picture, for compute and communication."""
    is_paired, row_by_rank = _lines_per_row(rows) > 1, rows.row_by_rank()

    def find(rank: int, kind: int) -> float | None:
        row = row_by_rank.get(rank)
        if row is None:
            return None
        quarter = (rows.lines[row + 1] - rows.lines[row]) / 4
        is_lower = KINDS[kind] in COMM_KINDS
        return rows.middle(row) + is_paired * (quarter if is_lower else -quarter)

    return find


def _lines_per_row(rows: RowLayout) -> int:
    """Return how many lines each row has in the figure, unless it is a folded group."""
    return 2 if len(rows.blocks) <= MAX_PAIRED else 1


def raster_rows(picture: StepPicture, order: RowOrder, folded: Collection[int] = ()) -> RowLayout:
    """Lay out the rows of a picture, with the lines that each has as pixels.

    A folded group has as many as its name needs, if there is room for all names.
    """
    rows = lay_out_rows(
        picture,
        order,
        picture.raster.rank_blocks,
        folded,
        num_ranks=picture.num_ranks,
        first_place=picture.first_row,
    )
    num_rows, folded_rows = len(rows.blocks), rows.folded_rows
    counts = np.full(num_rows, _lines_per_row(rows))
    room_px = _ROOM - _NAME_PX * len(folded_rows)
    if folded_rows and room_px > 0:
        others = num_rows - len(folded_rows)
        counts[folded_rows] *= max(1, math.ceil(_NAME_PX * others / room_px))
    return replace(rows, lines=[0, *np.cumsum(counts).tolist()])


def raster_note(picture: StepPicture, rows: RowLayout) -> str:
    """Return what a pixel means, for a note beside the figure."""
    sentences = [
        f"{picture.num_spans:,} spans as a density picture.",
        "A pixel has the colour of the kind that fills most of it, and is pale if half empty.",
    ]
    if len(rows.blocks[0]) > 1:
        sentences.append(
            f"Each line is the average of up to {len(rows.blocks[0])} ranks, but a span much longer"
            " than alike ones of its line is shown whole."
        )
    if _lines_per_row(rows) > 1:
        sentences.append("The upper line of a rank is compute, the lower communication.")
    else:
        sentences.append("Communication shows where nothing was computed.")
    return " ".join(sentences)
