"""Sums and medians of long tables by group, by matrix cell and by row."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .grouping import factorize
from .sorting import KEY_BITS, KeyColumn, argsort_rows, pack_keys, stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_ROWS_OF_KIND = 4
"""Rows of one kind whose median a single outlier cannot move far: itself and 3 peers
(`min_peers`)."""

MAX_EXACT_INT = 1 << 53
"""Integers up to here are exact in float64."""

_LARGE_GROUP = 1 << 10
"""Groups of so many rows are sorted one by one: a call each costs little then."""

BASELINE_QUANTILE = 0.25
"""A row without peers is compared with the fastest quarter of its own steps."""


def sum_cells(
    shape: tuple[int, int],
    row: NDArray[np.integer],
    column: NDArray[np.integer],
    value: NDArray[np.float64] | NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the sum of ``value`` in each cell of a matrix of ``shape``, 0 in an empty cell."""
    cell = row * shape[1] + column
    flat: NDArray[np.float64] = np.bincount(
        cell, weights=value.astype(np.float64), minlength=shape[0] * shape[1]
    ).astype(np.float64)
    return flat.reshape(shape)


def group_medians(
    value: NDArray[Any], group: NDArray[np.integer], num_groups: int, *, is_lower: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the median of each group, NaN if it is empty, and its number of values.

    Args:
        value: Shape (rows,).
        group: Shape (rows,): the row's group, from 0 to ``num_groups`` - 1.
        num_groups: Number of groups.
        is_lower: Whether they are the lower medians, see `lower_medians`.

    Returns:
        Two arrays of shape (num_groups,); the medians in the unit of ``value``.
    """
    num = np.bincount(group, minlength=num_groups).astype(np.int64)
    ordered = np.append(_sort_by_group(value, group), np.nan)
    first = np.cumsum(num) - num
    low = np.where(num > 0, first + (num - 1) // 2, -1)
    high = low if is_lower else np.where(num > 0, first + num // 2, -1)
    medians: NDArray[np.float64] = (ordered[low] + ordered[high]) / 2
    return medians, num


def medians_by_key(
    values: NDArray[Any], *key: NDArray[np.integer[Any]], is_lower: bool = False
) -> NDArray[np.float64]:
    """Return for each row the median of the rows with its key, in the unit of ``values``."""
    group, num_groups = factorize(*key)
    return group_medians(values, group, num_groups, is_lower=is_lower)[0][group]


def means_by_key(
    values: NDArray[np.float64], *key: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Return for each row the mean of the rows with its key, in the unit of ``values``."""
    group, num_groups = factorize(*key)
    total = np.bincount(group, weights=values, minlength=num_groups)
    means: NDArray[np.float64] = (total / np.bincount(group, minlength=num_groups))[group]
    return means


def mean_absolute_deviations(
    value: NDArray[np.float64], group: NDArray[np.int64], num_groups: int
) -> NDArray[np.float64]:
    """Return each group's mean absolute deviation from its median, 0 if it is empty.

    Args:
        value: Shape (rows,).
        group: Shape (rows,): the row's group, from 0 to ``num_groups`` - 1.
        num_groups: Number of groups.
    """
    median, num = group_medians(value, group, num_groups)
    total = np.bincount(group, weights=np.abs(value - median[group]), minlength=num_groups)
    mean: NDArray[np.float64] = total / np.maximum(num, 1)
    return mean


def _sort_by_group(value: NDArray[Any], group: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    if not len(value):
        return value.astype(np.float64)
    has_large_groups = (int(group.max()) + 1) * _LARGE_GROUP <= len(value)
    if has_large_groups and not (group[1:] < group[:-1]).any():
        return _sort_each(value.astype(np.float64), group)
    minimum, maximum = value.min(), value.max()
    if -MAX_EXACT_INT < minimum <= maximum < MAX_EXACT_INT:  # none is NaN
        integers = value.astype(np.int64)
        bits = (int(maximum) - int(minimum)).bit_length()
        fits = bits + int(group.max()).bit_length() <= KEY_BITS
        if fits and (integers == value).all():
            # Times are integer nanoseconds, also in a float column. Group and value make one key,
            # and one sort of the keys is three times as fast as an argsort of the rows.
            columns = (KeyColumn(group, 0, 0), KeyColumn(integers, int(minimum), 1 << bits))
            keys = pack_keys(columns)
            keys.sort()
            keys &= (1 << bits) - 1
            keys += int(minimum)
            return keys.astype(np.float64)
    if has_large_groups:
        order = stable_argsort(group)
        return _sort_each(value[order].astype(np.float64), group[order])
    return value[argsort_rows(group, value)].astype(np.float64)


def _sort_each(values: NDArray[np.float64], group: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Sort the values of each group in place, and return them. ``group`` ascends."""
    borders = np.flatnonzero(group[1:] != group[:-1]) + 1
    for first, last in pairwise([0, *borders.tolist(), len(group)]):
        values[first:last].sort()
    return values


def fast_quartile(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each row's value in the fastest quarter of its steps.

    Args:
        value: Shape (rows, steps); NaN if unknown.

    Returns:
        Same shape, constant along each row: `BASELINE_QUANTILE` of its known values.
    """
    num = (~np.isnan(value)).sum(axis=1)
    index = (np.maximum(num - 1, 0) * BASELINE_QUANTILE).astype(np.int64)
    quartile = np.sort(value, axis=1)[np.arange(len(value)), index]
    return np.broadcast_to(quartile[:, None], value.shape)


def medians_by_kind(
    values: NDArray[np.float64], kind: NDArray[np.integer], *, is_lower: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return, for each cell, the median of its column over the rows of its kind.

    Args:
        values: Shape (rows, columns); NaN if unknown.
        kind: Shape (rows,): rows of equal kind are peers.
        is_lower: Whether they are the lower medians, see `lower_medians`.

    Returns:
        Medians, shape (rows, columns), and which rows are of a kind with at least
        `MIN_ROWS_OF_KIND`, shape (rows,).
    """
    medians = np.full_like(values, np.nan)
    enough = np.zeros(len(values), dtype=np.bool_)
    if not len(values):
        return medians, enough
    order = stable_argsort(kind)
    changes = np.flatnonzero(np.diff(kind[order])) + 1
    for first, last in pairwise([0, *changes.tolist(), len(order)]):
        rows = order[first:last]
        medians[rows] = lower_medians(values[rows]) if is_lower else row_medians(values[rows].T)
        enough[rows] = len(rows) >= MIN_ROWS_OF_KIND
    return medians, enough


def lower_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lower median of each column's known values.

    That is what is usual of peers for time that is lost. A fault only adds time: if half of the
    rows have it, the other half is healthy. The median of two is their mean, which no healthy row
    takes, and half of what the faulty one loses.
    """
    ordered = np.sort(values, axis=0)
    known = np.maximum((~np.isnan(values)).sum(axis=0) - 1, 0)
    medians: NDArray[np.float64] = np.take_along_axis(ordered, known[None] // 2, axis=0)[0]
    return medians


def row_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row without its NaNs; NaN if it has nothing else."""
    num = (~np.isnan(values)).sum(axis=1)
    ordered = np.sort(values, axis=1)
    rows = np.arange(len(values))
    last = np.maximum(num - 1, 0)
    median: NDArray[np.float64] = (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2
    return median
