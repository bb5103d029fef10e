"""Compute as with micro-batches of equal length, where nobody told the lengths.

The ranks of all stages, and tensor-parallel partners, run the same micro-batches: what is long on
all of them is a long micro-batch, what is long on one of them is that rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians
from ..arrays.grouping import number_rows
from ..arrays.sorting import places_of
from ..statistics.baseline import common_ratio, own_medians
from ..statistics.peer_comparison import MIN_PEERS
from .lengths_known import OUTERMOST
from .sequence_imbalance import LEAST_CORRELATION, LEAST_ITEMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..replay.model import ComputeItems


def even_columns(items: ComputeItems, coords: Mapping[int, Coords]) -> ComputeItems | None:
    """Return the items as if all micro-batches had the same length.

    A *column* are the ranks of one dp position. A micro-batch is as long as it is on the middle
    rank of its column, against that rank's own median; and a column's median is as long as it is
    on the middle one of its ranks, against the other ranks of that rank's stage.

    Args:
        items: Compute by micro-batch.
        coords: Position of each rank.

    Returns:
        None where a column has fewer ranks than one that is slow could be told from (`MIN_PEERS`),
        or where a rank's compute does not follow its column's (correlation below
        `LEAST_CORRELATION`).
    """
    if len(items) < LEAST_ITEMS:
        return None
    ranks = np.unique(items.rank)
    at = places_of(items.rank, ranks)
    column, stage = (
        np.array([getattr(coords[rank], axis) for rank in ranks.tolist()]) for axis in ("dp", "pp")
    )
    if np.unique(column, return_counts=True)[1].min() < MIN_PEERS:
        return None
    usual = own_medians(items.self_ns, items.rank, items.kind, items.chunk)
    if not (usual > 0).all():
        return None
    ratio = items.self_ns / usual
    ratio /= common_ratio(ratio, items.step)
    length = _middle_ranks(ratio, items, column[at])
    if not _follows(ratio, length):
        return None
    level = usual / own_medians(usual, stage[at], items.kind, items.chunk)
    scale = length * own_medians(level, column[at])
    scale /= scale.mean()
    return replace(items, self_ns=np.rint(items.self_ns / scale).astype(np.int64))


def _middle_ranks(
    ratio: NDArray[np.float64], items: ComputeItems, column: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the median over a column's ranks of what each took for a micro-batch, over its usual.

    Args:
        ratio: Shape (items,).
        items: The items.
        column: Shape (items,).
    """
    place, num = number_rows(items.step, items.rank, items.microbatch)
    of_rank = np.bincount(place, weights=ratio, minlength=num) / np.bincount(place, minlength=num)
    first = np.zeros(num, dtype=np.int64)
    first[place] = np.arange(len(place))
    shared, num_shared = number_rows(items.step[first], column[first], items.microbatch[first])
    middle: NDArray[np.float64] = group_medians(of_rank, shared, num_shared)[0][shared][place]
    return middle


def _follows(ratio: NDArray[np.float64], length: NDArray[np.float64]) -> bool:
    """Tell whether what ranks took follows the lengths, pauses left out."""
    low, high = np.quantile(ratio, (OUTERMOST, 1 - OUTERMOST))
    kept = (ratio >= low) & (ratio <= high)
    x, y = length[kept], ratio[kept]
    if len(x) < LEAST_ITEMS or x.std() == 0 or y.std() == 0:
        return False
    return float(np.corrcoef(x, y)[0, 1]) >= LEAST_CORRELATION
