from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.arrays.radix_keys import Digit, keys_with_rows, mixed_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_ROWS = 100_000
"""More than one block."""


def test_a_key_is_the_number_that_its_digits_make_up() -> None:
    keys = mixed_keys(
        [
            Digit(np.array([5, 6], dtype=np.int32), 5, 2),
            Digit(np.array([-1, 1], dtype=np.int8), -1, 3),
            Digit(np.array([True, False]), 0, 2),
        ]
    )

    assert keys.tolist() == [0 * 6 + 0 * 2 + 1, 1 * 6 + 2 * 2 + 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_differences_hold_over_the_whole_range_of_a_type(dtype: type) -> None:
    limits = np.iinfo(dtype)
    lowest = int(limits.max) - 2**31 if dtype is not np.int32 else int(limits.min)
    column: NDArray[Any] = np.full(NUM_ROWS, lowest, dtype=dtype)
    column[-1] = limits.max

    keys = mixed_keys([Digit(column, lowest, 2**32)])

    assert keys[0] == 0
    assert keys[-1] == int(limits.max) - lowest


def test_a_row_stands_below_its_value() -> None:
    column = np.arange(NUM_ROWS, dtype=np.int64)[::-1] // 10 + 7

    keys = keys_with_rows(column, 7, 17)

    assert (keys >> 17 == column - 7).all()
    assert (keys & (1 << 17) - 1 == np.arange(NUM_ROWS)).all()


def test_no_rows_have_no_keys() -> None:
    empty = np.zeros(0, dtype=np.int32)

    assert not len(mixed_keys([Digit(empty, 0, 1)]))
    assert not len(keys_with_rows(empty, 0, 0))
