"""Draw steps that close with more spans than bars can carry, and show them from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.picture import StepPicture
from analysis.raster import KindCells, StepRaster, step_raster
from collector.pyramid import Pixels, pixel_rows, read_step
from dashboard.address import GroupBy
from dashboard.figures.timeline_raster import MAX_BARS, MAX_ROWS, NUM_BINS
from dashboard.figures.timeline_rows import rank_order, row_order

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from analysis.timeline import StepTimeline
    from collector.pyramid import KeptStep
    from collector.rollups import ClosedStep
    from collector.store import Store
    from tracer.topology import Coords


def picture_rows(timeline: StepTimeline, step: ClosedStep) -> list[pa.Table]:
    """Return the pixels of a step; none where its spans can be drawn one by one.

    Where each rank has a line of its own, one ordering serves all: its lines are moved.

    Args:
        timeline: The step.
        step: What is told beside its pixels.
    """
    if len(timeline.spans) <= MAX_BARS:
        return []
    orderings = tuple(GroupBy) if step.num_ranks > MAX_ROWS else (GroupBy.RANK,)
    return [pixel_rows(step, by.value, _drawn(timeline, by)) for by in orderings]


def read_picture(
    store: Store,
    run_id: str,
    *,
    epoch: int,
    step: int,
    group_by: GroupBy,
    coords: dict[int, Coords],
) -> StepPicture | None:
    """Return a step's picture; None where none is kept.

    Args:
        store: The store.
        run_id: The run.
        epoch: Of which incarnation.
        step: The step.
        group_by: What the rows are gathered by.
        coords: Where the epoch's ranks stand.
    """
    orderings = dict.fromkeys((group_by.value, GroupBy.RANK.value))
    found = read_step(store, run_id, epoch=epoch, step=step, orderings=list(orderings))
    if found is None:
        return None
    ordering, kept = found
    if ordering != group_by.value and any(len(b) > 1 for b in kept.pixels.rank_blocks):
        return None
    raster = _raster(kept, coords, group_by)
    return StepPicture(
        run=run_id,
        epoch=epoch,
        step=step,
        begin_ns=kept.begin_ns,
        end_ns=kept.end_ns,
        num_spans=kept.num_spans,
        num_ranks=kept.num_ranks,
        raster=raster,
        coords=coords,
    )


def _drawn(timeline: StepTimeline, by: GroupBy) -> Pixels:
    ranks = row_order(timeline, by)
    raster = step_raster(timeline, ranks, max_rows=MAX_ROWS, num_bins=NUM_BINS)
    return Pixels(
        rank_blocks=raster.rank_blocks,
        compute_kind=raster.compute.kind,
        compute_ratio=raster.compute.filled_ratio,
        comm_kind=raster.comm.kind,
        comm_ratio=raster.comm.filled_ratio,
    )


def _raster(kept: KeptStep, coords: dict[int, Coords], group_by: GroupBy) -> StepRaster:
    pixels = kept.pixels
    lines = _line_order(pixels.rank_blocks, coords, group_by)
    span_ns = max(kept.end_ns - kept.begin_ns, 1)
    num_bins = pixels.compute_kind.shape[1]
    return StepRaster(
        rank_blocks=tuple(pixels.rank_blocks[line] for line in lines.tolist()),
        edges_ns=np.linspace(0, span_ns, num_bins + 1).astype(np.int64),
        compute=KindCells(
            kind=pixels.compute_kind[lines], filled_ratio=pixels.compute_ratio[lines]
        ),
        comm=KindCells(kind=pixels.comm_kind[lines], filled_ratio=pixels.comm_ratio[lines]),
    )


def _line_order(
    blocks: tuple[tuple[int, ...], ...], coords: dict[int, Coords], group_by: GroupBy
) -> NDArray[np.int64]:
    """Return the places of the kept lines from the top; blocks of several ranks stay put."""
    if any(len(block) > 1 for block in blocks):
        return np.arange(len(blocks))
    place = {block[0]: line for line, block in enumerate(blocks)}
    return np.array([place[rank] for rank in rank_order(place, coords, group_by)], dtype=np.int64)
