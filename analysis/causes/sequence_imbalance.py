"""Micro-batches of unequal length: compute that varies together in forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ..arrays.sorting import sort_rows, stable_order
from ..statistics.baseline import common_ratio, own_medians, step_medians

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from ..replay.model import ComputeItems
    from ..trace.context import MicrobatchTable

LEAST_CORRELATION = 0.9
"""Source: arXiv 2505.05713, section 5.3: forward and backward of one micro-batch."""

LEAST_ITEMS = 16
"""Micro-batches that a correlation needs."""

LEAST_OF_RANK = 8
"""Micro-batches of a rank whose median says what is usual for it; of one alone it says nothing."""


NUM_ROUNDS = 4
"""Of finding what lengths explain and what whole steps are longer by, in turn."""

FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEffect:
    """How far micro-batches' compute varies together."""

    correlation: float
    """Between forward and backward of one micro-batch, or between compute and lengths."""

    by_lengths: bool
    """Whether known sums of squared lengths explain it."""

    spread_ratio: float
    """Standard deviation of a micro-batch's compute over its mean."""


def sequence_effect(
    items: ComputeItems, lengths: MicrobatchTable, blamed: Collection[int], *, is_routed: bool
) -> SequenceEffect | None:
    """Measure how far compute varies from micro-batch to micro-batch, and why.

    Each item is held against the median of its rank, kind and chunk, so that
    neither slow ranks nor long stages count.

    Args:
        items: Compute by micro-batch.
        lengths: Lengths of the micro-batches, where the loader told them.
        blamed: Ranks whose compute varies for another reason.
        is_routed: Whether the items hold compute of experts: what the router sends them varies
            together in forward and backward as well, so only known lengths tell.

    Returns:
        None where there are too few micro-batches, or nothing varies together.
    """
    ratio = _against_own_median(items)
    ratio = ratio / common_ratio(ratio, items.step)
    forward, backward = _pairs(items)
    free = ~np.isin(items.rank[forward], list(blamed))
    forward, backward = forward[free], backward[free]
    if len(forward) < LEAST_ITEMS:
        return None
    spread = float(np.std(ratio[forward]))
    together = _correlation(ratio[forward], ratio[backward])
    by_length = _length_correlation(items, ratio, forward, lengths)
    if by_length is not None:
        # Known lengths that do not explain it are not the cause.
        if by_length < LEAST_CORRELATION:
            return None
        return SequenceEffect(correlation=by_length, by_lengths=True, spread_ratio=spread)
    if is_routed:
        return None
    if together is not None and together >= LEAST_CORRELATION:
        return SequenceEffect(correlation=together, by_lengths=False, spread_ratio=spread)
    return None


def _against_own_median(items: ComputeItems) -> NDArray[np.float64]:
    """Return each item over the median of its rank, kind and chunk."""
    median = own_medians(items.self_ns, items.rank, items.kind, items.chunk)
    ratio: NDArray[np.float64] = items.self_ns / np.maximum(median, 1.0)
    return ratio


def _pairs(items: ComputeItems) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of each micro-batch's forward and of its backward."""
    found = []
    for kind in (FORWARD, BACKWARD):
        rows = np.flatnonzero(items.kind == kind)
        order = sort_rows(
            items.step[rows], items.rank[rows], items.chunk[rows], items.microbatch[rows]
        )
        found.append(rows[order])
    forward, backward = found
    if len(forward) != len(backward):
        return forward[:0], backward[:0]
    same = np.ones(len(forward), dtype=np.bool_)
    for column in (items.step, items.rank, items.chunk, items.microbatch):
        same &= column[forward] == column[backward]
    return forward[same], backward[same]


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Return Pearson's correlation once the outermost 1 % (pauses) are left out."""
    low, high = np.quantile(x, (0.005, 0.995)), np.quantile(y, (0.005, 0.995))
    keep = (x >= low[0]) & (x <= low[1]) & (y >= high[0]) & (y <= high[1])
    x, y = x[keep], y[keep]
    if len(x) < LEAST_ITEMS or x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def squares_of(items: ComputeItems, lengths: MicrobatchTable) -> NDArray[np.float64]:
    """Return the sum of squared lengths of each item's micro-batch, NaN where nobody told it.

    Args:
        items: Compute by micro-batch.
        lengths: What the loaders told.

    Returns:
        Shape (items,).
    """
    known = lengths.sum_squared_lengths >= 0
    if not known.any() or not len(items):
        return np.full(len(items), np.nan)
    size = int(max(items.microbatch.max(), lengths.microbatch.max())) + 1
    ranks = int(max(items.rank.max(), lengths.rank.max())) + 1

    def keys(table: ComputeItems | MicrobatchTable) -> NDArray[np.int64]:
        return (table.step.astype(np.int64) * ranks + table.rank) * size + table.microbatch

    told = keys(lengths)[known]
    order = stable_order(told)
    wanted = keys(items)
    at = np.minimum(np.searchsorted(told[order], wanted), len(told) - 1)
    squares = lengths.sum_squared_lengths[known][order][at].astype(np.float64)
    return np.where(told[order][at] == wanted, squares, np.nan)


def _length_correlation(
    items: ComputeItems,
    ratio: NDArray[np.float64],
    forward: NDArray[np.int64],
    lengths: MicrobatchTable,
) -> float | None:
    """Return how compute follows the sum of squared lengths; None where these are unknown."""
    squares = squares_of(items, lengths)[forward]
    known = ~np.isnan(squares)
    if known.sum() < LEAST_ITEMS:
        return None
    x, y = squares[known], ratio[forward][known]
    if x.std() == 0:
        return None
    step, rank, chunk = (column[forward][known] for column in (items.step, items.rank, items.chunk))
    often = len(x) >= LEAST_OF_RANK * len(np.unique(rank)) * len(np.unique(chunk))
    # What the lengths leave unexplained tells by how much a step was longer as a whole, and what
    # is usual for a rank: its median item has the length that it happens to have.
    for _ in range(NUM_ROUNDS):
        slope, level = np.polyfit(x, y, 1)
        y = y / step_medians(y / (level + slope * x), step)
        if often:
            y = y / own_medians(y / (level + slope * x), rank, chunk)
    return _correlation(y, x)
