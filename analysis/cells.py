"""Sums and medians of long tables by (row, step): the matrices that suspects are looked for in."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from analysis.phases import row_medians

if TYPE_CHECKING:
    from numpy.typing import NDArray

MATES_ENOUGH = 4
"""Rows of one kind whose common median one odd row does not carry away: 3 peers and itself.
Source: design.md section 5, least evidence."""


def summed(
    shape: tuple[int, int],
    row: NDArray[np.integer],
    column: NDArray[np.integer],
    value: NDArray[np.float64] | NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the sum of ``value`` in each cell, 0 where there is none. Shape ``shape``."""
    cell = row * shape[1] + column
    flat: NDArray[np.float64] = np.bincount(
        cell, weights=value.astype(np.float64), minlength=shape[0] * shape[1]
    ).astype(np.float64)
    return flat.reshape(shape)


def median_by_kind(
    values: NDArray[np.float64], kind: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return, for each cell, the median of its column over the rows of its kind.

    Args:
        values: Shape (rows, columns); NaN where unknown.
        kind: Shape (rows,): rows of equal kind are held against each other.

    Returns:
        Medians, shape (rows, columns), and which rows have `MATES_ENOUGH`, shape (rows,).
    """
    medians = np.full_like(values, np.nan)
    enough = np.zeros(len(values), dtype=np.bool_)
    order = np.argsort(kind, kind="stable")
    changes = np.flatnonzero(np.diff(kind[order])) + 1
    for first, last in pairwise([0, *changes.tolist(), len(order)]):
        rows = order[first:last]
        medians[rows] = row_medians(values[rows].T)
        enough[rows] = len(rows) >= MATES_ENOUGH
    return medians, enough
