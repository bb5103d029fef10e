"""Argsort and search over long columns, several times as fast as numpy's own.

numpy sorts 64-bit integers with SIMD instructions, but a stable argsort merges. If a column's
range leaves enough bits for the row number, value and row number are packed into one integer key,
and one plain sort of the keys gives the stable order. Keys are packed one cache-sized block of
rows at a time: column by column, the traffic to memory would cost more than the sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

KEY_BITS = 62
"""Bits of a packed key: one is the sign's, one is left for a value beside all keys."""

_BLOCK = 1 << 15
"""Rows whose keys stay in a core's cache."""

_FEW_ROWS = 1024
"""Up to this many rows any method is fast."""

_FEW_TIES = 8
"""If fewer than one row in this many ties in the first key, only those are sorted by the others."""

_DENSE = 4
"""A lookup table of up to this many entries per row is faster than a binary search per row."""


class KeyColumn(NamedTuple):
    """A column's share of a packed key."""

    column: NDArray[Any]
    """Shape (rows,); integers or booleans."""

    minimum: int
    """The column's lowest value, packed as 0."""

    num_values: int
    """An upper bound of ``value - minimum``, exclusive."""


def pack_keys(columns: Sequence[KeyColumn]) -> NDArray[np.int64]:
    """Return one mixed-radix number per row; the first column is the most significant.

    Args:
        columns: At least one; the product of their ``num_values`` is below 2^63. That of the
            first column is not used.
    """
    keys = np.empty(len(columns[0].column), dtype=np.int64)
    buffer = np.empty(min(_BLOCK, len(keys)), dtype=np.int64)
    for first in range(0, len(keys), _BLOCK):
        block = keys[first : first + _BLOCK]
        _subtract_minimum(columns[0], first, block)
        for column in columns[1:]:
            offsets = buffer[: len(block)]
            _subtract_minimum(column, first, offsets)
            block *= column.num_values
            block += offsets
    return keys


def _subtract_minimum(column: KeyColumn, first: int, out: NDArray[np.int64]) -> None:
    block = column.column[first : first + len(out)]
    if block.dtype == np.uint64:  # values that int64 cannot hold
        np.subtract(block, np.uint64(column.minimum), out=out, casting="unsafe")
    else:
        np.subtract(block, column.minimum, out=out, dtype=np.int64)


def stable_argsort(column: NDArray[Any]) -> NDArray[np.int64]:
    """Return ``np.argsort(column, kind="stable")``.

    Args:
        column: Shape (rows,); integers, booleans, or floats (NaN comes last).
    """
    if len(column) <= _FEW_ROWS or column.dtype.kind == "f":
        return np.argsort(column, kind="stable")
    if not (column[1:] < column[:-1]).any():
        return np.arange(len(column))
    packed = _sort_with_rows(column)
    if packed is None:
        return np.argsort(column, kind="stable")  # merges ascending runs
    keys, row_bits = packed
    keys &= (1 << row_bits) - 1
    return keys


def argsort_with_changes(
    column: NDArray[np.integer[Any]],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return `stable_argsort` and, in that order, whether a row differs from the one before.

    Args:
        column: Shape (rows,); integers.

    Returns:
        The order, and the changes: False for the first row.
    """
    if len(column) > _FEW_ROWS and (packed := _sort_with_rows(column)) is not None:
        keys, row_bits = packed
        order = keys & ((1 << row_bits) - 1)
        keys >>= row_bits
        return order, np.append(False, keys[1:] != keys[:-1])
    order = stable_argsort(column)
    ordered = column[order]
    return order, np.append(False, ordered[1:] != ordered[:-1])


def _sort_with_rows(column: NDArray[Any]) -> tuple[NDArray[np.int64], int] | None:
    """Return keys of value and row, sorted, and their bits of the row; None if there are too many.

    A key is ``value - minimum``, shifted left above the row's number.
    """
    minimum, bits = _value_range(column)
    row_bits = (len(column) - 1).bit_length()
    if bits + row_bits > KEY_BITS:
        return None
    keys = np.empty(len(column), dtype=np.int64)
    row_numbers = np.arange(min(_BLOCK, len(keys)))
    key_column = KeyColumn(column, minimum, 0)
    for first in range(0, len(keys), _BLOCK):
        block = keys[first : first + _BLOCK]
        _subtract_minimum(key_column, first, block)
        block <<= row_bits
        block += row_numbers[: len(block)]
        block += first
    keys.sort()
    return keys, row_bits


def argsort_rows(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return ``np.lexsort`` with the most significant column first.

    Args:
        columns: Each of shape (rows,), as for `stable_argsort`.
    """
    if len(columns[0]) <= _FEW_ROWS:
        return np.lexsort(columns[::-1])
    if (columns[0][1:] > columns[0][:-1]).all():
        return np.arange(len(columns[0]))
    keys = _pack_neighbours(columns)
    if len(keys) > 1 and keys[0].dtype.kind != "f":
        order = stable_argsort(keys[0])
        if _sort_ties(order, keys):
            return order
    order = stable_argsort(keys[-1])
    for key in keys[-2::-1]:
        order = order[stable_argsort(key[order])]
    return order


def _sort_ties(order: NDArray[np.int64], keys: Sequence[NDArray[Any]]) -> bool:
    """Sort rows of equal first key by the other keys, in place; False if there are many of them."""
    first = keys[0][order]
    ties = np.append(False, first[1:] == first[:-1])
    if np.count_nonzero(ties) * _FEW_TIES > len(order):
        return False
    at = np.flatnonzero(ties | np.append(ties[1:], False))
    rows = order[at]
    order[at] = rows[np.lexsort((*(key[rows] for key in keys[:0:-1]), np.cumsum(~ties[at])))]
    return True


def _pack_neighbours(columns: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Pack neighbouring columns into one key, as long as bits for the row number are left."""
    max_bits = KEY_BITS - (len(columns[0]) - 1).bit_length()
    keys: list[NDArray[Any] | list[KeyColumn]] = []
    packed: list[KeyColumn] = []
    used_bits = max_bits + 1  # no key is open
    for column in columns:
        if column.dtype.kind == "f":
            keys.append(column)
            used_bits = max_bits + 1
            continue
        minimum, bits = _value_range(column)
        key_column = KeyColumn(column, minimum, 1 << bits)
        if bits > max_bits:
            keys.append(column)
            used_bits = max_bits + 1
        elif used_bits + bits > max_bits:
            packed = [key_column]
            keys.append(packed)
            used_bits = bits
        else:
            packed.append(key_column)
            used_bits += bits
    return [pack_keys(key) if isinstance(key, list) else key for key in keys]


def _value_range(column: NDArray[Any]) -> tuple[int, int]:
    """Return a column's minimum, and the bits of its maximum minus that."""
    minimum, maximum = int(column.min()), int(column.max())
    return minimum, (maximum - minimum).bit_length()


def find_positions(values: NDArray[np.integer[Any]], ascending: NDArray[Any]) -> NDArray[np.int64]:
    """Return ``np.searchsorted(ascending, values)``.

    Args:
        values: Shape (rows,).
        ascending: Shape (entries,), sorted.
    """
    if len(values) <= _FEW_ROWS or not len(ascending):
        return np.searchsorted(ascending, values)
    minimum, maximum = int(values.min()), int(values.max())
    if maximum - minimum >= _DENSE * len(values):
        return np.searchsorted(ascending, values)
    table = np.searchsorted(ascending, np.arange(minimum, maximum + 1))
    found: NDArray[np.int64] = table[values - values.dtype.type(minimum)]
    return found


def first_rows(ascending: NDArray[np.integer[Any]], num: int) -> NDArray[np.int64]:
    """Return the index of the first row of each value from 0 to ``num``.

    Args:
        ascending: Shape (rows,), sorted, from 0 to ``num`` - 1. Searched for numbers of another
            type, all of it would be converted.
        num: Number of values.
    """
    return np.searchsorted(ascending, np.arange(num + 1, dtype=ascending.dtype))


def is_in_sorted(values: NDArray[np.integer[Any]], ascending: NDArray[Any]) -> NDArray[np.bool_]:
    """Return ``np.isin(values, ascending)``; fastest if the values ascend too.

    Args:
        values: Shape (rows,).
        ascending: Shape (entries,), sorted.
    """
    if not len(ascending):
        return np.zeros(len(values), dtype=np.bool_)
    index = np.minimum(find_positions(values, ascending), len(ascending) - 1)
    found: NDArray[np.bool_] = ascending[index] == values
    return found
