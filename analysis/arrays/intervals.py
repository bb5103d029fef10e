"""Intervals of many ranks on one number line, so that one sorted search serves all ranks.

Each rank's times are shifted by a multiple of a stride that is longer than the whole trace. Ranks
do not overlap then, and the order within each is kept.
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
_MANY_POINTS = 4
"""With more points per interval than this, the intervals are searched among the points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Number line that holds the times of all ranks."""

    ranks: NDArray[np.int32]
    """Ascending."""

    origin_ns: int
    stride_ns: int

    @classmethod
    def over(
        cls, rank: NDArray[np.int32], start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
    ) -> Line:
        """Return a line that holds all these intervals."""
        if not len(rank):
            return cls(ranks=sorted_unique(rank), origin_ns=0, stride_ns=1)
        origin = int(start_ns.min())
        stride = int(end_ns.max()) - origin + 2
        return cls(ranks=sorted_unique(rank), origin_ns=origin, stride_ns=stride)

    def place(self, rank: NDArray[np.int32], time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the ranks' times on the line."""
        shift = np.arange(len(self.ranks)) * self.stride_ns - self.origin_ns
        position: NDArray[np.int64] = shift[find_positions(rank, self.ranks)]
        position += time_ns
        return position

    def time_at(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the time, in ns, at a position of the line."""
        time: NDArray[np.int64] = position % self.stride_ns + self.origin_ns
        return time


def find_covering(
    start: NDArray[np.int64], end: NDArray[np.int64], point: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the index of the interval ``[start, end)`` that holds each point, or `NOT_FOUND`.

    The intervals are sorted and do not overlap.
    """
    if not len(start):
        return np.full(len(point), NOT_FOUND, dtype=np.int64)
    index = _find_last_begun(start, point)
    inside = (index >= 0) & (point < end[np.maximum(index, 0)])
    found: NDArray[np.int64] = np.where(inside, index, NOT_FOUND)
    return found


def _find_last_begun(start: NDArray[np.int64], point: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the last interval begun at each point; `NOT_FOUND` if none has."""
    if len(start) * _MANY_POINTS > len(point) or (point[1:] < point[:-1]).any():
        return np.searchsorted(start, point, side="right") - 1
    first = np.searchsorted(point, start, side="left")
    return np.repeat(np.arange(-1, len(start)), np.diff(first, prepend=0, append=len(point)))


def keep_outermost(
    start: NDArray[np.int64], end: NDArray[np.int64], *, slack: int = 0
) -> NDArray[np.int64]:
    """Return the indices of the intervals that no earlier or longer one overlaps, sorted.

    An interval that begins inside another one is dropped even if it ends later, but not if the
    overlap is at most ``slack`` and half of it.
    """
    order = argsort_rows(start, -end)
    if not len(order):
        return order
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    overlap = reach[:-1] - start[1:]
    follows = (overlap <= slack) & (2 * overlap <= end[1:] - start[1:]) & (end[1:] > reach[:-1])
    kept: NDArray[np.int64] = order[np.append(True, (overlap <= 0) | follows)]
    return kept


def merge_intervals(
    start: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge intervals that touch or overlap, and drop empty ones."""
    is_real = end > start
    order = stable_argsort(start[is_real])
    start, end = start[is_real][order], end[is_real][order]
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    begins = np.append(True, start[1:] > reach[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:] - 1, len(start) - 1)
    return start[first], reach[last]
