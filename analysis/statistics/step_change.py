"""Change of the step time between two runs, and whether it is more than noise."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from .noise import required_t

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MIN_STEPS = 5
"""Steps of each run, below which their noise is not known."""

FALSE_ALARM_RATE = 0.01
"""Share of comparisons of two equal runs that are significant in one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChange:
    """Mean step time of a run against that of another one."""

    ratio: float | None
    """New over old; None if one of them has no steps."""

    is_significant: bool | None
    """Whether the difference is more than the noise within the runs; None if that is unknown."""

    margin_s: float | None = None
    """Largest difference of the means that is not significant, s, which is half of the width of the
    interval around the measured one; None if it is unknown."""


def compare_step_times(before_s: Sequence[float], after_s: Sequence[float]) -> StepChange:
    """Compare the times of the steps of two runs.

    The difference of the means is significant if it exceeds ``t`` standard errors (Welch's test,
    one-sided). The steps of a run are not independent of each other, so its standard error is the
    larger one of that of the steps and, of 25 steps and more, that of the means of batches of them.

    Args:
        before_s: Shape (steps,), s.
        after_s: Likewise of the other run.

    Source:
        Welch, "The generalization of 'Student's' problem" (1947); batch means: Law, "Simulation
        Modeling and Analysis".
    """
    before, after = np.array(before_s), np.array(after_s)
    if not len(before) or not len(after):
        return StepChange(ratio=None, is_significant=None)
    ratio = float(after.mean() / before.mean())
    if min(len(before), len(after)) < MIN_STEPS:
        return StepChange(ratio=ratio, is_significant=None)
    (error_1, freedom_1), (error_2, freedom_2) = map(_squared_error, (before, after))
    error = error_1 + error_2
    if error == 0:
        return StepChange(ratio=ratio, is_significant=ratio != 1, margin_s=0.0)
    freedom = error**2 / (error_1**2 / freedom_1 + error_2**2 / freedom_2)
    required = required_t(1, max(1, int(freedom)), false_alarm_rate=FALSE_ALARM_RATE)
    margin_s = float(required * np.sqrt(error))
    is_significant = abs(float(after.mean() - before.mean())) > margin_s
    return StepChange(ratio=ratio, is_significant=is_significant, margin_s=margin_s)


def _squared_error(values: NDArray[np.float64]) -> tuple[float, int]:
    """Return the squared standard error of a mean, and its degrees of freedom."""
    samples = [values]
    if isqrt(len(values)) >= MIN_STEPS:
        parts = np.array_split(values, isqrt(len(values)))
        samples.append(np.array([part.mean() for part in parts]))
    return max((float(each.var(ddof=1)) / len(each), len(each) - 1) for each in samples)
