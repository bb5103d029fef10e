"""How much compute varies from step to step when nothing is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROBUST_SCALE = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


MIN_CHANGES = 3
NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable ..."""

NORMAL_90TH = 1.6449
"""... and its 90th percentile."""


def robust_deviation(values: NDArray[np.float64]) -> float:
    """Return the median absolute deviation, scaled to a standard deviation; NaNs are passed over.

    Returns:
        0.0 for equal values, NaN where there is none.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan")
    return ROBUST_SCALE * float(np.median(np.abs(known - np.median(known))))


def step_deviation(values: NDArray[np.float64]) -> float:
    """Return the noise from step to step, a lasting difference between ranks left out.

    Half the steps of half the ranks may be slow: a level counts once, where it
    begins. Steps that are unknown on all ranks are passed over. With fewer than
    `MIN_CHANGES` changes there is only the deviation between the ranks to go by.

    Args:
        values: Shape (ranks, steps).
    """
    changes = np.diff(values[:, ~np.isnan(values).all(axis=0)], axis=1)
    if changes.shape[1] < MIN_CHANGES:
        return robust_deviation(values)
    known = np.abs(changes[~np.isnan(changes)])
    if not len(known):
        return float("nan")
    # Skewed noise (sequence lengths, say) has tails that its median does not show.
    middle, high = np.quantile(known, (0.5, 0.9))
    return float(max(middle / NORMAL_MEDIAN, high / NORMAL_90TH) / np.sqrt(2.0))


def num_deviations(num_samples: int) -> float:
    """Return how many deviations stand clear of the noise among so many samples.

    The largest of n normal samples lies about ``sqrt(2 ln n)`` deviations out.
    """
    return max(4.0, 2.0 + float(np.sqrt(2.0 * np.log(max(num_samples, 1)))))


def flapping_deviation(values: NDArray[np.float64]) -> float:
    """Return the noise of one row that may jump up and down many times: its median change only.

    Args:
        values: Shape (steps,).
    """
    changes = np.abs(np.diff(values))
    known = changes[~np.isnan(changes)]
    if len(known) < MIN_CHANGES:
        return robust_deviation(values)
    return float(np.median(known) / NORMAL_MEDIAN / np.sqrt(2.0))
