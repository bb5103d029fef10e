"""What something usually takes, by its own steps alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.group_stats import group_medians
from ..arrays.grouping import factorize

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_BASELINE_STEPS = 2
"""Steps that each of the two classes must have: one alone agrees with nobody."""


def faster_steps_baseline(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each row takes in the faster of the two classes that its steps fall into.

    The classes are cut where ``k (n - k) (high - low)^2`` is largest, ``low`` being the upper
    median of the k fastest steps and ``high`` the lower median of the others. So the slow steps may
    be few or nearly all, and a lone outlier on either side makes no class. Of a row without two
    levels about the faster half is left.

    Args:
        value: Shape (rows, steps); NaN where unknown.

    Returns:
        Same shape, equal along each row: the upper median of its faster class; the median of all
        its steps where there are fewer than twice `MIN_BASELINE_STEPS`.

    Source:
        Otsu, "A threshold selection method from gray-level histograms" (1979): the largest
        variance between two classes; medians instead of means.
    """
    if value.shape[1] == 1:  # the median of one is itself, of however many thousand rows
        return np.broadcast_to(value, value.shape)
    usual = np.array([_of_faster_class(row[~np.isnan(row)]) for row in value], dtype=np.float64)
    return np.broadcast_to(usual.reshape(-1, 1), value.shape)


def _of_faster_class(known: NDArray[np.float64]) -> float:
    num = len(known)
    if not num:
        return float("nan")
    ordered = np.sort(known)
    if num < 2 * MIN_BASELINE_STEPS:
        return float(np.median(ordered))
    sizes = np.arange(MIN_BASELINE_STEPS, num - MIN_BASELINE_STEPS + 1)
    low, high = ordered[sizes // 2], ordered[(num + sizes - 1) // 2]
    best = int(np.argmax(sizes * (num - sizes) * (high - low) ** 2))
    return float(low[best])


def common_step_ratio(ratio: NDArray[np.float64], step: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return by how much each step's compute is longer than usual, where nearly all of it is.

    Args:
        ratio: Shape (items,): compute over what is usual for it.
        step: Shape (items,).

    Returns:
        Shape (items,): the median of the step where `COMMON_SHARE` of its items lie above 1, or
        below, else 1.
    """
    number, num = factorize(step)
    median, count = group_medians(ratio, number, num)
    above = np.bincount(number, weights=ratio > 1.0, minlength=num) / count
    below = np.bincount(number, weights=ratio < 1.0, minlength=num) / count
    common = np.where(np.maximum(above, below) >= COMMON_SHARE, median, 1.0)
    found: NDArray[np.float64] = common[number]
    return found


def step_medians(value: NDArray[np.float64], step: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return for each row the median of its step, shape and unit of ``value``."""
    number, num = factorize(step)
    return group_medians(value, number, num)[0][number]


def medians_by_key(value: NDArray[Any], *key: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Return for each row the median over the rows with its key, shape and unit of ``value``."""
    group, num_groups = factorize(*key)
    return group_medians(value, group, num_groups)[0][group]


COMMON_SHARE = 0.9
"""Share of a step's compute that must be longer than usual, or shorter, for the step to be so:
a first step that warms up. Lengths differ from micro-batch to micro-batch."""
