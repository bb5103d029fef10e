"""Student's t test for phases: are these steps slower than the others of their series?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..arrays.group_stats import row_medians
from .baseline import faster_steps_baseline
from .noise import NORMAL_MEDIAN, required_deviations, required_t, step_deviation
from .peers import median_of_peers
from .phases import MEDIAN_STANDARD_ERROR, find_phases
from .thresholds import THRESHOLDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .phases import Phase


def is_significant(
    series: NDArray[np.float64], phase: Phase, *, num_series: int, min_deviation: float = 0.0
) -> bool:
    """Return whether a phase is slower than the other steps of its series, beyond chance.

    Two-sample t test with pooled variance. The critical value is raised for having tested every
    step of every series (Bonferroni), because some consecutive steps of a noisy series are always
    above its faster ones. Outliers widen the pooled deviation, so they only make the test stricter.

    Args:
        series: Shape (steps,): the value of one rank or link in each step; NaN if unknown.
        phase: The steps under test.
        num_series: Number of series that were searched for phases.
        min_deviation: Lower bound of the standard deviation of a value, if known from elsewhere.

    Returns:
        False if fewer than `min_baseline_steps` steps remain to compare with.

    Source:
        Student (1908); Bonferroni correction over ``num_series`` x steps tests.
    """
    steps = np.arange(len(series))
    in_phase = (steps >= phase.first) & (steps <= phase.last) & ~np.isnan(series)
    tested, baseline = series[in_phase], series[~in_phase & ~np.isnan(series)]
    if len(baseline) < THRESHOLDS.min_baseline_steps:
        return False
    residuals = np.concatenate((tested - tested.mean(), baseline - baseline.mean()))
    standard_error = np.sqrt(1 / len(tested) + 1 / len(baseline))
    num_tests = num_series * len(series)
    critical_t = required_t(num_tests, degrees_of_freedom=len(residuals) - 2)
    threshold = max(
        critical_t * residuals.std(ddof=2), required_deviations(num_tests) * min_deviation
    )
    return bool(tested.mean() - baseline.mean() >= threshold * standard_error)


class TurnedSlow(NamedTuple):
    """Series that became slower together in some steps."""

    phase: Phase
    excess: NDArray[np.float64]
    """Shape (series, steps): over their own other steps, with the change of others taken out."""

    expected: NDArray[np.float64]
    """Shape (series, steps)."""


def find_turned_slow(
    mine: NDArray[np.float64],
    others: NDArray[np.float64],
    *,
    num_series: int,
) -> TurnedSlow | None:
    """Find steps in which half of some series, or more, are slower than in their other steps.

    What the others changed by in a step (a first step that warms up) is the job's change and taken
    out. If the others became faster, or all became slower, these series did not change.

    Args:
        mine: Shape (series, steps); NaN if unknown.
        others: Shape (others, steps): what shows the change of the job.
        num_series: Sets of series that are searched.
    """
    relative = others / row_medians(others)[:, None]
    # Series that drift, each by itself, change little between steps; their level is uncertain.
    own = level_standard_error(mine / row_medians(mine)[:, None])
    error = float(np.hypot(own, level_standard_error(relative)))
    common = row_medians(relative.T)
    expected = faster_steps_baseline(mine / common) * common
    excess = np.minimum(mine / expected, mine / faster_steps_baseline(mine)) - 1.0
    # The upper median: exactly half of them may be slow.
    level = np.sort(excess, axis=0)[(~np.isnan(excess)).sum(axis=0) // 2, np.arange(mine.shape[1])]
    phases = find_phases(
        level[None],
        has_few_peers=np.ones(1, dtype=np.bool_),
        min_steps=THRESHOLDS.min_lasting_steps,
        deviation=max(step_deviation(relative / common - 1.0), error),
    )
    if not phases or not is_significant(
        level, phases[0], num_series=num_series, min_deviation=error
    ):
        return None
    return TurnedSlow(phases[0], excess, expected)


def level_standard_error(ratios: NDArray[np.float64]) -> float:
    """Return the standard error of a step's median over links, from how much the links differ.

    By luck a few levels can differ less from step to step than each of them is uncertain.

    Args:
        ratios: Shape (links, steps): transfer time of each link over its usual one; NaN if unknown.

    Returns:
        0.0 if fewer than two links are known, or no step has two: the noise between steps is then
        the only evidence.
    """
    known = ratios[~np.isnan(ratios).all(axis=1)]
    num_links = len(known)
    if num_links < 2:  # noqa: PLR2004
        return 0.0
    # A residual against the others varies by n / (n - 1) of what one link does: scale it back.
    residuals = (known / median_of_peers(known) - 1.0) * np.sqrt((num_links - 1) / num_links)
    if np.isnan(residuals).all():
        return 0.0
    # Median absolute deviation: up to half of the links may be slow for another reason.
    deviation = float(np.nanmedian(np.abs(residuals))) / NORMAL_MEDIAN
    return MEDIAN_STANDARD_ERROR * deviation / float(np.sqrt(num_links))
