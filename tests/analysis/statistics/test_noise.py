from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.statistics.noise import (
    required_t,
    robust_deviation,
    step_deviation,
)


def test_one_far_outlier_does_not_widen_the_noise() -> None:
    # Deviations from the median 3: 2 1 0 1 97; their median is 1.
    assert robust_deviation(np.array([1.0, 2.0, 3.0, 4.0, 100.0])) == 1.4826


def test_unknown_values_are_ignored() -> None:
    assert robust_deviation(np.array([2.0, np.nan, 2.0])) == 0.0
    assert np.isnan(robust_deviation(np.array([np.nan])))


def test_the_critical_value_is_that_of_students_t() -> None:
    # GIVEN the density of Student's t with 8 degrees of freedom, (1 + t^2 / 8)^-4.5 x 0.3867
    t = np.linspace(required_t(20, 8), 400, 4_000_001)

    beyond = float(np.trapezoid(0.3867 * (1 + t**2 / 8) ** -4.5, t))

    # THEN one of 20 samples exceeds it in 3 of 10,000 cases
    assert beyond * 20 == pytest.approx(0.0003, rel=0.1)


def test_with_many_degrees_of_freedom_the_critical_value_is_normal() -> None:
    # 0.0003 of the normal distribution is beyond 3.432 deviations.
    assert required_t(1, 100_000) == pytest.approx(3.432, abs=0.001)


def test_a_jump_of_all_rows_in_one_step_is_no_noise() -> None:
    # GIVEN two rows that jump by 30 in the same step, and else change by 1, 1, 2, 2, 1, 2
    row = [0.0, 1.0, 0.0, 30.0, 32.0, 30.0, 31.0, 33.0]

    deviation = step_deviation(np.array([row, row]), num_levels=1)

    # THEN the median of the other changes is 1.5, and their 90th percentile 2. Of 7 normal changes
    # without the largest, these are the quantiles 0.4286 (0.5659 deviations) and 0.7714 (1.2041)
    assert deviation == pytest.approx(max(1.5 / 0.5659, 2 / 1.2041) / 2**0.5, rel=1e-3)


def test_the_begin_and_the_end_of_a_phase_are_no_noise() -> None:
    # GIVEN changes of 1, 1, 30, 2, 2, 1 and 30: without the two largest, 1, 1, 1, 2, 2
    row = [0.0, 1.0, 0.0, 30.0, 32.0, 30.0, 31.0, 1.0]

    deviation = step_deviation(np.array([row]), num_levels=2)

    # THEN their median is 1, and their 90th percentile 2. Of 7 normal changes without the two
    # largest, these are the quantiles 0.3571 (0.4637 deviations) and 0.6429 (0.9208)
    assert deviation == pytest.approx(max(1 / 0.4637, 2 / 0.9208) / 2**0.5, rel=1e-3)
