"""Student's t test for phases: are these steps slower than the others of their series?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .noise import required_t
from .thresholds import THRESHOLDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .phases import Phase


def is_significant(series: NDArray[np.float64], phase: Phase, *, num_series: int) -> bool:
    """Return whether a phase is slower than the other steps of its series, beyond chance.

    Two-sample t test with pooled variance. The critical value is raised for having tested every
    step of every series (Bonferroni), because some consecutive steps of a noisy series are always
    above its faster ones. Outliers widen the pooled deviation, so they only make the test stricter.

    Args:
        series: Shape (steps,): the value of one rank or link in each step; NaN if unknown.
        phase: The steps under test.
        num_series: Number of series that were searched for phases.

    Returns:
        False if fewer than `min_several` steps remain to compare with.

    Source:
        Student (1908); Bonferroni correction over ``num_series`` x steps tests.
    """
    steps = np.arange(len(series))
    in_phase = (steps >= phase.first) & (steps <= phase.last) & ~np.isnan(series)
    tested, baseline = series[in_phase], series[~in_phase & ~np.isnan(series)]
    if len(baseline) < THRESHOLDS.min_several:
        return False
    residuals = np.concatenate((tested - tested.mean(), baseline - baseline.mean()))
    standard_error = np.sqrt(1 / len(tested) + 1 / len(baseline))
    critical_t = required_t(num_series * len(series), degrees_of_freedom=len(residuals) - 2)
    threshold = critical_t * residuals.std(ddof=2)
    return bool(tested.mean() - baseline.mean() >= threshold * standard_error)
