"""Number rows of several columns by what they hold, faster than sorting rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .sorting import KeyColumn, argsort_with_changes, find_in_buckets, pack_keys, stable_argsort

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

_MAX_KEY = 2**62
_MAX_RADIX = 2**30
"""Columns of a wider range (hashes) are numbered by what occurs in them."""

_FEW_VALUES = 1 << 14
"""As many stay in a core's cache."""

_SAMPLE = 1 << 14
"""Rows that tell whether most values occur often."""

_DENSE = 4
"""A table of keys this many times as large as the number of rows is still cheaper than a sort."""


def factorize(*columns: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], int]:
    """Return a number for each row, equal exactly where all columns are, and how many there are.

    Numbers rise with the columns, the first counting most, and have no holes.

    Args:
        columns: Each of shape (rows,).
    """
    return _compact(*_keyed(columns))


def row_keys(*columns: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the same numbers with holes, which takes no sort: enough to bring equal rows together.

    Args:
        columns: Each of shape (rows,).
    """
    return _keyed(columns)[0]


def _keyed(columns: Sequence[NDArray[np.integer[Any]]]) -> tuple[NDArray[np.int64], int]:
    """Mix the columns into one number below the one returned beside it."""
    digits: list[KeyColumn] = []
    size = 1
    for column in columns:
        digit = _digit(column)
        if digit.radix == 1:
            continue
        if size * digit.radix > _MAX_KEY:
            key, size = _compact(pack_keys(digits), size)
            digits = [KeyColumn(key, 0, size)]
        digits.append(digit)
        size *= digit.radix
    return pack_keys(digits) if digits else np.zeros(len(columns[0]), dtype=np.int64), size


def _compact(key: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], int]:
    """Renumber keys below ``size`` without holes, their order kept."""
    if size <= _DENSE * len(key) + 1024:
        seen = np.zeros(size, dtype=np.bool_)
        seen[key] = True
        number = np.cumsum(seen, dtype=np.int32)  # short, so that more of it stays in a cache
        number -= 1
        return number[key].astype(np.int64), int(number[-1]) + 1 if size else 0
    return _numbered(key)


def _numbered(column: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Number each row by its value's place among the distinct ones; tell how many there are."""
    sample = column[:: max(len(column) // _SAMPLE, 1)]
    if len(sorted_unique(sample)) < len(sample) // 2:
        values = sorted_unique(column)
        found = find_in_buckets(column, values) if len(values) <= _FEW_VALUES else None
        if found is not None:
            return found, len(values)
    order, changes = argsort_with_changes(column)
    number = np.empty(len(column), dtype=np.int64)
    number[order] = np.cumsum(changes)
    return number, int(np.count_nonzero(changes)) + 1


def _digit(column: NDArray[np.integer[Any]]) -> KeyColumn:
    """Return the column as a digit, numbered by what occurs in it where its range is wide."""
    if not len(column):
        return KeyColumn(column, 0, 1)
    lowest, highest = int(column.min()), int(column.max())
    if highest - lowest < _MAX_RADIX:
        return KeyColumn(column, lowest, highest - lowest + 1)
    number, num = _numbered(column)
    return KeyColumn(number, 0, num)


def is_one_of(codes: NDArray[np.integer[Any]], wanted: Iterable[int]) -> NDArray[np.bool_]:
    """Tell which codes are among a few: ``np.isin``, many times as fast for columns of bytes.

    Args:
        codes: Shape (rows,).
        wanted: Each is compared with all of them.
    """
    found = np.zeros(len(codes), dtype=np.bool_)
    for code in wanted:
        found |= codes == code
    return found


def sorted_unique(column: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """Return the distinct values, ascending; many times as fast as np.unique, which hashes.

    Args:
        column: Shape (rows,).

    Returns:
        Values of the same type.
    """
    if not len(column):
        return column
    lowest, highest = int(column.min()), int(column.max())
    if highest - lowest < _DENSE * len(column) + 1024:
        seen = np.zeros(highest - lowest + 1, dtype=np.bool_)
        seen[column - column.dtype.type(lowest)] = True
        return (np.flatnonzero(seen) + lowest).astype(column.dtype)
    ordered = np.sort(column)
    found: NDArray[Any] = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return found


NO_GROUP = -1


def cumcount(key: NDArray[np.integer]) -> NDArray[np.int64]:
    """Number the rows of each run of equal ``key`` from 0; ``key`` must be sorted into runs."""
    index = np.arange(len(key))
    if not len(key):
        return index
    begins = np.concatenate(([True], key[1:] != key[:-1]))
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def max_over_group(group: NDArray[np.int64], value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each member of a group, the largest ``value`` over its group.

    Rows without a group (`NO_GROUP`) get their own value.
    """
    latest = value.copy()
    members = np.flatnonzero(group != NO_GROUP)
    if not len(members):
        return latest
    ordered = members[stable_argsort(group[members])]
    begins = np.flatnonzero(np.diff(group[ordered], prepend=NO_GROUP))
    sizes = np.diff(np.append(begins, len(ordered)))
    latest[ordered] = np.repeat(np.maximum.reduceat(value[ordered], begins), sizes)
    return latest
