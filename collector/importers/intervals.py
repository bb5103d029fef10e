"""Intervals of time of one rank as arrays: unions, differences, and what they cover."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Times = NDArray[np.int64]


class Intervals(NamedTuple):
    """Intervals ``[begin, end)`` in ns."""

    begin: Times
    """Shape (intervals,), as has ``end``."""

    end: Times

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, ...]]) -> Intervals:
        """Return the intervals whose begins and ends are the first two of each row."""
        table = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    def to_rows(self) -> list[tuple[int, int]]:
        """Return begin and end of each interval."""
        return list(zip(self.begin.tolist(), self.end.tolist(), strict=True))

    def chosen(self, rows: NDArray[np.bool_]) -> Intervals:
        """Return some of the intervals."""
        return Intervals(self.begin[rows], self.end[rows])


def unite(*intervals: Intervals) -> Intervals:
    """Return the union of any intervals as disjoint ones, ascending."""
    begin, end = (np.concatenate(both) for both in zip(*intervals, strict=True))
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    is_first = np.ones(len(begin), dtype=np.bool_)
    is_first[1:] = begin[1:] > end[:-1]
    return Intervals(begin[is_first], end[np.append(is_first, True)[1:]])


def subtract(intervals: Intervals, others: Intervals) -> Intervals:
    """Return what of disjoint ascending intervals is in none of the others, which are so too."""
    if not len(others.begin):
        return intervals
    times = np.concatenate((*intervals, *others))
    changes = np.repeat((1, -1, 0, 0), (*map(len, intervals), *map(len, others)))
    others_changes = np.repeat((0, 0, 1, -1), (*map(len, intervals), *map(len, others)))
    order = np.argsort(times, kind="stable")
    times = times[order]
    is_in = (np.cumsum(changes[order]) > 0) & (np.cumsum(others_changes[order]) == 0)
    until = np.append(times[1:], times[-1:])
    return Intervals(times, until).chosen(is_in & (times < until))


def find_around(intervals: Intervals, at: Times) -> Times:
    """Return the index of the disjoint ascending interval around each time, else `NONE`."""
    if not len(intervals.begin):
        return np.full(len(at), NONE)
    index = np.searchsorted(intervals.begin, at, side="right") - 1
    inside = (index >= 0) & (at < intervals.end[index])
    around: Times = np.where(inside, index, NONE)
    return around


def covered_ns(intervals: Intervals, begin: Times, end: Times) -> Times:
    """Return how much of each stretch of time, from 0 on, disjoint ascending intervals cover."""
    total = np.append(0, np.cumsum(intervals.end - intervals.begin))
    last = np.append(0, intervals.end)

    def until(at: Times) -> Times:
        num = np.searchsorted(intervals.begin, at, side="right")
        covered: Times = total[num] - np.maximum(last[num] - at, 0)
        return covered

    return until(end) - until(begin)
