"""Show a step, or a part of it, from the pixels that were kept as it closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.drawing.picture import StepPicture, Window
from rankscope.analysis.drawing.pixel_areas import KindCells, bin_edges
from rankscope.analysis.drawing.raster import StepRaster
from rankscope.collector.read.pictures import (
    TILES_PER_ZOOM,
    Area,
    Level,
    StepKey,
    read_kept,
    read_pixels,
)
from rankscope.dashboard.figures.timeline_raster import MAX_ROWS, NUM_BINS

from .kept_pictures import zooms_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.collector.read.pictures import KeptStep, Pixels, StepPlace
    from rankscope.collector.store.store import Store
    from rankscope.dashboard.address import GroupBy
    from rankscope.tracer.topology import Coords

MAX_VIEW_BINS = 2 * NUM_BINS
"""Of a picture: a screen has no room for more."""


def read_picture(
    store: Store,
    place: StepPlace,
    *,
    group_by: GroupBy,
    coords_of: Callable[[int], dict[int, Coords]],
    window: Window | None = None,
) -> StepPicture | None:
    """Return a step's picture; None where none is kept, or while it is being drawn anew.

    Args:
        store: The store.
        place: The step.
        group_by: What the rows are gathered by.
        coords_of: Says where the epoch's ranks stand, given how many groups and ranks were known.
        window: What of it; None: all. The finest level that fits is taken, or the finest kept.
    """
    kept = read_kept(store, place)
    if kept is None or not kept.line_ranks:
        return None
    whole = Window(
        begin_ns=0, end_ns=kept.end_ns - kept.begin_ns, first_row=0, end_row=kept.num_ranks
    )
    shown = whole if window is None else window.within(whole.end_ns, whole.end_row)
    key = StepKey(place=place, revision=kept.revision)
    for level in levels_for(kept, kept.orderings[group_by.value], shown):
        area = _area(level, shown, whole)
        pixels = read_pixels(store, key, level, area)
        if pixels is not None:
            return StepPicture(
                run=place.run_id,
                epoch=place.epoch,
                step=place.step,
                begin_ns=kept.begin_ns,
                end_ns=kept.end_ns,
                num_spans=kept.num_spans,
                num_ranks=kept.num_ranks,
                raster=_raster(pixels, level, area, shown, whole),
                coords=coords_of(kept.num_described),
                window=None if shown == whole else shown,
            )
    return None


def levels_for(kept: KeptStep, ordering: str, shown: Window) -> list[Level]:
    """Return the levels that may show a window, the one with most pixels in it first.

    Args:
        kept: The step.
        ordering: In which its pixels are kept.
        shown: A part of it.
    """
    share = (shown.end_ns - shown.begin_ns) / max(kept.end_ns - kept.begin_ns, 1)
    num_rows = shown.end_row - shown.first_row
    zooms = zooms_of(num_spans=kept.num_spans, num_ranks=kept.num_ranks)
    found = []
    for line_ranks, max_zoom in zooms.items():
        if line_ranks != kept.line_ranks and num_rows > MAX_ROWS * line_ranks:
            continue
        for zoom in range(max_zoom + 1):
            num_bins = NUM_BINS * TILES_PER_ZOOM**zoom * share
            if num_bins > MAX_VIEW_BINS:
                break
            pixels = min(num_bins, NUM_BINS) * (num_rows / line_ranks)
            found.append((pixels, Level(ordering=ordering, line_ranks=line_ranks, zoom=zoom)))
    return [level for _, level in sorted(found, key=lambda one: -one[0])]


def _area(level: Level, shown: Window, whole: Window) -> Area:
    num_tiles = TILES_PER_ZOOM**level.zoom
    length = whole.end_ns
    return Area(
        first_tile=min(shown.begin_ns * num_tiles // max(length, 1), num_tiles - 1),
        end_tile=min(-(-shown.end_ns * num_tiles // max(length, 1)), num_tiles),
        first_line=shown.first_row // level.line_ranks,
        end_line=-(-shown.end_row // level.line_ranks),
    )


def _raster(pixels: Pixels, level: Level, area: Area, shown: Window, whole: Window) -> StepRaster:
    """Cut what is shown out of the tiles: every bin and line that it touches."""
    edges = bin_edges(whole.end_ns, NUM_BINS * TILES_PER_ZOOM**level.zoom)
    before = area.first_tile * NUM_BINS
    first = max(int(edges.searchsorted(shown.begin_ns, side="right")) - 1, before)
    end = min(int(edges.searchsorted(shown.end_ns, side="left")), area.end_tile * NUM_BINS)
    end = max(end, first + 1)
    lines = slice(area.first_line - pixels.first_line, area.end_line - pixels.first_line)
    bins = slice(first - before, end - before)
    return StepRaster(
        rank_blocks=pixels.rank_blocks[lines],
        edges_ns=edges[first : end + 1],
        compute=KindCells(
            kind=pixels.compute_kind[lines, bins], filled_ratio=pixels.compute_ratio[lines, bins]
        ),
        comm=KindCells(
            kind=pixels.comm_kind[lines, bins], filled_ratio=pixels.comm_ratio[lines, bins]
        ),
    )
