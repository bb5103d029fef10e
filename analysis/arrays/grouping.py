"""Factorization and group-by of long columns, faster than sorting their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .sorting import KeyColumn, argsort_with_changes, pack_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

NO_GROUP = -1
"""Group of a row that has none."""

_MAX_KEY = 2**62
_MAX_RANGE = 2**30
"""Columns of a wider range (hashes) are factorized before they are packed."""

_MULTIPLIERS = (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
"""Odd numbers whose bits look random; of a product with one, the upper bits are a hash. Source: the
constants of splitmix64; Dietzfelbinger et al., "A reliable randomized algorithm for the
closest-pair problem" (1997), multiply-shift hashing."""

_FEW_VALUES = 4
"""A column with fewer distinct values than one in this many rows is numbered by a hash table."""

_DENSE = 4
"""A lookup table of up to this many entries per row is cheaper than a sort."""


def factorize(*columns: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], int]:
    """Return a code for each row, equal exactly if all columns are, and the number of codes.

    Codes are dense, from 0, and ascend with the columns, the first being the most significant.

    Args:
        columns: Each of shape (rows,).
    """
    return _make_dense(*_pack(columns))


def code_groups(group: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int32], int]:
    """Return the code of each row's group, `NO_GROUP` without one, and the number of codes.

    Args:
        group: Shape (rows,).
    """
    code, num = np.full(len(group), NO_GROUP, dtype=np.int32), 0
    members = np.flatnonzero(group != NO_GROUP)
    code[members], num = factorize(group[members])
    return code, num


def row_keys(*columns: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the codes of `factorize` before they are made dense, which needs no sort.

    Args:
        columns: Each of shape (rows,).
    """
    return _pack(columns)[0]


def _pack(columns: Sequence[NDArray[np.integer[Any]]]) -> tuple[NDArray[np.int64], int]:
    """Pack the columns into one key per row; return also a bound that all keys are below."""
    key_columns: list[KeyColumn] = []
    size = 1
    for column in columns:
        key_column = _key_column(column)
        if key_column.num_values == 1:
            continue
        if size * key_column.num_values > _MAX_KEY:
            key, size = _make_dense(pack_keys(key_columns), size)
            key_columns = [KeyColumn(key, 0, size)]
        key_columns.append(key_column)
        size *= key_column.num_values
    return pack_keys(key_columns) if key_columns else np.zeros(
        len(columns[0]), dtype=np.int64
    ), size


def _make_dense(key: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], int]:
    """Renumber keys below ``size`` without gaps, in the same order; return also their number."""
    if size <= _DENSE * len(key) + 1024:
        seen = np.zeros(size, dtype=np.bool_)
        seen[key] = True
        code = np.cumsum(seen, dtype=np.int32)  # 32 bits: more of it stays in the cache
        code -= 1
        return code[key].astype(np.int64), int(code[-1]) + 1 if size else 0
    return _factorize_column(key)


def _factorize_column(column: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Return the index of each row's value among the sorted distinct values, and their number."""
    hashed = _number_by_hash(column, _MULTIPLIERS)
    if hashed is not None:
        code, values = hashed
        order = np.argsort(values)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return rank[code], len(values)
    order, changes = argsort_with_changes(column)
    code = np.empty(len(column), dtype=np.int64)
    code[order] = np.cumsum(changes)
    return code, int(np.count_nonzero(changes)) + 1


def _number_by_hash(
    column: NDArray[Any], multipliers: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
    """Number the distinct values of a column, in any order; ten times as fast as a sort.

    Of the values that share a slot of the table one takes it, and the rows of the others are
    numbered by a table with the next multiplier.

    Returns:
        The number of each row, and the values; None if there are many distinct values, or some
        share a slot for each multiplier.
    """
    if not len(column) or not multipliers:
        return None
    bits = min(max((len(column) - 1).bit_length(), 10), 21)
    slot = column.astype(np.uint64) * np.uint64(multipliers[0])
    slot >>= np.uint64(64 - bits)
    taken = np.zeros(1 << bits, dtype=np.bool_)
    taken[slot] = True
    slots = np.flatnonzero(taken)
    if len(slots) * _FEW_VALUES > len(column) + 1024:
        return None
    table = np.empty(1 << bits, dtype=column.dtype)
    table[slot] = column
    number = np.cumsum(taken, dtype=np.int32)
    number -= 1
    code, values = number[slot].astype(np.int64), table[slots]
    lost = np.flatnonzero(values[code] != column)
    if not len(lost):
        return code, values
    rest = _number_by_hash(column[lost], multipliers[1:])
    if rest is None:
        return None
    code[lost] = rest[0] + len(values)
    return code, np.concatenate((values, rest[1]))


def _key_column(column: NDArray[np.integer[Any]]) -> KeyColumn:
    if not len(column):
        return KeyColumn(column, 0, 1)
    minimum, maximum = int(column.min()), int(column.max())
    if maximum - minimum < _MAX_RANGE:
        return KeyColumn(column, minimum, maximum - minimum + 1)
    code, num = _factorize_column(column)
    return KeyColumn(code, 0, num)


def is_one_of(codes: NDArray[np.integer[Any]], wanted: Iterable[int]) -> NDArray[np.bool_]:
    """Return ``np.isin(codes, wanted)``, much faster for a byte column and few wanted values.

    Args:
        codes: Shape (rows,).
        wanted: Each is compared with every row.
    """
    found = np.zeros(len(codes), dtype=np.bool_)
    for code in wanted:
        found |= codes == code
    return found


def sorted_unique(column: NDArray[np.integer[Any]]) -> NDArray[Any]:
    """Return ``np.unique(column)``, much faster, because np.unique hashes.

    Args:
        column: Shape (rows,).
    """
    if not len(column):
        return column
    minimum, maximum = int(column.min()), int(column.max())
    if maximum - minimum < _DENSE * len(column) + 1024:
        seen = np.zeros(maximum - minimum + 1, dtype=np.bool_)
        seen[column - column.dtype.type(minimum)] = True
        found: NDArray[Any] = np.flatnonzero(seen).astype(column.dtype)
        found += column.dtype.type(minimum)
    else:
        ordered = np.sort(column)
        found = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    return found


def cumcount(key: NDArray[np.integer]) -> NDArray[np.int64]:
    """Number the rows of each series of consecutive equal keys from 0."""
    index = np.arange(len(key))
    if not len(key):
        return index
    begins = np.concatenate(([True], key[1:] != key[:-1]))
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def max_over_group(group: NDArray[np.integer[Any]], value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each row, the largest ``value`` of its group.

    A row without a group (`NO_GROUP`) keeps its own value.
    """
    largest = value.copy()
    members = np.flatnonzero(group != NO_GROUP)
    code, num = factorize(group[members])
    of_group = np.full(num, np.iinfo(np.int64).min)
    np.maximum.at(of_group, code, value[members])
    largest[members] = of_group[code]
    return largest
