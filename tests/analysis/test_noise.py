from __future__ import annotations

import numpy as np

from analysis.noise import robust_deviation


def test_one_far_outlier_does_not_widen_the_noise() -> None:
    # Deviations from the median 3: 2 1 0 1 97; their median is 1.
    assert robust_deviation(np.array([1.0, 2.0, 3.0, 4.0, 100.0])) == 1.4826


def test_unknown_values_are_passed_over() -> None:
    assert robust_deviation(np.array([2.0, np.nan, 2.0])) == 0.0
    assert np.isnan(robust_deviation(np.array([np.nan])))
