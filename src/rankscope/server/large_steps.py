"""Draw steps that are too large to be held at once, before their kept pictures are there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.drawing.picture import StepPicture
from rankscope.analysis.drawing.pixel_areas import KindCells, step_areas
from rankscope.analysis.drawing.raster import StepRaster, row_by_rank
from rankscope.analysis.drawing.timeline import no_spans
from rankscope.collector.read.spans import Portion, portions_of, read_outline
from rankscope.dashboard.figures.timeline_raster import MAX_ROWS, NUM_BINS
from rankscope.dashboard.figures.timeline_rows import rank_order

from .step_parts import read_part

if TYPE_CHECKING:
    from rankscope.analysis.trace.tables import RunInfo, SpanSource
    from rankscope.collector.read.pictures import StepPlace
    from rankscope.collector.read.spans import StepOutline
    from rankscope.collector.store.store import Store
    from rankscope.dashboard.address import GroupBy

    from .background_jobs import Aside

PORTION_SPANS = 1_048_576
"""Held at once: a step of 4.5 million spans, read in portions of so many, took 0.7 GB and 7.8 s of
CPU; of half as many 0.5 GB and 10 s, as a whole 1.1 GB and 4 s. Each portion has the arrivals of
whole groups read, which takes longer than its own spans."""


MAX_PICTURES = 8
"""Kept drawn up, some 5 MB each; a picture that the store keeps takes the place of each in time."""


class LargeSteps:
    """Pictures of whole steps, each drawn aside once, however many visitors ask for it.

    Args:
        store: The store.
        source: What it knows of its runs.
        aside: Where they are drawn.
    """

    def __init__(self, store: Store, source: SpanSource, aside: Aside) -> None:
        self._store = store
        self._source = source
        self._aside = aside
        self._lock = threading.Lock()
        self._pictures: OrderedDict[tuple[StepPlace, GroupBy], StepPicture] = OrderedDict()

    def ask(self, place: StepPlace, *, group_by: GroupBy, patience_s: float) -> StepPicture | None:
        """Return the step's picture; None while it is being drawn.

        Args:
            place: The step, of a run whose format records groups.
            group_by: What the rows are gathered by.
            patience_s: How long to wait for it.

        Raises:
            UnknownRunError: The store holds no run of that name.
            EmptyRunError: The step holds no spans.
        """
        key = (place, group_by)
        with self._lock:
            if key in self._pictures:
                self._pictures.move_to_end(key)
                return self._pictures[key]
        done = self._aside.ask(key, lambda: self._draw(place, group_by), patience_s=patience_s)
        drawn: StepPicture | None = None if done is None else done.result()
        return drawn

    def _draw(self, place: StepPlace, group_by: GroupBy) -> StepPicture:
        info = self._source.run_info(place.run_id)
        drawn = draw_in_portions(self._store, info, place, group_by=group_by)
        with self._lock:
            self._pictures[place, group_by] = drawn
            while len(self._pictures) > MAX_PICTURES:
                self._pictures.popitem(last=False)
        return drawn


def draw_in_portions(
    store: Store,
    info: RunInfo,
    place: StepPlace,
    *,
    group_by: GroupBy,
    portion_spans: int = PORTION_SPANS,
) -> StepPicture:
    """Return the picture of a whole step, read a portion of its ranks after the other.

    Args:
        store: The store.
        info: The run, of a format that records groups.
        place: The step.
        group_by: What the rows are gathered by.
        portion_spans: Spans that are held at once; those of one line may be more.

    Raises:
        EmptyRunError: The step holds no spans.
    """
    outline = read_outline(store, info.run_id, epoch=place.epoch, step=place.step)
    if not outline.num_all:
        raise no_spans(info.run_id, epoch=place.epoch, step=place.step)
    coords = {
        rank.rank: rank.coords
        for epoch in info.epochs if epoch.epoch == place.epoch for rank in epoch.ranks
    }  # fmt: skip
    ranks = outline.ranks.tolist()
    order = rank_order(ranks, coords, group_by)
    size = -(-len(order) // MAX_ROWS)
    blocks = [order[at : at + size] for at in range(0, len(order), size)]
    num_spans = dict(zip(ranks, outline.num_spans.tolist(), strict=True))
    rasters = [
        _lines(store, info, place, outline, blocks[first:end])
        for first, end in portions_of(blocks, num_spans, max_spans=portion_spans)
    ]
    return StepPicture(
        run=info.run_id,
        epoch=place.epoch,
        step=place.step,
        begin_ns=outline.begin_ns,
        end_ns=outline.end_ns,
        num_spans=outline.num_all,
        num_ranks=len(ranks),
        raster=_stacked(rasters),
        coords=coords,
    )


def _lines(
    store: Store,
    info: RunInfo,
    place: StepPlace,
    outline: StepOutline,
    blocks: list[tuple[int, ...]],
) -> StepRaster:
    own = [rank for block in blocks for rank in block]
    portion = Portion(run_id=info.run_id, epoch=place.epoch, step=place.step, ranks=own)
    part = read_part(store, info, portion, bounds_ns=(outline.begin_ns, outline.end_ns))
    rows = row_by_rank([np.array(block, dtype=np.int64) for block in blocks])
    areas = step_areas(part, rows, num_rows=len(blocks), num_bins=NUM_BINS)
    return StepRaster(
        rank_blocks=tuple(blocks),
        edges_ns=areas.edges_ns,
        compute=areas.compute_cells(),
        comm=areas.comm_cells(),
    )


def _stacked(rasters: list[StepRaster]) -> StepRaster:
    """Return lines of several rasters with the same bins, one below the other."""
    return StepRaster(
        rank_blocks=tuple(block for one in rasters for block in one.rank_blocks),
        edges_ns=rasters[0].edges_ns,
        compute=_joined([one.compute for one in rasters]),
        comm=_joined([one.comm for one in rasters]),
    )


def _joined(cells: list[KindCells]) -> KindCells:
    return KindCells(
        kind=np.concatenate([one.kind for one in cells]),
        filled_ratio=np.concatenate([one.filled_ratio for one in cells]),
    )
