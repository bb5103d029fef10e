"""Whether a phase of one row differs from the row's other steps, and how sure its level is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .baseline import MIN_BASELINE_STEPS
from .noise import NORMAL_MEDIAN, required_deviations, required_t
from .peers import median_of_peers
from .phases import MEDIAN_STANDARD_ERROR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .phases import Phase


def is_significant(
    values: NDArray[np.float64], phase: Phase, *, num_series: int, min_deviation: float = 0.0
) -> bool:
    """Tell whether a phase differs from the row's other steps by more than both vary.

    Of a noisy row some run of steps always lies above its faster ones. Student's t of the two
    means, with what is added for having looked at each step of each row; outliers only make it
    smaller.

    Args:
        values: Shape (steps,): the row; NaN where unknown.
        phase: A run of its steps.
        num_series: Rows that the phase was looked for in.
        min_deviation: What each value is unsure by at least, where that is known otherwise.
    """
    columns = np.arange(len(values))
    within = (columns >= phase.first) & (columns <= phase.last) & ~np.isnan(values)
    inside, outside = values[within], values[~within & ~np.isnan(values)]
    if len(outside) < MIN_BASELINE_STEPS:
        return False
    spread = np.concatenate((inside - inside.mean(), outside - outside.mean())).std(ddof=2)
    error = np.sqrt(1 / len(inside) + 1 / len(outside))
    difference = inside.mean() - outside.mean()
    num = num_series * len(values)
    clear = required_t(num, len(inside) + len(outside) - 2)
    least = max(clear * spread, required_deviations(num) * min_deviation)
    return bool(difference >= least * error)


def level_standard_error(ratio: NDArray[np.float64]) -> float:
    """Return the standard error of a step's median over the links, by what the links differ by.

    By luck a few levels lie closer together from step to step than each of them is sure.

    Args:
        ratio: Shape (links, steps): each link over what is usual for it.

    Returns:
        0.0 with one link alone, or one in each step: then only the changes from step to step tell.
    """
    known = ratio[~np.isnan(ratio).all(axis=1)]
    num = len(known)
    if num < 2:  # noqa: PLR2004
        return 0.0
    # Each against the others, whose mean would vary by 1 / (n - 1) of what a link does.
    residual = (known / median_of_peers(known) - 1.0) * np.sqrt((num - 1) / num)
    if np.isnan(residual).all():
        return 0.0  # each step has one link alone
    # Less than half of the links may be slow otherwise than the others.
    deviation = float(np.nanmedian(np.abs(residual))) / NORMAL_MEDIAN
    return MEDIAN_STANDARD_ERROR * deviation / float(np.sqrt(num))
