"""Intervals of many ranks on one line, so that one sorted search serves all ranks.

A rank's times are shifted by a constant larger than the whole trace, which
keeps the ranks apart and their order intact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .grouping import sorted_unique
from .sorting import argsort_rows, find_positions, stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOT_FOUND = -1
_MANY = 4
"""Points an interval from which on the intervals are looked for among the points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A common line for the times of all ranks."""

    ranks: NDArray[np.int32]
    """Ascending."""

    origin_ns: int
    stride_ns: int

    @classmethod
    def over(
        cls, rank: NDArray[np.int32], start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
    ) -> Line:
        """Make a line that holds all these intervals."""
        if not len(rank):
            return cls(ranks=sorted_unique(rank), origin_ns=0, stride_ns=1)
        origin = int(start_ns.min())
        stride = int(end_ns.max()) - origin + 2
        return cls(ranks=sorted_unique(rank), origin_ns=origin, stride_ns=stride)

    def place(self, rank: NDArray[np.int32], time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where a rank's time lies on the line."""
        shift = np.arange(len(self.ranks)) * self.stride_ns - self.origin_ns
        place: NDArray[np.int64] = shift[find_positions(rank, self.ranks)]
        place += time_ns
        return place

    def time_at(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the time, in ns, that lies at a place of the line."""
        time: NDArray[np.int64] = place % self.stride_ns + self.origin_ns
        return time


def find_covering(
    start: NDArray[np.int64], end: NDArray[np.int64], point: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the index of the interval ``[start, end)`` that holds each point, or `NOT_FOUND`.

    The intervals are sorted and do not overlap.
    """
    if not len(start):
        return np.full(len(point), NOT_FOUND, dtype=np.int64)
    index = _last_begun(start, point)
    inside = (index >= 0) & (point < end[np.maximum(index, 0)])
    found: NDArray[np.int64] = np.where(inside, index, NOT_FOUND)
    return found


def _last_begun(start: NDArray[np.int64], point: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the last interval begun at each point; `NOT_FOUND` if none has."""
    if len(start) * _MANY > len(point) or (point[1:] < point[:-1]).any():
        return np.searchsorted(start, point, side="right") - 1
    # Few intervals are looked for among the points, instead of the points among the intervals.
    first = np.searchsorted(point, start, side="left")
    return np.repeat(np.arange(-1, len(start)), np.diff(first, prepend=0, append=len(point)))


def keep_outermost(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the intervals that no earlier or longer one overlaps, sorted.

    An interval that only reaches into another's end is dropped too.
    """
    order = argsort_rows(start, -end)
    if not len(order):
        return order
    reach = np.maximum.accumulate(end[order])
    alone = np.append(True, start[order][1:] >= reach[:-1])
    kept: NDArray[np.int64] = order[alone]
    return kept


def merge_intervals(
    start: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge intervals that touch or overlap; empty ones vanish."""
    real = end > start
    order = stable_argsort(start[real])
    start, end = start[real][order], end[real][order]
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    begins = np.append(True, start[1:] > reach[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:] - 1, len(start) - 1)
    return start[first], reach[last]
