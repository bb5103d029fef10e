"""Mix the columns of long tables into one key a row, a cache's worth of rows at a time.

Column by column, each takes several arrays of millions of rows through the memory, which costs
more than the sort that the key is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

KEY_BITS = 62
"""What a key may take: one bit is the sign's, and one is left for a value beside all keys."""

_BLOCK = 1 << 15
"""Rows whose keys stay in a core's cache."""


class Digit(NamedTuple):
    """A column as one digit of a key."""

    column: NDArray[Any]
    """Shape (rows,); integers or truth values."""

    lowest: int
    """Its lowest value, which becomes 0."""

    radix: int
    """More than its highest value lies above that."""


def mixed_keys(digits: Sequence[Digit]) -> NDArray[np.int64]:
    """Return the number that each row's digits make up, the first counting most.

    Args:
        digits: At least one; their radixes' product is below 2^63.
    """
    keys = np.empty(len(digits[0].column), dtype=np.int64)
    other = np.empty(min(_BLOCK, len(keys)), dtype=np.int64)
    for first in range(0, len(keys), _BLOCK):
        here = keys[first : first + _BLOCK]
        _above(digits[0], first, here)
        for digit in digits[1:]:
            above = other[: len(here)]
            _above(digit, first, above)
            here *= digit.radix
            here += above
    return keys


def keys_with_rows(column: NDArray[Any], lowest: int, row_bits: int) -> NDArray[np.int64]:
    """Return what each value lies above the lowest, with its row's number in the bits below.

    Args:
        column: As in `Digit`.
        lowest: As there.
        row_bits: As many as the number of the last row takes.
    """
    keys = np.empty(len(column), dtype=np.int64)
    rows = np.arange(min(_BLOCK, len(keys)))
    digit = Digit(column, lowest, 0)
    for first in range(0, len(keys), _BLOCK):
        here = keys[first : first + _BLOCK]
        _above(digit, first, here)
        here <<= row_bits
        here += rows[: len(here)]
        here += first
    return keys


def _above(digit: Digit, first: int, out: NDArray[np.int64]) -> None:
    """Write what the rows from ``first`` on lie above the lowest."""
    block = digit.column[first : first + len(out)]
    if block.dtype == np.uint64:  # what int64 cannot hold
        np.subtract(block, np.uint64(digit.lowest), out=out, casting="unsafe")
    else:
        np.subtract(block, digit.lowest, out=out, dtype=np.int64)
