from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.arrays.group_stats import row_medians
from rankscope.analysis.statistics.phases import (
    find_period,
    find_phases,
    max_subarrays,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

NONE = np.zeros(6, dtype=np.bool_)
"""None of six rows has few peers."""


def test_a_phase_includes_a_fast_step_inside_and_no_far_slow_one() -> None:
    values = np.array([[-1.0, 2.0, -1.0, -1.0, -1.0, 1.0, 1.0, -0.5, 1.0, 1.0, -1.0]])

    first, last = max_subarrays(values)

    assert (first.tolist(), last.tolist()) == ([5], [9])


@given(st.lists(st.lists(st.integers(-20, 20), min_size=8, max_size=8), min_size=1, max_size=5))
def test_no_other_consecutive_steps_have_a_larger_sum(rows: list[list[int]]) -> None:
    first, last = max_subarrays(np.array(rows, dtype=np.float64))

    for values, begin, end in zip(rows, first.tolist(), last.tolist(), strict=True):
        best = max(sum(values[i : j + 1]) for i in range(8) for j in range(i, 8))
        assert sum(values[begin : end + 1]) == best


def test_a_median_ignores_unknown_values() -> None:
    values = np.array([[3.0, np.nan, 1.0], [np.nan, np.nan, np.nan], [1.0, 2.0, 9.0]])

    assert np.array_equal(row_medians(values), [2.0, np.nan, 2.0], equal_nan=True)


@pytest.mark.parametrize("excess", [np.empty((0, 8)), np.full((3, 8), np.nan)])
def test_nothing_is_found_in_unknown_values(excess: NDArray[np.float64]) -> None:
    few = np.zeros(len(excess), dtype=np.bool_)

    assert find_phases(excess, deviation=0.01) == ()
    assert find_phases(excess, has_few_peers=few, may_recur=True) == ()


def test_a_phase_begins_at_the_first_slow_step() -> None:
    excess = np.zeros((6, 12))
    excess[2, 3:] = 0.2

    (phase,) = find_phases(excess)

    assert (phase.row, phase.first, phase.last, phase.excess_ratio) == (2, 3, 11, 0.2)


@pytest.mark.parametrize("num_slow", [1, 2, 3])
def test_just_under_half_of_the_rows_may_be_equally_slow(num_slow: int) -> None:
    # GIVEN eight rows that differ by 1.3 % (standard deviation), some of which are 10 % slower
    levels = np.array([0.002, -0.006, 0.006, 0.011, -0.011, 0.021, -0.021, -0.002])
    levels[:num_slow] = 0.10
    excess = np.broadcast_to(levels[:, None], (8, 10))

    assert [phase.row for phase in find_phases(excess)] == list(range(num_slow))


def test_rows_that_differ_by_all_degrees_are_not_slow_together() -> None:
    # GIVEN eight rows at equal distances: the three highest are no group of their own
    excess = np.broadcast_to(np.linspace(-0.07, 0.07, 8)[:, None], (8, 10))

    assert find_phases(excess) == ()


def test_a_single_step_is_found_unless_longer_phases_are_asked_for() -> None:
    excess = np.zeros((6, 12))
    excess[2, 3] = 0.2

    assert [phase.row for phase in find_phases(excess)] == [2]
    assert find_phases(excess, min_steps=3) == ()


def test_two_rows_that_both_reach_the_same_height_once_are_noise() -> None:
    excess = np.zeros((6, 12))
    excess[2, 3] = excess[4, 7] = 0.2

    assert find_phases(excess) == ()


@pytest.mark.parametrize("num_slow", [2, 7, 8])
def test_rows_that_are_slow_in_the_same_step_are_no_noise_to_each_other(num_slow: int) -> None:
    excess = np.random.default_rng(5).normal(0.0, 0.01, (16, 10))
    excess[:num_slow, 4] += 0.12

    phases = find_phases(excess)

    assert [(each.row, each.first, each.last) for each in phases] == [
        (row, 4, 4) for row in range(num_slow)
    ]


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_a_step_that_is_longer_for_all_rows_hides_none_that_has_few_peers(num_rows: int) -> None:
    excess = np.random.default_rng(0).normal(0.0, 0.02, (num_rows, 10))
    excess[:, 6] += 3.0
    excess[1] += 2.0

    lasting = [one for one in find_phases(excess, has_few_peers=True) if one.num_steps > 1]

    assert [(phase.row, phase.first, phase.last) for phase in lasting] == [(1, 0, 9)]


def test_recurring_slow_steps_are_one_phase_from_the_first_to_the_last() -> None:
    # GIVEN 30 %, 20 % and 40 % in every seventh step, and 4 % in one within the noise
    excess = np.zeros((6, 20))
    excess[2, [2, 9, 16]] = 0.3, 0.2, 0.4
    excess[2, 18] = 0.04

    (phase,) = find_phases(excess, has_few_peers=NONE, may_recur=True)

    assert (phase.row, phase.first, phase.last) == (2, 2, 16)
    assert (phase.columns, phase.excess_ratio) == ((2, 9, 16), 0.3)
    # AND they are joined neither by find_phases nor if all steps between are slow too
    (alone,) = find_phases(excess)
    assert (alone.first, alone.last, alone.columns) == (16, 16, None)
    excess[2, 2:17] = 0.3
    (lasting,) = find_phases(excess, has_few_peers=NONE, may_recur=True)
    assert (lasting.first, lasting.last, lasting.columns) == (2, 16, None)


def test_two_consecutive_slow_steps_are_a_whole_phase() -> None:
    excess = np.zeros((6, 16))
    excess[2, 5:7] = 0.1, 0.4

    (phase,) = find_phases(excess, has_few_peers=NONE, may_recur=True)

    assert (phase.first, phase.last, phase.columns) == (5, 6, None)


def test_partners_are_no_noise_to_each_other() -> None:
    # GIVEN rows 2 and 3, partners, that both reach 20 % in the same step
    excess = np.zeros((6, 12))
    excess[2:4, 5] = 0.2
    partners = np.array([0, 0, 1, 1, 2, 2])

    found = find_phases(excess, has_few_peers=NONE, partners=partners, may_recur=True)

    assert [(phase.row, phase.first, phase.last) for phase in found] == [(2, 5, 5), (3, 5, 5)]
    # AND without partners they may be noise, and so if all six rows are partners
    assert find_phases(excess, has_few_peers=NONE, may_recur=True) == ()
    assert (
        find_phases(
            excess, has_few_peers=NONE, partners=np.zeros(6, dtype=np.int64), may_recur=True
        )
        == ()
    )
    # AND so may partners be if another row was nearly as high once
    excess[0, 8] = 0.15
    assert find_phases(excess, has_few_peers=NONE, partners=partners, may_recur=True) == ()


def recurring(excess: NDArray[np.float64]) -> list[tuple[int, tuple[int, ...] | None]]:
    """Return the row and the columns of each recurring phase."""
    phases = find_phases(excess, has_few_peers=True, may_recur=True)
    return [(phase.row, phase.columns) for phase in phases if phase.recurs]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
@pytest.mark.parametrize("period", [2, 4, 8])
def test_a_row_that_is_slow_in_every_pth_step_is_found(num_rows: int, period: int) -> None:
    rng = np.random.default_rng(0)
    excess = rng.normal(0.0, 0.01, (num_rows, 48))
    excess[-1, 3::period] += 1.5

    assert recurring(excess) == [(num_rows - 1, tuple(range(3, 48, period)))]


def test_slow_steps_at_random_are_of_a_row_if_it_has_too_many_for_chance() -> None:
    # GIVEN four rows, one of which is slow in 5 steps: chance gives one of them all 5 in 0.4 %
    excess = np.zeros((4, 80))
    excess[2, [7, 9, 18, 30, 35]] = 0.5
    # AND of two rows chance gives one all 5 in 6 %
    assert recurring(excess) == [(2, (7, 9, 18, 30, 35))]
    assert recurring(excess[1:3]) == []


def test_slow_steps_of_two_rows_at_random_are_those_of_the_one_that_loses_much() -> None:
    excess = np.zeros((2, 40))
    excess[1, [7, 9, 18, 30, 35]] = 1.0

    # 5 of 40 steps at 100 % are 12.5 % of all compute, over the 9 % of a finding
    assert recurring(excess) == [(1, (7, 9, 18, 30, 35))]


def test_rows_that_are_slow_at_random_are_none_of_them_at_fault() -> None:
    excess = np.zeros((3, 40))
    for row, columns in enumerate(([1, 5, 13, 20], [3, 8, 11, 30], [4, 7, 22, 33])):
        excess[row, columns] = 0.5

    assert recurring(excess) == []


def test_the_slower_steps_of_a_row_that_varies_as_others_do_are_noise() -> None:
    """Transfers of the eight groups of a simulated job without a fault, over their median, in %."""
    percent = [
        [-5.4, 2.0, -9.2, -23.1, 1.5, 2.1, -9.3, 16.3, 1.2, 9.6, 12.4, 9.5, 13.9, -10.7],
        [-14.0, 0.7, -3.0, 17.2, -14.6, -14.5, -0.4, 3.9, -3.8, -4.1, -17.6, 2.9, 3.7, 5.9],
        [19.8, 25.7, 4.1, 20.6, 14.0, -2.0, -10.6, -9.2, 13.0, 7.3, 25.1, 8.5, 6.4, 8.7],
        [2.1, -4.8, -5.6, 27.3, -1.0, 2.3, -10.2, 2.6, -7.3, -0.5, -19.4, 5.8, -4.6, -19.5],
        [9.7, 9.3, -0.5, 6.0, 4.8, -13.7, 5.3, -2.1, 4.0, 5.6, -7.9, -17.8, 11.4, -0.8],
        [-1.3, -0.5, 3.0, -9.5, -3.5, 6.1, 11.7, 1.8, -16.0, -9.1, 11.2, -9.3, 3.9, 8.9],
        [-1.1, -2.0, 0.9, -5.3, 0.3, -5.5, 4.5, 30.5, 2.8, 18.0, -12.8, -22.7, 0.0, 0.8],
        [-18.3, -7.6, 6.4, -9.3, 18.8, 8.0, 3.5, -17.9, 20.2, -6.1, 3.4, -4.6, -6.6, -4.0],
    ]

    assert recurring(np.array(percent) / 100) == []


def test_a_row_that_is_slow_in_all_steps_and_slower_in_some_has_a_lasting_phase() -> None:
    # GIVEN a row that is far above the others in each step, and above that in five of them
    excess = np.random.default_rng(0).normal(0.0, 0.01, (4, 60))
    excess[2] += 3.0
    excess[2, [1, 12, 26, 38, 42]] += 2.0

    (phase,) = find_phases(excess, has_few_peers=True, may_recur=True)

    assert (phase.row, phase.first, phase.last, phase.columns) == (2, 0, 59, None)
    assert phase.excess_ratio == pytest.approx(3.0, abs=0.02)


def test_a_row_of_two_noisy_levels_that_are_both_slow_has_a_lasting_phase() -> None:
    """Compute of four ranks under Ray on a busy host, over that of the peers; rank 1 sleeps."""
    slow = [1.3, 7.35, 1.96, 1.63, 4.59, 2.53, 5.51, 4.27, 2.95, 0.29, 0.47, 2.12, 1.64, 1.93]
    excess = np.random.default_rng(0).normal(0.0, 0.2, (4, 18))
    excess[1] = [*slow, 1.3, 0.6, 1.52, 4.19]

    (phase,) = find_phases(excess, may_recur=True)

    assert (phase.row, phase.first, phase.last, phase.columns) == (1, 0, 17, None)


def test_the_slow_steps_of_one_row_are_no_noise_to_another() -> None:
    excess = np.zeros((4, 40))
    excess[1, ::4] = 1.5
    excess[3, 20:] = 0.2

    phases = find_phases(excess, may_recur=True)

    assert [(phase.row, phase.first, phase.recurs) for phase in phases] == [
        (1, 0, True),
        (3, 20, False),
    ]


@pytest.mark.parametrize(
    ("numbers", "period"),
    [
        ((4, 8, 12, 16), 4),
        ((4, 8, 16, 20, 24), 4),
        ((3, 5, 7, 9, 11), 2),
        ((4, 8, 12), 0),
        ((4, 5, 6, 7), 0),
        ((4, 8, 13, 16), 0),
    ],
)
def test_a_period_needs_three_equal_distances(numbers: tuple[int, ...], period: int) -> None:
    assert find_period(np.array(numbers)) == period


def test_the_steps_of_a_recurring_phase_are_described_by_their_period() -> None:
    excess = np.zeros((4, 40))
    excess[1, 2::3] = 1.5

    (phase,) = find_phases(excess, may_recur=True)

    assert phase.when(np.arange(100, 140, dtype=np.int32)) == "in every 3rd step (steps 102 to 138)"
