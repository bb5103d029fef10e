"""Compute as it would have been with micro-batches of equal length, where lengths are known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..statistics.baseline import own_medians, step_medians
from .sequence_imbalance import LEAST_CORRELATION, LEAST_ITEMS, squares_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..replay.model import ComputeItems
    from ..trace.context import MicrobatchTable

OUTERMOST = 0.005
"""Share of the items at either end that a fit leaves out: pauses."""

NUM_ROUNDS = 4
"""Of fitting: first against the items' own medians, then against those of evened items. Each round
takes the error to a thirtieth."""


def even_lengths(items: ComputeItems, lengths: MicrobatchTable) -> ComputeItems | None:
    """Return the items as if all micro-batches had the same sum of squared lengths.

    Within one (rank, kind, chunk) an item is taken to last ``a + b s``, s being its sum of
    squared lengths; one ``b / a`` is fitted for each kind over all ranks. So neither a slow rank
    nor a long stage counts, and what is left of an item is what its length does not explain.

    Args:
        items: Compute by micro-batch.
        lengths: What the loaders told.

    Returns:
        None where a length is unknown, where all are equal, or where they do not explain compute
        (correlation below `LEAST_CORRELATION`): then nothing is known of any item's share.

    Source:
        arXiv 2505.05713, section 5.3: a micro-batch's compute goes with the sum of its squared
        sequence lengths, beside a part that goes with its tokens.
    """
    squares = squares_of(items, lengths)
    if len(items) < LEAST_ITEMS or np.isnan(squares).any() or not squares.any():
        return None
    relative = squares / squares.mean()
    scale = np.ones(len(items))
    for kind in np.unique(items.kind).tolist():
        rows = np.flatnonzero(items.kind == kind)
        found = _scale_of(items, rows, relative[rows])
        if found is None:
            return None
        scale[rows] = found
    return replace(items, self_ns=np.rint(items.self_ns / scale).astype(np.int64))


def _scale_of(
    items: ComputeItems, rows: NDArray[np.int64], relative: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return what each item's length makes of it, 1 for the mean length; None where unclear."""
    scale, correlation = np.ones(len(rows)), 0.0
    key = (items.rank[rows], items.kind[rows], items.chunk[rows])
    for _ in range(NUM_ROUNDS):
        usual = own_medians(items.self_ns[rows] / scale, *key)
        if not (usual > 0).all():
            return None
        ratio = items.self_ns[rows] / usual
        # What lengths do not explain of a whole step is the step's: it warms up, say.
        ratio /= step_medians(ratio / scale, items.step[rows])
        low, high = np.quantile(ratio, (OUTERMOST, 1 - OUTERMOST))
        kept = (ratio >= low) & (ratio <= high)
        x, y = relative[kept], ratio[kept]
        if len(x) < LEAST_ITEMS or x.std() == 0 or y.std() == 0:
            return None
        # The first medians are those of whatever lengths a rank had: only the last ones tell.
        correlation = float(np.corrcoef(x, y)[0, 1])
        slope, level = np.polyfit(x, y, 1)
        scale = (level + slope * relative) / (level + slope)
        if not (scale > 0).all():
            return None
    return scale if correlation >= LEAST_CORRELATION else None
