"""Baselines: what a series or an item usually takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import group_medians, row_medians
from ..arrays.grouping import factorize
from ..arrays.sorting import find_positions
from .noise import DEVIATION_PER_MAD
from .thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


def faster_steps_baseline(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of the faster of the two classes into which each row's steps divide.

    The classes are split so that ``k (n - k) (high - low)^2`` is largest, with ``low`` the upper
    median of the k fastest steps and ``high`` the lower median of the others. So the slow steps may
    be few or nearly all, and a single outlier on either side makes no class. If a row has no two
    levels, about the faster half of its steps remains.

    Args:
        values: Shape (rows, steps); NaN if unknown.

    Returns:
        Same shape, equal along each row: the upper median of its faster class; the median of all
        its steps if there are fewer than twice `min_several`.

    Source:
        Otsu, "A threshold selection method from gray-level histograms" (1979): the largest
        variance between two classes; medians instead of means.
    """
    return np.broadcast_to(two_levels(values)[0].reshape(-1, 1), values.shape)


def two_levels(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the upper median of each row's faster steps, and the lower median of its slower ones.

    See `faster_steps_baseline`. Both are the median of all steps if those are too few.
    """
    if values.shape[1] == 1:  # The median of one value is itself: skip thousands of rows.
        return values[:, 0], values[:, 0]
    ordered, num_known = np.sort(values, axis=1), (~np.isnan(values)).sum(axis=1)
    low, high = np.full((2, len(values)), np.nan)
    for num in np.unique(num_known[num_known > 0]).tolist():
        rows = num_known == num
        low[rows], high[rows] = _class_medians(ordered[rows, :num])
    return low, high


def clear_levels(
    values: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return `two_levels` of each row, and the robust deviation of its faster steps."""
    low, high = two_levels(values)
    usual = np.where(values >= (low + high)[:, None] / 2, np.nan, values)
    distance = np.abs(usual - row_medians(usual)[:, None])
    return low, high, DEVIATION_PER_MAD * row_medians(distance)


def _class_medians(
    ordered: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the result of `two_levels` for rows of ascending known values."""
    num = ordered.shape[1]
    if num < 2 * THRESHOLDS.min_several:
        medians = np.median(ordered, axis=1)
        return medians, medians
    sizes = np.arange(THRESHOLDS.min_several, num - THRESHOLDS.min_several + 1)
    low, high = ordered[:, sizes // 2], ordered[:, (num + sizes - 1) // 2]
    best = np.argmax(sizes * (num - sizes) * (high - low) ** 2, axis=1)
    rows = np.arange(len(low))
    return low[rows, best], high[rows, best]


def common_step_ratio(ratio: NDArray[np.float64], step: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return how much longer than usual the compute of a whole step is.

    Args:
        ratio: Shape (items,): compute over its baseline.
        step: Shape (items,).

    Returns:
        Shape (items,): the median of the item's step if `common_share` of the step's items are
        above 1, or below, else 1.
    """
    number, num = factorize(step)
    median, count = group_medians(ratio, number, num)
    above = np.bincount(number, weights=ratio > 1.0, minlength=num) / count
    below = np.bincount(number, weights=ratio < 1.0, minlength=num) / count
    common = np.where(np.maximum(above, below) >= THRESHOLDS.common_share, median, 1.0)
    found: NDArray[np.float64] = common[number]
    return found


def equal_share_ratio(
    amount: NDArray[np.float64],
    *,
    rank: NDArray[np.int32],
    step: NDArray[np.int32],
    stage_of_rank: Mapping[int, int],
) -> NDArray[np.float64]:
    """Return a rank's share of its stage's work in a step if all had equal ones, over its own.

    Args:
        amount: Shape (items,): work.
        rank: Shape (items,).
        step: Shape (items,).
        stage_of_rank: Of all ranks, also of those without any work.

    Returns:
        Shape (items,).
    """
    ranks = np.array(sorted(stage_of_rank))
    stages = np.array([stage_of_rank[each] for each in ranks.tolist()], dtype=np.int64)
    stage = stages[find_positions(rank, ranks)]
    own, whole = (
        np.bincount(cell, weights=amount, minlength=num).astype(np.float64)[cell]
        for cell, num in (factorize(rank, step), factorize(stage, step))
    )
    equal = whole / np.bincount(stages)[stage]
    return np.divide(equal, own, out=np.ones(len(own)), where=own > 0)


def equal_work_ratio(
    amount: NDArray[np.float64],
    of_work: tuple[NDArray[np.int32], NDArray[np.int32]],
    of_operations: tuple[NDArray[np.int32], NDArray[np.int32]],
    *,
    stage_of_rank: Mapping[int, int],
) -> NDArray[np.float64]:
    """Return a rank's work in a step if its stage shared it equally, over its own.

    Args:
        amount: Shape (items,): work.
        of_work: Its rank and step, shape (items,) each.
        of_operations: Rank and step of what is done for it, shape (operations,) each.
        stage_of_rank: Of the ranks that have work.

    Returns:
        Shape (operations,): 1 where the shares are equal, or the rank has none.
    """
    key, num = factorize(*map(np.concatenate, zip(of_work, of_operations, strict=True)))
    ratio = np.ones(num)
    ratio[key[: len(amount)]] = equal_share_ratio(
        amount, rank=of_work[0], step=of_work[1], stage_of_rank=stage_of_rank
    )
    found: NDArray[np.float64] = ratio[key[len(amount) :]]
    return found
