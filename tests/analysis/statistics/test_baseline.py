from __future__ import annotations

import numpy as np

from rankscope.analysis.statistics.baseline import common_step_ratio, faster_steps_baseline


def baseline(*steps: float) -> float:
    return float(faster_steps_baseline(np.array([steps]))[0, 0])


def test_the_baseline_is_the_median_of_the_faster_steps_however_few() -> None:
    # WHEN 2, half, and all but 2 of 8 steps are slow.
    assert baseline(10, 10, 10, 10, 10, 10, 15, 15) == 10
    assert baseline(10, 10, 10, 10, 15, 15, 15, 15) == 10
    assert baseline(10, 10, 15, 15, 15, 15, 15, 15) == 10


def test_a_single_fast_step_is_no_baseline() -> None:
    # Split after (10, 13): their upper median is 13, like the others.
    assert baseline(10, 13, 13, 13, 13, 13) == 13


def test_a_slow_first_step_does_not_hide_a_slow_phase() -> None:
    # k = 3: 3 x 6 x (13 - 10)^2 = 162; k = 7 leaves (13, 30), lower median 13, so 0.
    assert baseline(30, 10, 10, 10, 13, 13, 13, 13, 13) == 10


def test_without_two_levels_the_baseline_is_about_the_faster_half() -> None:
    # k = 2: 2 x 4 x (13 - 11)^2 = 32; k = 3: 3 x 3 x (14 - 11)^2 = 81; k = 4: 4 x 2 x (14 - 12)^2.
    assert baseline(10, 11, 12, 13, 14, 15) == 11


def test_a_row_with_few_steps_has_their_median_and_an_unknown_one_none() -> None:
    assert baseline(10, 12, 20) == 12
    assert np.isnan(baseline(np.nan, np.nan))
    assert baseline(np.nan, 10, 10, 15, 15, np.nan) == 10


def test_a_step_is_long_as_a_whole_if_nearly_all_of_it_is() -> None:
    ratio = np.array([3.0, 3.2, 2.9, 0.9, 1.1, 1.3])
    step = np.array([0, 0, 0, 1, 1, 1], dtype=np.int32)

    # THEN the first step takes 3 times its usual time, and the second one is as usual
    assert common_step_ratio(ratio, step).tolist() == [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]
