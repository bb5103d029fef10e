from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analysis.noise import best_segment, robust_deviation


def test_one_far_outlier_does_not_widen_the_noise() -> None:
    # Deviations from the median 3: 2 1 0 1 97; their median is 1.
    assert robust_deviation(np.array([1.0, 2.0, 3.0, 4.0, 100.0])) == 1.4826


def test_unknown_values_are_passed_over() -> None:
    assert robust_deviation(np.array([2.0, np.nan, 2.0])) == 0.0
    assert np.isnan(robust_deviation(np.array([np.nan])))


def test_a_slow_phase_keeps_its_dip_and_leaves_the_far_spike_out() -> None:
    values = np.array([-1.0, 2.0, -1.0, -1.0, -1.0, 1.0, 1.0, -0.5, 1.0, 1.0, -1.0])

    assert best_segment(values) == (5, 9)


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=30))
def test_no_other_run_of_steps_has_a_larger_sum(values: list[int]) -> None:
    first, last = best_segment(np.array(values, dtype=np.float64))

    best = max(sum(values[i : j + 1]) for i in range(len(values)) for j in range(i, len(values)))
    assert sum(values[first : last + 1]) == best
