from __future__ import annotations

import numpy as np

from rankscope.analysis.arrays.intervals import (
    NOT_FOUND,
    Line,
    find_covering,
    keep_outermost,
    merge_intervals,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_ranks_do_not_overlap_on_the_line() -> None:
    line = Line.over(np.array([3, 7], np.int32), ints(100, 150), ints(200, 190))

    positions = line.place(np.array([3, 3, 7], np.int32), ints(100, 200, 100))

    assert positions.tolist() == [0, 100, 102]


def test_an_interval_holds_its_start_and_not_its_end() -> None:
    found = find_covering(ints(10, 30), ints(20, 40), ints(9, 10, 19, 20, 35, 40))

    assert found.tolist() == [NOT_FOUND, 0, 0, NOT_FOUND, 1, NOT_FOUND]


def test_search_of_intervals_among_points_equals_that_of_points_among_intervals() -> None:
    start, end = ints(3, 10, 10, 20), ints(5, 10, 14, 21)
    every = np.arange(25)

    together = find_covering(start, end, every)

    one_by_one = [int(find_covering(start, end, every[k : k + 1])[0]) for k in every.tolist()]
    assert together.tolist() == one_by_one
    assert find_covering(start, end, every[::-1]).tolist() == one_by_one[::-1]


def test_only_the_outermost_of_nested_intervals_is_kept() -> None:
    # [0, 50) holds [10, 20); [60, 70) overlaps none.
    assert keep_outermost(ints(10, 0, 60), ints(20, 50, 70)).tolist() == [1, 2]


def test_an_interval_that_begins_a_little_early_follows_and_is_not_inside() -> None:
    # The second begins 2 before the first ends; the third is short and ends 1 after the second.
    start, end = ints(0, 48, 96), ints(50, 100, 101)

    assert keep_outermost(start, end).tolist() == [0]
    assert keep_outermost(start, end, slack=2).tolist() == [0, 1]


def test_touching_and_overlapping_intervals_merge_and_empty_ones_are_dropped() -> None:
    start, end = merge_intervals(ints(5, 0, 20, 7), ints(10, 5, 30, 7))

    assert (start.tolist(), end.tolist()) == ([0, 20], [10, 30])
