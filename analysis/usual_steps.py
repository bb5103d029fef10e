"""What something usually takes, by its own steps alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_STEPS = 2
"""Steps that each of the two classes must have: one alone agrees with nobody."""


def usual_in_faster_steps(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each row takes in the faster of the two classes that its steps fall into.

    The classes are cut where ``k (n - k) (high - low)^2`` is largest, ``low`` being the upper
    median of the k fastest steps and ``high`` the lower median of the others. So the slow steps may
    be few or nearly all, and a lone outlier on either side makes no class. Of a row without two
    levels about the faster half is left.

    Args:
        value: Shape (rows, steps); NaN where unknown.

    Returns:
        Same shape, equal along each row: the upper median of its faster class; the median of all
        its steps where there are fewer than twice `LEAST_STEPS`.

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
    if num < 2 * LEAST_STEPS:
        return float(np.median(ordered))
    sizes = np.arange(LEAST_STEPS, num - LEAST_STEPS + 1)
    low, high = ordered[sizes // 2], ordered[(num + sizes - 1) // 2]
    best = int(np.argmax(sizes * (num - sizes) * (high - low) ** 2))
    return float(low[best])
