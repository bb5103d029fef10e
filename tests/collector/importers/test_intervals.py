"""Unions, differences and overlaps of intervals, against the moments that they hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.collector.importers.intervals import (
    Intervals,
    covered_ns,
    find_around,
    subtract,
    unite,
)
from rankscope.tracer.span import NONE

LAST = 30
ROWS = st.lists(
    st.tuples(st.integers(0, LAST), st.integers(0, LAST)).map(lambda ends: tuple(sorted(ends))),
    max_size=8,
)


def moments(intervals: Intervals) -> set[int]:
    """Return the moments in any of the intervals."""
    rows = zip(*(column.tolist() for column in intervals), strict=True)
    return {moment for begin, end in rows for moment in range(begin, end)}


@given(ROWS, ROWS)
def test_a_union_and_a_difference_hold_the_moments_of_their_sets(
    rows: list[tuple[int, int]], other_rows: list[tuple[int, int]]
) -> None:
    given_moments, others = moments(Intervals.of(rows)), moments(Intervals.of(other_rows))
    united, other_united = unite(Intervals.of(rows)), unite(Intervals.of(other_rows))
    rest = subtract(united, other_united)

    assert moments(united) == given_moments
    assert moments(unite(united, Intervals.of(other_rows))) == given_moments | others
    assert moments(rest) == given_moments - others
    for result in (united, rest):
        assert (result.begin[1:] >= result.end[:-1]).all()


@given(ROWS, st.integers(0, LAST), st.integers(0, LAST))
def test_what_is_covered_and_around_follows_from_the_moments(
    rows: list[tuple[int, int]], one: int, other: int
) -> None:
    united = unite(Intervals.of(rows))
    begin, end = sorted((one, other))
    at = np.arange(LAST + 1)

    (covered,) = covered_ns(united, np.array([begin]), np.array([end])).tolist()
    around = find_around(united, at)

    assert covered == len(moments(united) & set(range(begin, end)))
    assert set(at[around != NONE].tolist()) == moments(united)
    inside = around[around != NONE]
    assert (united.begin[inside] <= at[around != NONE]).all()
