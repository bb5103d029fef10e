"""How much compute varies from step to step when nothing is wrong."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEVIATION_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


MIN_CHANGES = 3
NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable ..."""

NORMAL_90TH = 1.6449
"""... and its 90th percentile."""


FALSE_ALARM_RATE = 0.0003
"""Share of healthy runs in which a test of this kind may find something: with a few such tests a
run about 0.1 alarms come in 300 runs. No alarm in 300 healthy runs is what is asked."""


def robust_deviation(values: NDArray[np.float64]) -> float:
    """Return the median absolute deviation, scaled to a standard deviation; NaNs are passed over.

    Returns:
        0.0 for equal values, NaN where there is none.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan")
    return DEVIATION_PER_MAD * float(np.median(np.abs(known - np.median(known))))


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


def deviation_without_jumps(values: NDArray[np.float64], *, num_levels: int = 1) -> float:
    """Return the noise from step to step of rows that may all change their level at once.

    `step_deviation` has the other rows to go by. What is common to all of them, input that is
    missing everywhere, makes every row jump in the same step, and of ten steps that jump is more
    than the 90th percentile passes over. So each row's largest change is left out, or as many as it
    may change its level; of n normal changes those that are left lie below the quantile
    ``0.9 (n - 1) / n`` in nine of ten cases.

    Args:
        values: Shape (rows, steps).
        num_levels: Changes of level that a row may have: two where a phase begins and ends.
    """
    values = values[:, ~np.isnan(values).any(axis=0)]
    changes = np.sort(np.abs(np.diff(values, axis=1)), axis=1)
    num = changes.shape[1]
    num_left = num - num_levels
    if num_left < MIN_CHANGES:
        return step_deviation(values)
    middle, high = np.quantile(changes[:, :num_left], (0.5, 0.9))
    of_middle, of_high = (
        NormalDist().inv_cdf(0.5 + share * num_left / num / 2) for share in (0.5, 0.9)
    )
    return float(max(middle / of_middle, high / of_high) / np.sqrt(2.0))


def required_deviations(num_samples: int) -> float:
    """Return how many deviations stand clear of the noise among so many samples.

    The largest of n normal samples lies about ``sqrt(2 ln n)`` deviations out.
    """
    return max(4.0, 2.0 + float(np.sqrt(2.0 * np.log(max(num_samples, 1)))))


def required_t(num_samples: int, freedom: int) -> float:
    """Return how many deviations stand clear where the deviation itself was estimated.

    Of normal noise one sample of ``num_samples`` lies as far out in `FALSE_ALARM_RATE` of
    all cases.

    Args:
        num_samples: Among which one that stands clear is looked for.
        freedom: Values that the deviation was estimated from, less what was fitted; 1 or more.

    Source:
        Student's t by Wallace, "Bounds on normal approximations to Student's" (1959): ``z`` of the
        normal distribution is ``(8 f + 1) / (8 f + 3) sqrt(f ln(1 + t^2 / f))`` within 0.02.
    """
    normal = NormalDist().inv_cdf(1.0 - FALSE_ALARM_RATE / num_samples)
    normal *= (8 * freedom + 3) / (8 * freedom + 1)
    return float(np.sqrt(freedom * np.expm1(normal**2 / freedom)))


def lower_half_deviation(values: NDArray[np.float64]) -> float:
    """Return the noise of the lower half of one row: what comes and goes only adds.

    Two single steps of eight that stand out are four of its seven changes, so that even the median
    change is theirs. Half of a normal variable's values lie below its median, and half of these
    within 0.6745 deviations of it.

    Args:
        values: Shape (steps,).
    """
    known = values[~np.isnan(values)]
    below = np.median(known) - known[known <= np.median(known)]
    return float(np.median(below) / NORMAL_MEDIAN)


def median_change_deviation(values: NDArray[np.float64]) -> float:
    """Return the noise of one row that may jump up and down many times: its median change only.

    Args:
        values: Shape (steps,).
    """
    changes = np.abs(np.diff(values))
    known = changes[~np.isnan(changes)]
    if len(known) < MIN_CHANGES:
        return robust_deviation(values)
    return float(np.median(known) / NORMAL_MEDIAN / np.sqrt(2.0))
