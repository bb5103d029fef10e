"""Noise: how much a series varies from step to step while nothing is wrong."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import MIN_ROWS_OF_KIND
from .thresholds import THRESHOLDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEVIATION_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation (MAD)."""

NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable."""


def robust_deviation(values: NDArray[np.float64]) -> float:
    """Return the median absolute deviation, scaled to a standard deviation; NaN is ignored.

    Returns:
        0.0 for equal values, NaN if there is none.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return float("nan")
    return DEVIATION_PER_MAD * float(np.median(np.abs(known - np.median(known))))


def are_usual(
    levels: NDArray[np.float64], *, num_samples: int, may_be_half: bool = False
) -> NDArray[np.bool_]:
    """Return which rows are not slow together with others. At most one slow row is called usual.

    A fault only adds time, so slow rows are at the top, and just under half of the rows may be
    slow. In an estimate over all other rows, two or three equally slow ones of eight widen the
    noise until none of them is significant, and shift the median. So rows are slow together if
    the lowest of them is significant against the rows below it alone: their median, and their
    standard deviation. Of eight alike rows, chance shows that in one of sixty cases, before the
    least excess of a finding.

    Args:
        levels: Shape (rows,), no NaN.
        may_be_half: Whether half of the rows may be slow, and not only fewer.

    Returns:
        Shape (rows,). All rows, if fewer than `MIN_ROWS_OF_KIND` would be left.
    """
    num = len(levels)
    order = np.argsort(levels, kind="stable")
    ascending = levels[order]
    fewest = (num + 1) // 2 if may_be_half else num // 2 + 1
    below = np.arange(max(fewest, MIN_ROWS_OF_KIND), num - 1)
    total, squares = np.cumsum(ascending)[below - 1], np.cumsum(ascending**2)[below - 1]
    variance = np.maximum(squares - total**2 / below, 0.0) / (below - 1)
    noise = required_deviations(num_samples) * np.sqrt(variance)
    middle = (ascending[(below - 1) // 2] + ascending[below // 2]) / 2
    significant = below[(ascending[below] - middle >= noise) & (noise > 0.0)]
    usual = np.ones(num, dtype=np.bool_)
    if len(significant):
        usual[order[significant[0] :]] = False
    return usual


def find_slow_together(excess: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where several rows are slow in the same step, shape as ``excess``.

    The ranks of a host, or the links of a switch, share a fault: they are slow at the same moment,
    and each would pass for the noise of the others. Noise of independent rows has no such moments.
    Half of the rows are slow only if other steps show that both halves do equal work.

    Args:
        excess: Shape (rows, steps); steps with unknown values are ignored.
    """
    known = np.flatnonzero(~np.isnan(excess).any(axis=0)).tolist()

    def slow_rows(*, may_be_half: bool) -> NDArray[np.bool_]:
        together = np.zeros(excess.shape, np.bool_)
        for step in known:
            usual = are_usual(excess[:, step], num_samples=excess.size, may_be_half=may_be_half)
            together[:, step] = ~usual
        return together

    found = slow_rows(may_be_half=True)
    num_equal = len(known) - int(found.any(axis=0).sum())
    return found if num_equal >= THRESHOLDS.min_several else slow_rows(may_be_half=False)


def step_deviation(values: NDArray[np.float64], *, num_levels: int = 0) -> float:
    """Return the noise from step to step, without lasting differences between the rows.

    It is estimated from the changes between consecutive steps, so a row that stays slow counts
    once, at the step in which that begins: half of the steps of half of the rows may be slow. The
    median alone would miss the tails of skewed noise, such as that of sequence lengths, so the 90th
    percentile counts as well.

    An event common to all rows, such as missing input, makes every row jump at once; in ten steps
    that is more than the 90th percentile ignores. So the ``num_levels`` largest changes of each row
    are left out. Of n normal changes, the remaining ones are below the quantile
    ``0.9 (n - num_levels) / n`` in nine of ten cases.

    Args:
        values: Shape (rows, steps); NaN if unknown. Steps unknown in all rows are ignored.
        num_levels: Changes of level that all rows may have in the same step: 2 if a phase begins
            and ends.

    Returns:
        The deviation over all values, if fewer than `min_lasting_steps` changes are left.
    """
    changes = np.diff(values[:, ~np.isnan(values).all(axis=0)], axis=1)
    num_changes = changes.shape[1]
    if num_changes < THRESHOLDS.min_lasting_steps:
        return robust_deviation(values)
    num_left = num_changes - num_levels
    if num_left < THRESHOLDS.min_lasting_steps:
        return step_deviation(values)
    known = np.sort(np.abs(changes), axis=1)[:, :num_left]
    known = known[~np.isnan(known)]
    if not len(known):
        return float("nan")
    return deviation_of_distances(known, kept=num_left / num_changes) / float(np.sqrt(2.0))


def deviation_of_distances(distances: NDArray[np.float64], *, kept: float = 1.0) -> float:
    """Return the noise from absolute differences: by their median or 90th percentile, the larger.

    Args:
        distances: At least one, no NaN.
        kept: Share of all differences that they are; the largest are left out.
    """
    shares = (0.5, 0.9)
    normal = [NormalDist().inv_cdf(0.5 + share * kept / 2) for share in shares]
    return float((np.quantile(distances, shares) / normal).max())


def lower_half_deviation(values: NDArray[np.float64]) -> float:
    """Return the noise of the lower half of one series, for effects that only add time.

    Two single slow steps of eight make four of its seven changes large, so that even the median
    change is theirs. Half of the values of a normal variable are below its median, and half of
    these are within 0.6745 deviations of it.

    Args:
        values: Shape (steps,); NaN if unknown.
    """
    known = values[~np.isnan(values)]
    below = np.median(known) - known[known <= np.median(known)]
    return float(np.median(below) / NORMAL_MEDIAN)


def median_change_deviation(values: NDArray[np.float64]) -> float:
    """Return the noise of one series that may change its level many times.

    Args:
        values: Shape (steps,); NaN if unknown.
    """
    changes = np.abs(np.diff(values))
    known = changes[~np.isnan(changes)]
    if len(known) < THRESHOLDS.min_lasting_steps:
        return robust_deviation(values)
    return float(np.median(known) / NORMAL_MEDIAN / np.sqrt(2.0))


def required_deviations(num_samples: int) -> float:
    """Return how many standard deviations a sample must be off to be significant among so many.

    The largest of n normal samples is about ``sqrt(2 ln n)`` deviations above the mean.
    """
    return max(4.0, 2.0 + float(np.sqrt(2.0 * np.log(max(num_samples, 1)))))


def required_t(
    num_samples: int,
    degrees_of_freedom: int,
    *,
    false_alarm_rate: float = THRESHOLDS.false_alarm_rate,
) -> float:
    """Return the critical value of Student's t for one of several samples (Bonferroni).

    Of normal noise, one of ``num_samples`` exceeds it in ``false_alarm_rate`` of all cases.

    Args:
        degrees_of_freedom: Values from which the deviation was estimated, less the number of
            fitted parameters; at least 1.

    Source:
        Wallace, "Bounds on normal approximations to Student's" (1959): the normal quantile ``z``
        is ``(8 f + 1) / (8 f + 3) sqrt(f ln(1 + t^2 / f))`` within 0.02.
    """
    freedom = degrees_of_freedom
    normal = NormalDist().inv_cdf(1.0 - false_alarm_rate / num_samples)
    normal *= (8 * freedom + 3) / (8 * freedom + 1)
    return float(np.sqrt(freedom * np.expm1(normal**2 / freedom)))
