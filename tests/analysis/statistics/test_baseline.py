from __future__ import annotations

import numpy as np

from rankscope.analysis.statistics.baseline import faster_steps_baseline


def usual(*steps: float) -> float:
    return float(faster_steps_baseline(np.array([steps]))[0, 0])


def test_the_usual_is_that_of_the_faster_steps_however_few_they_are() -> None:
    # WHEN 2, half, and all but 2 of 8 steps are slow.
    assert usual(10, 10, 10, 10, 10, 10, 15, 15) == 10
    assert usual(10, 10, 10, 10, 15, 15, 15, 15) == 10
    assert usual(10, 10, 15, 15, 15, 15, 15, 15) == 10


def test_one_fast_step_alone_is_not_the_usual_one() -> None:
    # Cut after (10, 13): their upper median is 13, as all others are.
    assert usual(10, 13, 13, 13, 13, 13) == 13


def test_one_long_first_step_hides_no_slow_phase() -> None:
    # k = 3: 3 x 6 x (13 - 10)^2 = 162; k = 7, (13, 30) left: their lower median is 13, so 0.
    assert usual(30, 10, 10, 10, 13, 13, 13, 13, 13) == 10


def test_of_steps_without_two_levels_about_the_faster_half_is_left() -> None:
    # k = 2: 2 x 4 x (13 - 11)^2 = 32; k = 3: 3 x 3 x (14 - 11)^2 = 81; k = 4: 4 x 2 x (14 - 12)^2.
    assert usual(10, 11, 12, 13, 14, 15) == 11


def test_rows_with_few_steps_or_none_have_their_median_or_nothing() -> None:
    assert usual(10, 12, 20) == 12
    assert np.isnan(usual(np.nan, np.nan))
    assert usual(np.nan, 10, 10, 15, 15, np.nan) == 10
