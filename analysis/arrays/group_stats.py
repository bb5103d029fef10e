"""Sums and medians of long tables by (row, step): the matrices that suspects are looked for in."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .sorting import KEY_BITS, KeyColumn, argsort_rows, pack_keys, stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_ROWS_OF_KIND = 4
"""Rows of one kind whose common median one odd row does not carry away: 3 peers and itself.
Source: design.md section 5, least evidence."""

MAX_EXACT_INT = 1 << 53
"""Whole numbers up to here are exact in floating point."""

BASELINE_QUANTILE = 0.25
"""What has nobody to be held against is held against the quarter of its own steps in which it was
fastest."""


def sum_cells(
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


def group_medians(
    value: NDArray[Any], group: NDArray[np.integer], num_groups: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the median of each group's values, NaN where there is none, and their number.

    Args:
        value: Shape (rows,).
        group: Shape (rows,): which of ``num_groups`` the row belongs to.
        num_groups: Groups are numbered from 0.

    Returns:
        Two arrays of shape (num_groups,); the medians in the unit of ``value``.
    """
    num = np.bincount(group, minlength=num_groups).astype(np.int64)
    ordered = np.append(_sorted_by_group(value, group), np.nan)
    first = np.cumsum(num) - num
    low = np.where(num > 0, first + (num - 1) // 2, -1)
    high = np.where(num > 0, first + num // 2, -1)
    medians: NDArray[np.float64] = (ordered[low] + ordered[high]) / 2
    return medians, num


def mean_absolute_deviations(
    value: NDArray[np.float64], group: NDArray[np.int64], num_groups: int
) -> NDArray[np.float64]:
    """Return each group's mean distance from its median, 0 where it has no value.

    Args:
        value: Shape (rows,).
        group: Shape (rows,): which of ``num_groups`` the row belongs to.
        num_groups: Groups are numbered from 0.
    """
    middle, num = group_medians(value, group, num_groups)
    far = np.bincount(group, weights=np.abs(value - middle[group]), minlength=num_groups)
    distance: NDArray[np.float64] = far / np.maximum(num, 1)
    return distance


def _sorted_by_group(value: NDArray[Any], group: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Return the values group by group, ascending within each."""
    if not len(value):
        return value.astype(np.float64)
    lowest, highest = value.min(), value.max()
    if not -MAX_EXACT_INT < lowest <= highest < MAX_EXACT_INT:  # or one is NaN
        return value[argsort_rows(group, value)].astype(np.float64)
    whole = value.astype(np.int64)
    bits = (int(highest) - int(lowest)).bit_length()
    if bits + int(group.max()).bit_length() > KEY_BITS or not (whole == value).all():
        return value[argsort_rows(group, value)].astype(np.float64)
    # Times are whole nanoseconds, whatever holds them: with the group above it each is a key,
    # and one sort of the keys themselves does, three times as fast as an order of the rows.
    keys = pack_keys((KeyColumn(group, 0, 0), KeyColumn(whole, int(lowest), 1 << bits)))
    keys.sort()
    keys &= (1 << bits) - 1
    keys += int(lowest)
    return keys.astype(np.float64)


def fast_quartile(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each row takes in the quarter of its steps in which it is fastest.

    Args:
        value: Shape (rows, steps); NaN where unknown.

    Returns:
        Same shape, equal along each row: `BASELINE_QUANTILE` of its known values.
    """
    num = (~np.isnan(value)).sum(axis=1)
    place = (np.maximum(num - 1, 0) * BASELINE_QUANTILE).astype(np.int64)
    usual = np.sort(value, axis=1)[np.arange(len(value)), place]
    return np.broadcast_to(usual[:, None], value.shape)


def medians_by_kind(
    values: NDArray[np.float64], kind: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return, for each cell, the median of its column over the rows of its kind.

    Args:
        values: Shape (rows, columns); NaN where unknown.
        kind: Shape (rows,): rows of equal kind are held against each other.

    Returns:
        Medians, shape (rows, columns), and which rows have `MIN_ROWS_OF_KIND`, shape (rows,).
    """
    medians = np.full_like(values, np.nan)
    enough = np.zeros(len(values), dtype=np.bool_)
    if not len(values):
        return medians, enough
    order = stable_argsort(kind)
    changes = np.flatnonzero(np.diff(kind[order])) + 1
    for first, last in pairwise([0, *changes.tolist(), len(order)]):
        rows = order[first:last]
        medians[rows] = row_medians(values[rows].T)
        enough[rows] = len(rows) >= MIN_ROWS_OF_KIND
    return medians, enough


def row_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row, NaNs passed over; NaN where a row has nothing else."""
    num = (~np.isnan(values)).sum(axis=1)
    ordered = np.sort(values, axis=1)
    rows = np.arange(len(values))
    last = np.maximum(num - 1, 0)
    middle: NDArray[np.float64] = (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2
    return middle
