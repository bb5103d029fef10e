from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.statistics.noise import (
    deviation_without_jumps,
    required_t,
    robust_deviation,
)


def test_one_far_outlier_does_not_widen_the_noise() -> None:
    # Deviations from the median 3: 2 1 0 1 97; their median is 1.
    assert robust_deviation(np.array([1.0, 2.0, 3.0, 4.0, 100.0])) == 1.4826


def test_unknown_values_are_passed_over() -> None:
    assert robust_deviation(np.array([2.0, np.nan, 2.0])) == 0.0
    assert np.isnan(robust_deviation(np.array([np.nan])))


def test_of_an_estimated_deviation_as_many_more_stand_clear_as_students_t_asks() -> None:
    # GIVEN the density of Student's t with 8 degrees of freedom, (1 + t^2 / 8)^-4.5 x 0.3867
    t = np.linspace(required_t(20, 8), 400, 4_000_001)

    beyond = float(np.trapezoid(0.3867 * (1 + t**2 / 8) ** -4.5, t))

    # THEN one of 20 samples lies beyond it in 3 of 10,000 cases
    assert beyond * 20 == pytest.approx(0.0003, rel=0.1)


def test_an_estimate_from_very_many_is_as_good_as_a_known_deviation() -> None:
    # The normal distribution has 0.0003 beyond 3.432 deviations.
    assert required_t(1, 100_000) == pytest.approx(3.432, abs=0.001)


def test_a_level_that_all_rows_take_up_at_once_is_no_noise() -> None:
    # GIVEN two rows that jump by 30 in the same step, with changes of 1, 1, 2, 2, 1, 2 besides
    row = [0.0, 1.0, 0.0, 30.0, 32.0, 30.0, 31.0, 33.0]

    deviation = deviation_without_jumps(np.array([row, row]))

    # THEN half of what is left is 1.5, and nine tenths 2. Of 7 normal changes but the largest the
    # lower half lies below 0.4286 of all, 0.5659 deviations, and nine tenths below 0.7714: 1.2041
    assert deviation == pytest.approx(max(1.5 / 0.5659, 2 / 1.2041) / 2**0.5, rel=1e-3)


def test_a_row_that_becomes_slow_and_well_again_has_two_changes_that_are_no_noise() -> None:
    # GIVEN changes of 1, 1, 30, 2, 2, 1 and 30: without the two largest 1, 1, 1, 2, 2
    row = [0.0, 1.0, 0.0, 30.0, 32.0, 30.0, 31.0, 1.0]

    deviation = deviation_without_jumps(np.array([row]), num_levels=2)

    # THEN half of them is 1, and nine tenths 2. Of 7 normal changes but the two largest the lower
    # half lies below 0.3571 of all, 0.4637 deviations, and nine tenths below 0.6429: 0.9208
    assert deviation == pytest.approx(max(1 / 0.4637, 2 / 0.9208) / 2**0.5, rel=1e-3)
