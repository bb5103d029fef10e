"""Tiles of a large step: its pixels at several levels, made once when the step closes.

The top level shows the whole step in one tile, with a line for each block of neighbouring ranks.
Finer levels split the step into 4, 16, ... tiles of equal length, and the blocks into lines of
fewer ranks, as long as several spans fall on each pixel. Each ordering of the ranks has its own
tiles; equal orderings share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .raster import (
    MAX_BARS,
    MAX_LINES,
    NUM_BINS,
    StepRaster,
    bin_edges,
    measure_areas,
    ranks_per_line,
)
from .rows import TILED, rank_order, split_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankscope.tracer.topology import Coords

    from .raster import KindCells, StepPicture, Viewport
    from .rows import RankBlocks
    from .timeline import StepTimeline

TILES_PER_ZOOM = 4
"""Tiles of the next zoom in each tile of a zoom."""

MAX_ZOOM = 4

SPANS_PER_PIXEL = 4
"""Least mean number of spans on a pixel of a finer level. A step of 12,288 ranks x 2,000 spans
then has 1.2 pixels a span in three orderings, which take at most a fifth of the spans' bytes."""

MAX_VIEWPORT_BINS = 2 * NUM_BINS
"""A screen shows no more."""

MAX_REDRAWN_SPANS = 200_000
"""Spans of a viewport that are read to draw it."""


class Level(NamedTuple):
    """One resolution of a step's tiles."""

    line_ranks: int
    """Ranks of a line."""

    zoom: int
    """The step is split into ``TILES_PER_ZOOM ** zoom`` tiles."""

    @property
    def num_tiles(self) -> int:
        """Tiles of a line."""
        return int(TILES_PER_ZOOM**self.zoom)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLines:
    """Some lines of a level, in all tiles or in neighbouring ones."""

    level: Level
    first_line: int
    """Place of the uppermost line among all lines of the level."""

    rank_blocks: RankBlocks
    compute: KindCells
    comm: KindCells


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """The tiles that are made of a step."""

    line_ranks: int
    """Ranks of a line of the whole step's picture; 0: no tiles."""

    zooms: dict[int, int]
    """Finest zoom by ranks per line; the whole step's lines come first."""

    orders: dict[str, tuple[int, ...]]
    """The ranks from the top by ordering, without orderings that equal an earlier one."""

    orderings: dict[str, str]
    """For every ordering, the one of ``orders`` that it equals."""

    def blocks(self, ordering: str) -> RankBlocks:
        """Return the ranks of each line of the whole step's picture."""
        return split_ranks(self.orders[ordering], self.line_ranks)

    def is_top(self, level: Level) -> bool:
        """Return whether a level shows the whole step in one tile."""
        return level == Level(line_ranks=self.line_ranks, zoom=0)


NO_TILES = TilePlan(line_ranks=0, zooms={}, orders={}, orderings={})


def plan_tiles(ranks: Sequence[int], coords: dict[int, Coords], *, num_spans: int) -> TilePlan:
    """Return which tiles to make of a step; `NO_TILES` if its spans can be drawn as bars."""
    if num_spans <= MAX_BARS:
        return NO_TILES
    orders: dict[str, tuple[int, ...]] = {}
    orderings: dict[str, str] = {}
    for by in TILED:
        order = rank_order(ranks, coords, by)
        equal = next((name for name, known in orders.items() if known == order), by.value)
        orderings[by.value] = equal
        orders.setdefault(equal, order)
    return TilePlan(
        line_ranks=ranks_per_line(len(ranks)),
        zooms=finest_zooms(num_spans=num_spans, num_ranks=len(ranks)),
        orders=orders,
        orderings=orderings,
    )


def finest_zooms(*, num_spans: int, num_ranks: int) -> dict[int, int]:
    """Return the levels that are made of a step: by ranks per line, the finest zoom.

    A level below the top is made if `SPANS_PER_PIXEL` spans fall on each of its pixels: with fewer
    it would show little more than the level above, and take more bytes than the spans.
    """

    def is_made(line_ranks: int, zoom: int) -> bool:
        level = Level(line_ranks=line_ranks, zoom=zoom)
        num_pixels = -(-num_ranks // line_ranks) * NUM_BINS * level.num_tiles
        return num_spans >= SPANS_PER_PIXEL * num_pixels

    top = ranks_per_line(num_ranks)
    found: dict[int, int] = {}
    line_ranks = top
    while line_ranks == top or is_made(line_ranks, 0):
        zoom = 0
        while zoom < MAX_ZOOM and is_made(line_ranks, zoom + 1):
            zoom += 1
        found[line_ranks] = zoom
        if line_ranks == 1:
            break
        # A finer line is inside one coarser line, so that no portion of lines splits it.
        line_ranks //= next(part for part in (4, 3, 2, line_ranks) if line_ranks % part == 0)
    return found


def draw_tiles(
    part: StepTimeline, plan: TilePlan, *, ordering: str, lines: tuple[int, int]
) -> Iterator[TileLines]:
    """Yield all tiles of some lines, level by level.

    Args:
        part: The spans of the lines' ranks; begin and end are the whole step's.
        ordering: One of `TilePlan.orders`.
    """
    ranks = plan.orders[ordering][lines[0] * plan.line_ranks : lines[1] * plan.line_ranks]
    for line_ranks, finest_zoom in plan.zooms.items():
        areas = measure_areas(
            part,
            split_ranks(ranks, line_ranks),
            num_bins=NUM_BINS * TILES_PER_ZOOM**finest_zoom,
        )
        for zoom in range(finest_zoom, -1, -1):
            raster = areas.raster()
            yield TileLines(
                level=Level(line_ranks=line_ranks, zoom=zoom),
                first_line=lines[0] * plan.line_ranks // line_ranks,
                rank_blocks=raster.rank_blocks,
                compute=raster.compute,
                comm=raster.comm,
            )
            if zoom:
                areas = areas.join_bins(TILES_PER_ZOOM)


def levels_for_viewport(
    viewport: Viewport, *, length_ns: int, num_spans: int, num_ranks: int
) -> list[Level]:
    """Return the levels that can show a viewport, the one with most pixels in it first."""
    share = (viewport.end_ns - viewport.begin_ns) / max(length_ns, 1)
    num_rows = viewport.end_row - viewport.first_row
    top = ranks_per_line(num_ranks)
    num_pixels: dict[Level, float] = {}
    for line_ranks, max_zoom in finest_zooms(num_spans=num_spans, num_ranks=num_ranks).items():
        if line_ranks != top and num_rows > MAX_LINES * line_ranks:
            continue
        for zoom in range(max_zoom + 1):
            level = Level(line_ranks=line_ranks, zoom=zoom)
            num_bins = NUM_BINS * level.num_tiles * share
            if num_bins > MAX_VIEWPORT_BINS:
                break
            num_pixels[level] = min(num_bins, NUM_BINS) * (num_rows / line_ranks)
    return sorted(num_pixels, key=lambda level: -num_pixels[level])


def tiles_of_viewport(level: Level, viewport: Viewport, *, length_ns: int) -> tuple[range, range]:
    """Return the tiles and the lines of a level that a viewport of a step touches."""
    num_tiles, length = level.num_tiles, max(length_ns, 1)
    first_tile = min(viewport.begin_ns * num_tiles // length, num_tiles - 1)
    end_tile = min(-(-viewport.end_ns * num_tiles // length), num_tiles)
    first_line = viewport.first_row // level.line_ranks
    return range(first_tile, end_tile), range(first_line, -(-viewport.end_row // level.line_ranks))


def cut_viewport(found: TileLines, viewport: Viewport, *, length_ns: int) -> StepRaster:
    """Return every bin and line of a level that a viewport touches.

    Args:
        found: The tiles of `tiles_of_viewport`, at least its lines.
    """
    tiles, wanted = tiles_of_viewport(found.level, viewport, length_ns=length_ns)
    edges = bin_edges(length_ns, NUM_BINS * found.level.num_tiles)
    before = tiles.start * NUM_BINS
    first = max(int(edges.searchsorted(viewport.begin_ns, side="right")) - 1, before)
    end = min(int(edges.searchsorted(viewport.end_ns, side="left")), tiles.stop * NUM_BINS)
    end = max(end, first + 1)
    lines = slice(wanted.start - found.first_line, wanted.stop - found.first_line)
    bins = slice(first - before, end - before)
    return StepRaster(
        rank_blocks=found.rank_blocks[lines],
        edges_ns=edges[first : end + 1],
        compute=found.compute.at(lines, bins),
        comm=found.comm.at(lines, bins),
    )


def needs_spans(picture: StepPicture) -> bool:
    """Return whether a viewport should be drawn anew from its spans.

    It should if its tiles have few pixels and its spans are not more than `MAX_REDRAWN_SPANS`.
    """
    if picture.viewport is None:
        return False
    num_lines, num_bins = picture.raster.compute.kind.shape
    num_ranks = sum(map(len, picture.raster.rank_blocks))
    is_coarse = num_bins * num_lines < NUM_BINS * min(num_ranks, MAX_LINES) / 2
    return is_coarse and picture.likely_spans() <= MAX_REDRAWN_SPANS


def is_few(picture: StepPicture) -> bool:
    """Return whether the spans of a viewport are probably few enough for bars."""
    return picture.viewport is not None and picture.likely_spans() <= 2 * MAX_BARS
