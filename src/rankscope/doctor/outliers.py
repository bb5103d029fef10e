"""Outliers among alike devices, links or groups, judged against their peers and no table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.statistics.baseline import two_levels
from rankscope.analysis.statistics.noise import are_usual, required_deviations, robust_deviation
from rankscope.analysis.statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MIN_GAP_SHARE = 1.0 / 3.0
"""Share of the distance of two levels that must be empty. Noise of one level fills it. Source:
choice."""

MIN_OF_LEVEL = 2
"""Values of which a deviation can be computed."""


def find_slow(times: Sequence[float]) -> NDArray[np.bool_] | None:
    """Return which of some alike things take longer than their peers.

    A fault only adds time, and several may have one. So each is compared with the median of those
    others that are not slow together: it is slow if it exceeds that by `min_excess_ratio`, and by
    more deviations than chance would show among so many. Groups share their hosts, so that a few
    slow hosts make most groups slow: if there are two clearly separate levels, and `min_peers` are
    at the lower one, all above are slow.

    Args:
        times: Any quantity that is larger for a slower one.

    Returns:
        None if there are fewer than `min_peers` peers.
    """
    values = np.asarray(times, dtype=np.float64)
    if len(values) <= THRESHOLDS.min_peers:
        return None
    usual = are_usual(values, num_samples=len(values), may_be_half=True)
    slow = np.zeros(len(values), dtype=np.bool_)
    for place, value in enumerate(values.tolist()):
        others = values[usual & (np.arange(len(values)) != place)]
        if len(others) < THRESHOLDS.min_peers:
            others = np.delete(values, place)
        middle = float(np.median(others))
        noise = required_deviations(len(values)) * _deviation(others)
        excess = value - middle
        slow[place] = excess > max(THRESHOLDS.min_excess_ratio * middle, noise)
    return slow | _above_lower_level(values)


def _deviation(values: NDArray[np.float64]) -> float:
    """Return the standard deviation of a few values; the robust one alone is often too small."""
    return max(robust_deviation(values), float(np.std(values, ddof=1)))


def count_fast_if_few(times: Sequence[float]) -> int:
    """Return how many are clearly faster than all others, if they are too few to be the peers.

    Then most are slow, or a few are better placed: no one can be named, and no one is healthy.

    Returns:
        0 if there are no two separate levels, or enough peers at the lower one.
    """
    values = np.asarray(times, dtype=np.float64)
    if len(values) <= THRESHOLDS.min_peers:
        return 0
    above = _upper_level(values, noise_of_upper=True)
    num_fast = int((~above).sum())
    return num_fast if above.any() and num_fast < THRESHOLDS.min_peers else 0


def _above_lower_level(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which values are of the upper of two levels; none if there are no two levels."""
    above = _upper_level(values, noise_of_upper=False)
    return above if int((~above).sum()) >= THRESHOLDS.min_peers else np.zeros_like(above)


def _upper_level(values: NDArray[np.float64], *, noise_of_upper: bool) -> NDArray[np.bool_]:
    """Return which values are of the upper of two clearly separate levels, whatever its size.

    Args:
        values: Shape (values,).
        noise_of_upper: Whether the noise is that of the upper level, not of the lower one.
    """
    (low,), (high,) = two_levels(values[None, :])
    above: NDArray[np.bool_] = values > (low + high) / 2
    none = np.zeros(len(values), dtype=np.bool_)
    level = values[above] if noise_of_upper else values[~above]
    if not above.any() or len(level) < MIN_OF_LEVEL:
        return none
    noise = required_deviations(len(values)) * _deviation(level)
    if high - low <= max(THRESHOLDS.min_excess_ratio * low, noise):
        return none
    gap = float(values[above].min() - values[~above].max())
    return above if gap > MIN_GAP_SHARE * (high - low) else none
