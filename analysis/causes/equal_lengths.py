"""Compute as it would be if all micro-batches had equal lengths.

The lengths are declared by the job's loader, or inferred: the ranks of all stages and of all
tensor-parallel positions run the same micro-batches, so what is long on all of them is a long
micro-batch, and what is long on one of them is that rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.group_stats import means_by_key, medians_by_key
from ..arrays.grouping import factorize
from ..arrays.sorting import find_positions
from ..statistics.baseline import common_step_ratio
from ..statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..replay.model import ComputeItems, ReplayModel
    from ..trace.context import MicrobatchTable


NUM_ROUNDS = 4
"""Rounds of fitting: the first against the items' own medians, the others against those of
equalized items. Each round reduces the error to a thirtieth."""


def equalize_declared_lengths(items: ComputeItems, lengths: MicrobatchTable) -> ComputeItems | None:
    """Return the items as if all micro-batches had the same sum of squared lengths.

    An item of one (rank, kind, chunk) takes ``a + b s``, ``s`` being its sum of squared lengths, or
    the elements of its input if the model gets no tokens (`declared_sizes`).
    One ``b / a`` is fitted for each kind over all ranks, so that neither a slow rank nor a stage
    with more work counts. What its length does not explain stays in the item.

    Returns:
        None if a length is unknown, if all are equal, or if they do not explain compute
        (correlation below `min_correlation`).

    Source:
        arXiv 2505.05713, section 5.3: a micro-batch's compute goes with the sum of its squared
        sequence lengths, beside a part that goes with its tokens.
    """
    sizes, _ = declared_sizes(items, lengths)
    if len(items) < THRESHOLDS.min_items or np.isnan(sizes).any() or not sizes.any():
        return None
    relative = sizes / sizes.mean()
    scale = np.ones(len(items))
    for kind in np.unique(items.kind).tolist():
        rows = np.flatnonzero(items.kind == kind)
        factor = _fit_scale(items, rows, relative[rows])
        if factor is None:
            return None
        scale[rows] = factor
    return replace(items, self_ns=np.rint(items.self_ns / scale).astype(np.int64))


def declared_work(items: ComputeItems, lengths: MicrobatchTable) -> tuple[NDArray[np.float64], ...]:
    """Return the tokens of each item and its sum of squared lengths, or its elements.

    Shape (items,) each. It has elements if it has no tokens: images, sounds, features.

    Its compute grows with the one or the other, whatever the job is, so no fit is needed: of what
    has equal shapes on each rank, unequal ones on two ranks, nothing can be fitted.

    Returns:
        Nothing if one is unknown, or if most items that have more or fewer tokens than is usual of
        their rank, kind and chunk do not take more or less time, by `min_excess_ratio` each: then
        tokens are not the work, as where all sequences are padded.
    """
    columns = ("num_tokens", "sum_squared_lengths") if has_tokens(lengths) else ("num_elements",)
    measures = [of_items(items, lengths, column) for column in columns]
    if not len(items) or not all((each > 0).all() for each in (items.self_ns, *measures)):
        return ()
    key = (items.rank, items.kind, items.chunk)
    took, tokens = (
        np.log(each / medians_by_key(each, *key)) for each in (items.self_ns, measures[0])
    )
    least = np.log1p(THRESHOLDS.min_excess_ratio)
    differs = np.abs(tokens) >= least
    if differs.any() and float(np.median((took * np.sign(tokens))[differs])) < least:
        return ()
    return tuple(measures)


def declared_sizes(
    items: ComputeItems, lengths: MicrobatchTable
) -> tuple[NDArray[np.float64], str]:
    """Return each item's size, NaN if unknown, and what that is in words. Shape (items,).

    It is the sum of its squared lengths; if no micro-batch has tokens, the elements of its input.
    """
    if has_tokens(lengths):
        return of_items(items, lengths, "sum_squared_lengths"), "sum of squared lengths"
    return of_items(items, lengths, "num_elements"), "number of elements of the input"


def has_tokens(lengths: MicrobatchTable) -> bool:
    """Return whether the size of any micro-batch is known in tokens."""
    return bool((lengths.num_tokens >= 0).any() or (lengths.sum_squared_lengths >= 0).any())


def of_items(items: ComputeItems, lengths: MicrobatchTable, column: str) -> NDArray[np.float64]:
    """Return a column of the micro-batches by item; NaN if unknown. Shape (items,)."""
    key, num = factorize(
        *(
            np.concatenate((getattr(items, name), getattr(lengths, name)))
            for name in ("step", "rank", "microbatch")
        )
    )
    values = getattr(lengths, column)
    found = np.full(num, np.nan)
    is_known = values >= 0
    found[key[len(items) :][is_known]] = values[is_known]
    return found[key[: len(items)]]


def _fit_scale(
    items: ComputeItems, rows: NDArray[np.int64], relative: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return the factor by which each item is longer for its length; None if there is no fit."""
    scale, correlation = np.ones(len(rows)), 0.0
    key = (items.rank[rows], items.kind[rows], items.chunk[rows])
    for _ in range(NUM_ROUNDS):
        median = medians_by_key(items.self_ns[rows] / scale, *key)
        if not (median > 0).all():
            return None
        ratio = items.self_ns[rows] / median
        # A step that is longer as a whole, one that warms up, is not longer for its lengths.
        ratio /= medians_by_key(ratio / scale, items.step[rows])
        kept = _is_no_outlier(ratio)
        x, y = relative[kept], ratio[kept]
        if len(x) < THRESHOLDS.min_items or np.ptp(x) == 0 or np.ptp(y) == 0:
            return None
        # Only that of the last round counts: the first medians are those of any lengths.
        correlation = float(np.corrcoef(x, y)[0, 1])
        slope, level = np.polyfit(x, y, 1)
        scale = (level + slope * relative) / (level + slope)
        if not (scale > 0).all():
            return None
    return scale if correlation >= THRESHOLDS.min_correlation else None


def equalize_inferred_lengths(
    items: ComputeItems, coords: Mapping[int, Coords]
) -> ComputeItems | None:
    """Return the items as if all micro-batches had the same length, with lengths inferred.

    A *column* is the ranks of one dp position. The length of a micro-batch is what it takes on the
    median rank of its column, relative to that rank's own median. The length of a column's median
    micro-batch is what it takes on the median one of its ranks, relative to the other ranks of that
    rank's stage.

    Returns:
        None if a column has fewer than `min_peers` ranks, or if the compute of the ranks does not
        follow that of their column (correlation below `min_correlation`).
    """
    if len(items) < THRESHOLDS.min_items:
        return None
    ranks = np.unique(items.rank)
    at = find_positions(items.rank, ranks)
    column, stage = (
        np.array([getattr(coords[rank], axis) for rank in ranks.tolist()]) for axis in ("dp", "pp")
    )
    if np.unique(column, return_counts=True)[1].min() < THRESHOLDS.min_peers:
        return None
    median = medians_by_key(items.self_ns, items.rank, items.kind, items.chunk)
    if not (median > 0).all():
        return None
    ratio = items.self_ns / median
    ratio /= common_step_ratio(ratio, items.step)
    length = medians_by_key(ratio, items.step, column[at], items.microbatch)
    if (correlation(length, ratio) or 0.0) < THRESHOLDS.min_correlation:
        return None
    level = median / medians_by_key(median, stage[at], items.kind, items.chunk)
    scale = length * medians_by_key(level, column[at])
    scale /= scale.mean()
    return replace(items, self_ns=np.rint(items.self_ns / scale).astype(np.int64))


def correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Return Pearson's correlation without the outliers (pauses); None if it is undefined."""
    kept = _is_no_outlier(x) & _is_no_outlier(y)
    x, y = x[kept], y[kept]
    if len(x) < THRESHOLDS.min_items or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _is_no_outlier(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    share = THRESHOLDS.max_faulty_share
    low, high = np.quantile(values, (share, 1 - share))
    inside: NDArray[np.bool_] = (values >= low) & (values <= high)
    return inside


def equalize_durations(
    duration_ns: NDArray[np.float64],
    *,
    rank: NDArray[np.int32],
    step: NDArray[np.int32],
    label: NDArray[np.int64],
    span: NDArray[np.int64] | None = None,
    may_be_slow: bool = True,
) -> NDArray[np.float64]:
    """Return how long pieces of compute would take if all micro-batches had the same length.

    Equal lengths change which rank computes the tokens, not how many tokens there are. So a span
    takes the mean of the spans with its label, times the factor of its rank if that is slow in each
    step, times the factor of its whole step. The pieces of a span share this time as they shared
    the recorded one. They are not equalized one by one, because the number of pieces depends on who
    waited for whom, and so on the lengths.

    Args:
        duration_ns: Shape (pieces,), as recorded.
        rank: Shape (pieces,), as all others.
        step: Step number or index.
        label: Equal for pieces of like spans; never equal across stages.
        span: Equal for pieces of one span; None: each piece is a span.
        may_be_slow: Whether a rank that is longer in each step may be slow. Not if its lengths, or
            its forwards without gradients, show that it is not.

    Returns:
        Shape (pieces,).
    """
    if span is None:
        span = np.arange(len(duration_ns))
    of_span, num = factorize(span)
    first = np.zeros(num, dtype=np.int64)
    first[of_span] = np.arange(len(of_span))
    whole = np.bincount(of_span, weights=duration_ns, minlength=num)
    rank, step, label = rank[first], step[first], label[first]
    common = common_step_ratio(_ratio(whole, medians_by_key(whole, rank, label)), step)
    mean = means_by_key(whole / common, label)
    ratio = _ratio(means_by_key(whole / common, rank, step), means_by_key(mean, rank, step))
    of_rank, num_ranks = factorize(rank)
    least = np.full(num_ranks, np.inf)
    np.minimum.at(least, of_rank, ratio)
    # A slow rank is slow in each step; others differ by the lengths that they happened to get.
    is_slow = may_be_slow & (least[of_rank] >= 1.0 + THRESHOLDS.min_excess_ratio)
    of_slow_rank = np.where(is_slow, medians_by_key(ratio, rank), 1.0)
    equal_ns: NDArray[np.float64] = (
        duration_ns * _ratio(mean * of_slow_rank * common, whole)[of_span]
    )
    return equal_ns


def _ratio(values: NDArray[Any], to: NDArray[Any]) -> NDArray[np.float64]:
    """Return the quotients, 1 if the denominator is 0."""
    quotients: NDArray[np.float64] = np.divide(values, to, out=np.ones(len(values)), where=to > 0)
    return quotients


def equalize_experts(
    model: ReplayModel,
    experts: NDArray[np.bool_],
    chosen: NDArray[np.bool_],
    equalized_ns: NDArray[np.float64],
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Add the compute of experts, which depends on the length and on what the router sends.

    Each piece of it would be shorter by the same factor as the rest of its span. If that does not
    make the pieces vary less, they are left as recorded.

    Args:
        experts: Shape (ops,): compute of experts.
        chosen: Shape (ops,): compute outside experts that has been equalized.
        equalized_ns: Shape (ops,): what that would take.

    Returns:
        ``chosen`` and ``equalized_ns`` with the experts' pieces added.
    """
    rows = np.flatnonzero(experts)
    if model.span is None or not len(rows):
        return chosen, equalized_ns
    duration_ns, size = model.operations.duration_ns, int(model.span.max()) + 1
    after, before = (
        np.bincount(model.span[chosen], weights=lengths_ns[chosen], minlength=size)
        for lengths_ns in (equalized_ns, duration_ns)
    )
    equal = duration_ns[rows] * _ratio(after, before)[model.span[rows]]
    rank, label = model.rank[rows], model.operations.label[rows]
    of_equal, of_recorded = (
        float(np.mean(np.abs(_ratio(took, medians_by_key(took, rank, label)) - 1.0)))
        for took in (equal, duration_ns[rows])
    )
    if of_equal >= of_recorded:
        return chosen, equalized_ns
    with_experts_ns = equalized_ns.copy()
    with_experts_ns[rows] = equal
    return chosen | experts, with_experts_ns
