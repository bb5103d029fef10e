"""How much compute varies from step to step when nothing is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROBUST_SCALE = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def robust_deviation(values: NDArray[np.float64]) -> float:
    """Return the median absolute deviation, scaled to a standard deviation; NaNs are passed over.

    Returns:
        0.0 for equal values, NaN where there is none.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan")
    return ROBUST_SCALE * float(np.median(np.abs(known - np.median(known))))


def best_segment(values: NDArray[np.float64]) -> tuple[int, int]:
    """Return (first, last) of the run of columns with the largest sum.

    With values measured from a threshold this is where a slow phase begins
    and ends: a lone dip inside does not split it, a lone spike far away does
    not stretch it.

    Args:
        values: Shape (steps,), not empty; NaN counts as 0.

    Source:
        Kadane's algorithm for the maximum-sum subarray.
    """
    best, best_sum = (0, 0), -np.inf
    first, running = 0, 0.0
    for index, value in enumerate(np.nan_to_num(values).tolist()):
        if running <= 0.0:
            first, running = index, 0.0
        running += value
        if running > best_sum:
            best, best_sum = (first, index), running
    return best
