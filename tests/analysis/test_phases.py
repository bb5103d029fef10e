from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analysis.phases import best_segments, row_medians, standing_out


def test_a_slow_phase_keeps_its_dip_and_leaves_the_far_spike_out() -> None:
    values = np.array([[-1.0, 2.0, -1.0, -1.0, -1.0, 1.0, 1.0, -0.5, 1.0, 1.0, -1.0]])

    first, last = best_segments(values)

    assert (first.tolist(), last.tolist()) == ([5], [9])


@given(st.lists(st.lists(st.integers(-20, 20), min_size=8, max_size=8), min_size=1, max_size=5))
def test_no_other_run_of_steps_has_a_larger_sum(rows: list[list[int]]) -> None:
    first, last = best_segments(np.array(rows, dtype=np.float64))

    for values, begin, end in zip(rows, first.tolist(), last.tolist(), strict=True):
        best = max(sum(values[i : j + 1]) for i in range(8) for j in range(i, 8))
        assert sum(values[begin : end + 1]) == best


def test_a_median_passes_over_the_unknown() -> None:
    values = np.array([[3.0, np.nan, 1.0], [np.nan, np.nan, np.nan], [1.0, 2.0, 9.0]])

    assert np.array_equal(row_medians(values), [2.0, np.nan, 2.0], equal_nan=True)


def test_a_row_that_stands_out_from_its_fourth_step_is_told_from_there() -> None:
    excess = np.zeros((6, 12))
    excess[2, 3:] = 0.2

    (phase,) = standing_out(excess)

    assert (phase.row, phase.first, phase.last, phase.excess_ratio) == (2, 3, 11, 0.2)


def test_one_step_is_told_unless_longer_phases_are_asked_for() -> None:
    excess = np.zeros((6, 12))
    excess[2, 3] = 0.2

    assert [phase.row for phase in standing_out(excess)] == [2]
    assert standing_out(excess, shortest=3) == ()


def test_two_rows_that_both_reach_the_same_height_once_are_noise() -> None:
    excess = np.zeros((6, 12))
    excess[2, 3] = excess[4, 7] = 0.2

    assert standing_out(excess) == ()
