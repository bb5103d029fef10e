"""Pixels of a step that has too many spans for bars: each shows what filled most of it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.analysis.drawing.rows import group_lines
from rankscope.analysis.report.text import format_ranges
from rankscope.tracer.span import COMM_KINDS, KIND_CODES, KINDS, NS_PER_MS

from ..theme import INK, base_layout
from .timeline import (
    LEGEND_PLACE,
    MAX_GROUP_NAMES,
    RANKS_TITLE,
    TOP,
    across_lines,
    dimmed,
    folded_lines,
    group_names,
    left_margin,
    legend_entries,
    not_loaded,
    raster_shades,
    row_ticks,
    short_name,
    time_axis,
)
from .timeline_canvas import cells_document
from .timeline_marks import path_trace

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rankscope.analysis.drawing.raster import (
        StepPicture,
        StepRaster,
        Stretches,
    )
    from rankscope.analysis.drawing.rows import RowOrder

    from .timeline_marks import FindPlace

MAX_PAIRED = 128
"""Blocks of ranks up to which each has two lines; the lines of more would be thinner than a
screen's pixels."""

MINIMAP_HEIGHT = 34
"""Pixels of the whole step above the shown part."""

MINIMAP_LINES, MINIMAP_BINS = 34, 450
"""One line for each pixel, and a bin for each two or three."""

_HEIGHT = 832
_BELOW = 8
"""Pixels of the figure, and beneath its lines."""

_NAME_PX = 14
"""Height of a group's name."""

_MAX_TICKS = 32


def raster_figure(
    picture: StepPicture,
    order: RowOrder,
    marked: tuple[int, ...] = (),
    path: Stretches | None = None,
    folded: Collection[int] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a picture, a line for each rank or block of neighbouring ranks.

    A cell has the colour of the kind with the largest share of its area, pale if less than half of
    the cell is covered. Up to `MAX_PAIRED` blocks have a line of compute above one of
    communication; more have one line of compute, with communication where the rank computed
    nothing or was blocked. A folded group is as high as its name.

    Returns:
        Axes, legend and marks as the plain document that the browser gets (plotly's own objects
        check every label again, which took three times as long as reading and drawing the
        picture), and the cells as of `cells_document`.
    """
    raster = picture.raster
    num_lines = lines_per_block(picture)
    labels = [
        f"{_name_line(block)}{line}"
        for block in raster.rank_blocks
        for line in ("", ", communication")[:num_lines]
    ]
    begin_ms, end_ms = (raster.edges_ns[[0, -1]] / NS_PER_MS).tolist()
    shades = raster_shades(raster, num_lines=num_lines)
    lines = block_lines(picture, order, folded)
    if lines[-1] > len(labels):
        times = np.repeat(np.diff(lines) // num_lines, num_lines)
        shades = np.repeat(shades, times, axis=0)
        labels = np.repeat(labels, times).tolist()
    cells = cells_document(shades, (begin_ms, end_ms), labels=labels)
    codes = {*np.unique(raster.compute.kind).tolist(), *np.unique(raster.comm.kind).tolist()}
    traces = legend_entries(kind for kind in KINDS if KIND_CODES[kind] in codes)
    if path is not None:
        traces.append(path_trace(path, _places(picture, lines)))
    layout = _layout(picture, order, marked, folded, lines)
    return {"data": traces, "layout": layout}, cells


@lru_cache(maxsize=4096)
def _name_line(block: tuple[int, ...]) -> str:
    return f"{'rank' if len(block) == 1 else 'ranks'} {format_ranges(block, max_ranges=3)}"


def minimap_cells(raster: StepRaster) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a whole step as cells without axes, for the place of what is shown in it.

    Beside them is the layout that fills the minimap with them.
    """
    shades = raster_shades(raster)
    begin_ms, end_ms = (raster.edges_ns[[0, -1]] / NS_PER_MS).tolist()
    layout = base_layout(height=MINIMAP_HEIGHT, zoom_key="minimap")
    layout.update(margin=dict.fromkeys("lrtb", 0))
    layout["xaxis"]["range"] = [begin_ms, end_ms]
    layout["yaxis"]["range"] = [len(shades) - 0.5, -0.5]
    return layout, cells_document(shades, (begin_ms, end_ms))


def _places(picture: StepPicture, lines: Sequence[int]) -> FindPlace:
    """Return the lines of ranks in a picture, for compute and communication."""
    num_lines = lines_per_block(picture)
    blocks = picture.raster.rank_blocks
    block_of = {rank: block for block, ranks in enumerate(blocks) for rank in ranks}

    def find(rank: int, kind: int) -> float | None:
        if rank not in block_of:
            return None
        first, end = lines[block_of[rank]], lines[block_of[rank] + 1]
        height = (end - first) / num_lines
        is_lower = num_lines > 1 and KINDS[kind] in COMM_KINDS
        return first + height * is_lower + (height - 1) / 2

    return find


def lines_per_block(picture: StepPicture) -> int:
    """Return how many lines each block of ranks has in the figure, unless it is a folded group."""
    return 2 if len(picture.raster.rank_blocks) <= MAX_PAIRED else 1


def block_lines(picture: StepPicture, order: RowOrder, folded: Collection[int]) -> list[int]:
    """Return the first line of each block of ranks, and the number of all lines.

    A folded group has as many as its name needs, if there is room for all names.
    """
    blocks = picture.raster.rank_blocks
    per_block = lines_per_block(picture)
    counts = np.full(len(blocks), per_block)
    if folded:
        groups = group_lines(blocks, picture.coords, order, picture.hosts)
        joined = folded_lines(groups, folded)
        room_px = _HEIGHT - TOP - _BELOW - _NAME_PX * len(joined)
        if room_px > 0:
            others = len(blocks) - len(joined)
            counts[joined] *= max(1, math.ceil(_NAME_PX * others / room_px))
    return [0, *np.cumsum(counts).tolist()]


def raster_note(picture: StepPicture) -> str:
    """Return what a pixel means, for a note beside the figure."""
    line_ranks = len(picture.raster.rank_blocks[0])
    sentences = [
        f"{picture.num_spans:,} spans as a density picture.",
        "A pixel has the colour of the kind that fills most of it, and is pale if half empty.",
    ]
    if line_ranks > 1:
        sentences.append(
            f"Each line is the average of up to {line_ranks} ranks, but a span much longer than"
            " alike ones of its line is shown whole."
        )
    if lines_per_block(picture) > 1:
        sentences.append("The upper line of a rank is compute, the lower communication.")
    else:
        sentences.append("Communication shows where nothing was computed.")
    return " ".join(sentences)


def _layout(
    picture: StepPicture,
    order: RowOrder,
    marked: tuple[int, ...],
    folded: Collection[int],
    lines: Sequence[int],
) -> dict[str, Any]:
    zoom_key = f"{picture.run} {picture.epoch} {picture.step}"
    blocks = picture.raster.rank_blocks
    num_lines = lines[-1]
    groups = group_lines(blocks, picture.coords, order, picture.hosts)
    # Lines between more groups than can be named would hide the pixels.
    named = groups[1:] if len(groups) <= MAX_GROUP_NAMES else ()
    separators = [lines[group.line] - 0.5 for group in named]
    labelled, ticks = row_ticks(
        blocks, marked, max_ticks=_MAX_TICKS, folded_lines=folded_lines(groups, folded)
    )
    left = left_margin((f"▾ {short_name(group)}" for group in groups), ticks)
    shapes = across_lines(separators, {"color": INK, "width": 1})
    if picture.viewport is not None:
        edges_ms = picture.raster.edges_ns[[0, -1]] / NS_PER_MS
        length_ms = (picture.end_ns - picture.begin_ns) / NS_PER_MS
        loaded_ms = (float(edges_ms[0]), float(edges_ms[1]))
        shapes += not_loaded(loaded_ms, length_ms, num_lines=num_lines)
    shapes += dimmed(blocks, marked, lines)
    layout = base_layout(height=_HEIGHT, zoom_key=zoom_key)
    layout.update(
        margin={"l": left, "r": 16, "t": TOP, "b": _BELOW},
        hovermode=False,
        dragmode="pan",
        shapes=shapes,
        annotations=[
            *group_names(
                groups,
                folded,
                [lines[group.line] - 0.5 for group in groups],
                min_lines=_NAME_PX * num_lines / (_HEIGHT - TOP - _BELOW) - 1,
                yanchor="top",
                yshift=4,
                xshift=6 - left,
            ),
            RANKS_TITLE,
        ],
    )
    layout["legend"].update(LEGEND_PLACE)
    layout["xaxis"].update(
        time_axis((picture.end_ns - picture.begin_ns) / NS_PER_MS), showgrid=False
    )
    layout["yaxis"].update(
        range=[num_lines - 0.5, -0.5],
        tickmode="array",
        ticklabeloverflow="allow",  # else plotly measures each label
        tickvals=[(lines[at] + lines[at + 1] - 1) / 2 for at in labelled],
        ticktext=ticks,
        showgrid=False,
        automargin=False,
    )
    if picture.viewport is None:
        layout["xaxis"]["range"] = (picture.raster.edges_ns[[0, -1]] / NS_PER_MS).tolist()
    else:
        shown = (picture.viewport.begin_ns, picture.viewport.end_ns)
        layout["xaxis"]["range"] = [at / NS_PER_MS for at in shown]
    return layout
