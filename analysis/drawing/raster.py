"""Make more ranks, steps or spans than a screen has pixels fit it, without losing the worst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NONE

from .pixel_areas import KindCells, step_areas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..report.report import RankStepExcess
    from .timeline import StepTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessBlocks:
    """A heat-map of who was slow when, neighbours joined."""

    rank_blocks: tuple[tuple[int, int], ...]
    """First and last rank of each row."""

    step_blocks: tuple[tuple[int, int], ...]
    """First and last step of each column."""

    excess_ns: NDArray[np.float64]
    """Shape (rank blocks, step blocks): the largest excess in the block; NaN where unknown."""


def worst_in_blocks(excess: RankStepExcess, *, max_rows: int, max_columns: int) -> ExcessBlocks:
    """Join neighbouring ranks and steps until they fit, each block showing its largest excess.

    The mean would hide one slow rank among its neighbours; the largest cannot.

    Args:
        excess: Shape (ranks, steps).
        max_rows: Most rows of the result, at least 1.
        max_columns: Most columns of the result, at least 1.
    """
    rows, rank_blocks = _blocks(excess.ranks, max_rows)
    columns, step_blocks = _blocks(excess.steps, max_columns)
    worst = excess.excess_ns
    if worst.size:
        worst = np.fmax.reduceat(np.fmax.reduceat(worst, rows, axis=0), columns, axis=1)
    return ExcessBlocks(rank_blocks=rank_blocks, step_blocks=step_blocks, excess_ns=worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRaster:
    """A step as a grid of pixels: what filled most of each."""

    rank_blocks: tuple[tuple[int, ...], ...]
    """The ranks of each row pair, in the order asked for."""

    edges_ns: NDArray[np.int64]
    """Shape (bins + 1,): where the bins begin and end, relative to the step's begin."""

    compute: KindCells
    """What is no communication."""

    comm: KindCells
    """Communication: its kind where it moved bytes, `WAIT` where it waited."""


def step_raster(
    timeline: StepTimeline, ranks: Sequence[int], *, max_rows: int, num_bins: int
) -> StepRaster:
    """Average a step over the area of each pixel and keep the kind with the largest share.

    Spans nested in others take their time from these; below the second level
    they count as what they lie in.

    Args:
        timeline: The step.
        ranks: Row order; ranks left out are not drawn.
        max_rows: Most row pairs; neighbours in ``ranks`` are joined beyond it.
        num_bins: Columns.
    """
    first, _ = _blocks(ranks, max_rows)
    blocks = np.split(np.array(ranks, dtype=np.int64), first[1:])
    areas = step_areas(timeline, row_by_rank(blocks), num_rows=len(first), num_bins=num_bins)
    return StepRaster(
        rank_blocks=tuple(tuple(block.tolist()) for block in blocks),
        edges_ns=areas.edges_ns,
        compute=areas.compute_cells(),
        comm=areas.comm_cells(),
    )


def row_by_rank(blocks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the row of each rank by rank, -1 for ranks that stand in none of these rows."""
    ranks = np.concatenate([*blocks, np.zeros(0, dtype=np.int64)])
    row_of = np.full(int(ranks.max(initial=0)) + 1, NONE, dtype=np.int64)
    row_of[ranks] = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    return row_of


def _blocks(
    labels: Sequence[int], most: int
) -> tuple[NDArray[np.intp], tuple[tuple[int, int], ...]]:
    """Cut a row of labels into at most ``most`` blocks of equal size (the last may be smaller)."""
    size = max(1, -(-len(labels) // most))
    first = np.arange(0, len(labels), size)
    last = [min(begin + size, len(labels)) - 1 for begin in first.tolist()]
    blocks = tuple(
        (labels[begin], labels[stop]) for begin, stop in zip(first.tolist(), last, strict=True)
    )
    return first, blocks
