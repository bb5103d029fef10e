"""Pictures of steps with more spans than bars can show: stored as tiles, or drawn in portions.

`rankscope.analysis.drawing` draws; this module connects it with the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rankscope.analysis.drawing.raster import (
    NUM_BINS,
    KindCells,
    StepPicture,
    Viewport,
    measure_areas,
    ranks_per_line,
    stack_rasters,
)
from rankscope.analysis.drawing.rows import TILED, RowOrder, rank_order, split_ranks
from rankscope.analysis.drawing.tiles import (
    TileLines,
    cut_viewport,
    draw_tiles,
    levels_for_viewport,
    tiles_of_viewport,
)
from rankscope.analysis.drawing.timeline import empty_step_error, make_timeline
from rankscope.collector.read.pictures import (
    FINER,
    WHOLE_STEP,
    PictureLevel,
    Pixels,
    StepRevision,
    read_kept_picture,
    read_pixels,
    tile_rows,
)
from rankscope.collector.read.spans import (
    SpanSelection,
    group_blocks,
    read_arrivals,
    read_outline,
    read_selected_spans,
)

from ..sources.arrow_tables import arrivals_table, span_table
from .shared_results import SharedResults

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import pyarrow as pa

    from rankscope.analysis.drawing.tiles import Level, TilePlan
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.trace.tables import RunInfo
    from rankscope.collector.read.pictures import KeptPicture, StepId
    from rankscope.collector.store.store import Store
    from rankscope.tracer.topology import Coords

    Places = tuple[dict[int, Coords], dict[int, str]]
    """Coordinates and hosts by rank."""

PORTION_SPANS = 1_048_576
"""Spans held at once while a step is drawn in portions. A step of 4.5 million spans took 0.7 GB
and 7.8 s of CPU; with portions of half as many 0.5 GB and 10 s, as a whole 1.1 GB and 4 s. Each
portion needs the arrivals of whole groups, which take longer to read than its own spans."""

MAX_PICTURES = 8
"""Pictures in memory, some 5 MB each: of those that were read, and likewise of those that were
drawn because their tiles are not stored yet."""

MAX_KEPT = 64
KEPT_AGE_NS = 500_000_000
"""Age of what is known of a step's tiles: a page asks for it three times, each takes 5 ms."""


def make_tiles(
    part: StepTimeline, plan: TilePlan, key: StepRevision, *, ordering: str, lines: tuple[int, int]
) -> list[pa.Table]:
    """Return the rows to store of some lines of an ordering, at every level.

    Args:
        part: The spans of the lines' ranks; begin and end are the whole step's.
        plan: The step's tiles.
        ordering: One of `TilePlan.orders`.
        lines: First and end line of the whole step's picture.
    """
    return [
        tile_rows(
            key,
            PictureLevel(
                ordering=ordering,
                line_ranks=drawn.level.line_ranks,
                zoom=drawn.level.zoom,
                depth=WHOLE_STEP if plan.is_top(drawn.level) else FINER,
            ),
            Pixels(
                rank_blocks=drawn.rank_blocks,
                compute_kind=drawn.compute.kind,
                compute_ratio=drawn.compute.filled_ratio,
                comm_kind=drawn.comm.kind,
                comm_ratio=drawn.comm.filled_ratio,
                first_line=drawn.first_line,
            ),
            num_tiles=drawn.level.num_tiles,
        )
        for drawn in draw_tiles(part, plan, ordering=ordering, lines=lines)
    ]


class StepPictures:
    """The stored pictures of steps. The last ones are kept: others look at the same step."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: SharedResults[StepId, KeptPicture | None] = SharedResults(max_results=MAX_KEPT)
        self._read: SharedResults[tuple[Hashable, ...], StepPicture | None] = SharedResults(
            max_results=MAX_PICTURES
        )

    def kept(self, step_id: StepId) -> KeptPicture | None:
        """Return what is stored of a step, as of `KEPT_AGE_NS` ago at most; None: nothing."""
        return self._kept.get(
            step_id, lambda: read_kept_picture(self._store, step_id), max_age_ns=KEPT_AGE_NS
        )

    def picture(
        self,
        step_id: StepId,
        *,
        order: RowOrder,
        read_places: Callable[[int], Places],
        viewport: Viewport | None = None,
    ) -> StepPicture | None:
        """Return a picture as `read_picture` does."""
        kept = self.kept(step_id)
        if kept is None:
            return None

        def read() -> StepPicture | None:
            return read_picture(
                self._store, step_id, kept, order=order, read_places=read_places, viewport=viewport
            )

        return self._read.get((step_id, kept.revision, order, viewport), read)


def read_picture(
    store: Store,
    step_id: StepId,
    kept: KeptPicture,
    *,
    order: RowOrder,
    read_places: Callable[[int], Places],
    viewport: Viewport | None = None,
) -> StepPicture | None:
    """Return a step's picture from its tiles; None if none are stored or they are being replaced.

    Args:
        kept: What is stored of it.
        order: What the rows are grouped by.
        read_places: Returns coordinates and hosts of the epoch's ranks, given how many groups and
            ranks were known when the tiles were made.
        viewport: What of the step; None: all of it. Shown at the finest level that fits, or at the
            finest one that is stored.
    """
    if not kept.line_ranks:
        return None
    length_ns = kept.end_ns - kept.begin_ns
    whole = Viewport(begin_ns=0, end_ns=length_ns, first_row=0, end_row=kept.num_ranks)
    shown = whole if viewport is None else viewport.clip(length_ns, kept.num_ranks)
    key = StepRevision(step_id=step_id, revision=kept.revision)
    # By host is by rank on tiles: the ranks of a host are neighbours.
    ordering = kept.orderings.get((order if order in TILED else RowOrder.RANK).value)
    if ordering is None:
        return None  # the tiles were made before this order was known
    for level in levels_for_viewport(
        shown, length_ns=length_ns, num_spans=kept.num_spans, num_ranks=kept.num_ranks
    ):
        tiles = _read_tiles(store, key, ordering, level, shown, length_ns=length_ns)
        if tiles is not None:
            coords, hosts = read_places(kept.num_described)
            return StepPicture(
                run=step_id.run_id,
                epoch=step_id.epoch,
                step=step_id.step,
                begin_ns=kept.begin_ns,
                end_ns=kept.end_ns,
                num_spans=kept.num_spans,
                num_ranks=kept.num_ranks,
                raster=cut_viewport(tiles, shown, length_ns=length_ns),
                coords=coords,
                hosts=hosts,
                viewport=None if shown == whole else shown,
                first_row=shown.first_row // level.line_ranks * level.line_ranks,
            )
    return None


def _read_tiles(
    store: Store,
    key: StepRevision,
    ordering: str,
    level: Level,
    viewport: Viewport,
    *,
    length_ns: int,
) -> TileLines | None:
    tiles, lines = tiles_of_viewport(level, viewport, length_ns=length_ns)
    stored = PictureLevel(ordering=ordering, line_ranks=level.line_ranks, zoom=level.zoom)
    pixels = read_pixels(store, key, stored, tiles=tiles, lines=lines)
    if pixels is None:
        return None
    return TileLines(
        level=level,
        first_line=pixels.first_line,
        rank_blocks=pixels.rank_blocks,
        compute=KindCells(kind=pixels.compute_kind, filled_ratio=pixels.compute_ratio),
        comm=KindCells(kind=pixels.comm_kind, filled_ratio=pixels.comm_ratio),
    )


def read_part(
    store: Store, info: RunInfo, portion: SpanSelection, *, bounds_ns: tuple[int, int]
) -> StepTimeline:
    """Return a portion of a step as a timeline, its waits taken from the whole step.

    Args:
        info: The run, of a format that records groups.
        portion: What of the step.
        bounds_ns: Begin and end of the whole step.
    """
    return make_part(info, portion, read_part_rows(store, portion), bounds_ns=bounds_ns)


class PartRows(NamedTuple):
    """The rows of a portion of a step."""

    spans: pa.Table
    arrivals: pa.Table
    """Of their communication, from all members."""


def read_part_rows(store: Store, portion: SpanSelection) -> PartRows:
    """Return the rows of a portion of a step."""
    spans = read_selected_spans(store, portion)
    return PartRows(spans, read_arrivals(store, portion, spans))


def make_part(
    info: RunInfo, portion: SpanSelection, rows: PartRows, *, bounds_ns: tuple[int, int]
) -> StepTimeline:
    """Return a portion of a step from its rows; see `read_part`."""
    return make_timeline(
        info,
        span_table(rows.spans),
        epoch=portion.epoch,
        step=portion.step,
        arrivals=arrivals_table(rows.arrivals),
        bounds_ns=bounds_ns,
    )


def draw_in_portions(
    store: Store,
    info: RunInfo,
    step_id: StepId,
    *,
    order: RowOrder,
    portion_spans: int = PORTION_SPANS,
) -> StepPicture:
    """Return the picture of a whole step, reading a portion of its ranks at a time.

    Args:
        info: The run, of a format that records groups.
        order: What the rows are grouped by.
        portion_spans: Spans held at once; those of one line may be more.

    Raises:
        EmptyRunError: The step holds no spans.
    """
    outline = read_outline(store, info.run_id, epoch=step_id.epoch, step=step_id.step)
    if not outline.num_all:
        raise empty_step_error(info.run_id, epoch=step_id.epoch, step=step_id.step)
    bounds_ns = (outline.begin_ns, outline.end_ns)
    coords = {
        rank.rank: rank.coords
        for epoch in info.epochs if epoch.epoch == step_id.epoch for rank in epoch.ranks
    }  # fmt: skip
    ranks = outline.ranks.tolist()
    blocks = split_ranks(rank_order(ranks, coords, order), ranks_per_line(len(ranks)))
    num_spans = dict(zip(ranks, outline.num_spans.tolist(), strict=True))
    rasters = []
    for first, end in group_blocks(blocks, num_spans, max_spans=portion_spans):
        own = [rank for block in blocks[first:end] for rank in block]
        portion = SpanSelection(
            run_id=info.run_id, epoch=step_id.epoch, step=step_id.step, ranks=own
        )
        part = read_part(store, info, portion, bounds_ns=bounds_ns)
        rasters.append(measure_areas(part, blocks[first:end], num_bins=NUM_BINS).raster())
    return StepPicture(
        run=info.run_id,
        epoch=step_id.epoch,
        step=step_id.step,
        begin_ns=outline.begin_ns,
        end_ns=outline.end_ns,
        num_spans=outline.num_all,
        num_ranks=len(ranks),
        raster=stack_rasters(rasters),
        coords=coords,
    )
