"""Draw the pyramid of a step that closes with more spans than bars can carry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.drawing.pixel_areas import step_areas
from rankscope.analysis.drawing.raster import row_by_rank
from rankscope.collector.read.pictures import (
    FINER,
    TILES_PER_ZOOM,
    WHOLE_STEP,
    Level,
    Pixels,
    tile_rows,
)
from rankscope.dashboard.address import GroupBy
from rankscope.dashboard.figures.timeline_raster import MAX_BARS, MAX_ROWS, NUM_BINS
from rankscope.dashboard.figures.timeline_rows import rank_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from rankscope.analysis.drawing.pixel_areas import StepAreas
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.collector.read.pictures import StepKey
    from rankscope.tracer.topology import Coords

SPANS_PER_PIXEL = 4
"""On average, from which on a finer level is kept: a step of 12,288 ranks x 2,000 spans then has
1.2 pixels a span in three orderings, and they weigh a fifth of the spans or less."""

MOST_ZOOM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is kept of a step as pixels."""

    line_ranks: int
    """Ranks of a line of the whole step's picture."""

    zooms: dict[int, int]
    """By ranks per line, the zoom of the finest tiles; the first are the whole step's."""

    orders: dict[str, tuple[int, ...]]
    """The ranks from the top, by ordering, without orderings that are equal to an earlier one."""

    orderings: dict[str, str]
    """By every ordering, its place among ``orders``."""

    def blocks(self, ordering: str) -> list[tuple[int, ...]]:
        """Return the ranks of each line."""
        order = self.orders[ordering]
        return [order[at : at + self.line_ranks] for at in range(0, len(order), self.line_ranks)]


NO_PLAN = Plan(line_ranks=0, zooms={}, orders={}, orderings={})


def plan_of(ranks: Sequence[int], coords: dict[int, Coords], *, num_spans: int) -> Plan:
    """Return what is to be kept of a step; nothing where its spans can be drawn one by one.

    Args:
        ranks: Those that have spans in it.
        coords: Where they stand.
        num_spans: Of the step.
    """
    if num_spans <= MAX_BARS:
        return NO_PLAN
    orders: dict[str, tuple[int, ...]] = {}
    orderings: dict[str, str] = {}
    for by in GroupBy:
        order = rank_order(ranks, coords, by)
        equal = next((name for name, known in orders.items() if known == order), by.value)
        orderings[by.value] = equal
        orders.setdefault(equal, order)
    zooms = zooms_of(num_spans=num_spans, num_ranks=len(ranks))
    return Plan(
        line_ranks=next(iter(zooms)),
        zooms=zooms,
        orders=orders,
        orderings=orderings,
    )


def zooms_of(*, num_spans: int, num_ranks: int) -> dict[int, int]:
    """Return the levels that are kept of a step: by ranks per line, the finest zoom.

    A finer level than the whole step's is kept where several spans fall on each of its
    pixels: with fewer it would say little more, and weigh more than the spans.
    """

    def is_kept(line_ranks: int, zoom: int) -> bool:
        num_pixels: int = -(-num_ranks // line_ranks) * NUM_BINS * TILES_PER_ZOOM**zoom
        return num_spans >= SPANS_PER_PIXEL * num_pixels

    whole = max(-(-num_ranks // MAX_ROWS), 1)
    found: dict[int, int] = {}
    line_ranks = whole
    while line_ranks == whole or is_kept(line_ranks, 0):
        zoom = 0
        while zoom < MOST_ZOOM and is_kept(line_ranks, zoom + 1):
            zoom += 1
        found[line_ranks] = zoom
        if line_ranks == 1:
            break
        # Finer lines lie within one of the coarser, so that portions part neither.
        line_ranks //= next(part for part in (4, 3, 2, line_ranks) if line_ranks % part == 0)
    return found


def drawn(
    part: StepTimeline, plan: Plan, key: StepKey, *, ordering: str, lines: tuple[int, int]
) -> list[pa.Table]:
    """Return the tiles of some lines of an ordering, at every level.

    Args:
        part: The spans of their ranks, with the bounds of the whole step.
        plan: What is kept of the step.
        key: The step.
        ordering: Of `Plan.orders`.
        lines: First and end line.
    """
    ranks = plan.orders[ordering][lines[0] * plan.line_ranks : lines[1] * plan.line_ranks]
    tables = []
    for line_ranks, zoom in plan.zooms.items():
        blocks = [ranks[at : at + line_ranks] for at in range(0, len(ranks), line_ranks)]
        finest = Level(
            ordering=ordering,
            line_ranks=line_ranks,
            zoom=zoom,
            depth=WHOLE_STEP if line_ranks == plan.line_ranks else FINER,
        )
        first_line = lines[0] * plan.line_ranks // line_ranks
        tables += _levels(part, blocks, key, finest, first_line=first_line)
    return tables


def _levels(
    part: StepTimeline,
    blocks: Sequence[tuple[int, ...]],
    key: StepKey,
    finest: Level,
    *,
    first_line: int,
) -> list[pa.Table]:
    """Measure at the finest zoom, and join bins for the others."""
    areas = step_areas(
        part,
        row_by_rank([np.array(block, dtype=np.int64) for block in blocks]),
        num_rows=len(blocks),
        num_bins=NUM_BINS * TILES_PER_ZOOM**finest.zoom,
    )
    tables = []
    for zoom in range(finest.zoom, -1, -1):
        level = replace(finest, zoom=zoom, depth=FINER if zoom else finest.depth)
        tables.append(tile_rows(key, level, _pixels(areas, blocks, first_line)))
        if zoom:
            areas = areas.coarser(TILES_PER_ZOOM)
    return tables


def _pixels(areas: StepAreas, blocks: Sequence[tuple[int, ...]], first_line: int) -> Pixels:
    compute, comm = areas.compute_cells(), areas.comm_cells()
    return Pixels(
        rank_blocks=tuple(blocks),
        compute_kind=compute.kind,
        compute_ratio=compute.filled_ratio,
        comm_kind=comm.kind,
        comm_ratio=comm.filled_ratio,
        first_line=first_line,
    )
