"""Argsort and search give what numpy gives, for columns of all kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.arrays import sorting
from rankscope.analysis.arrays.sorting import (
    KeyColumn,
    argsort_rows,
    find_positions,
    pack_keys,
    stable_argsort,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


NUM_ROWS = 3_000
"""Too many to be sorted by numpy alone."""

COLUMNS: dict[str, Callable[[np.random.Generator], NDArray[Any]]] = {
    "small": lambda rng: rng.integers(-5, 5, NUM_ROWS).astype(np.int32),
    "bytes": lambda rng: rng.integers(0, 3, NUM_ROWS).astype(np.uint8),
    "times": lambda rng: 1_700_000_000_000_000_000 + rng.integers(0, 1 << 34, NUM_ROWS),
    "hashes": lambda rng: rng.integers(0, 1 << 64, NUM_ROWS // 4, dtype=np.uint64).repeat(4),
    "all of int64": lambda rng: rng.integers(
        np.iinfo(np.int64).min, np.iinfo(np.int64).max, NUM_ROWS
    ),
    "booleans": lambda rng: rng.random(NUM_ROWS) < 0.5,
    "floats": lambda rng: np.where(rng.random(NUM_ROWS) < 0.1, np.nan, rng.random(NUM_ROWS)),
    "equal": lambda rng: np.full(NUM_ROWS, 7),
    "ascending": lambda rng: np.sort(rng.integers(-(1 << 62), 1 << 62, NUM_ROWS)),
    "runs": lambda rng: np.sort(
        rng.integers(-(1 << 62), 1 << 62, (NUM_ROWS // 100, 100)), axis=1
    ).ravel(),
}
"""Columns of different ranges and orders."""

MANY_ROWS = 100_000
"""More than one block."""


@pytest.mark.parametrize("name", COLUMNS)
def test_argsort_of_one_column_equals_that_of_numpy(name: str) -> None:
    column = COLUMNS[name](np.random.default_rng(1))

    assert (stable_argsort(column) == np.argsort(column, kind="stable")).all()


@given(
    names=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_argsort_of_several_columns_equals_lexsort(names: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = [COLUMNS[name](rng) for name in names]

    assert (argsort_rows(*columns) == np.lexsort(columns[::-1])).all()


def test_argsort_does_not_change_its_columns() -> None:
    rng = np.random.default_rng(2)
    columns = [COLUMNS[name](rng) for name in ("small", "bytes", "booleans")]
    before = [column.copy() for column in columns]

    argsort_rows(*columns)
    stable_argsort(columns[0])

    for column, copy in zip(columns, before, strict=True):
        assert (column == copy).all()


def test_no_rows_have_an_empty_order() -> None:
    assert not len(argsort_rows(np.array([], dtype=np.int64), np.array([], dtype=np.int32)))


@pytest.mark.parametrize(
    "ascending",
    [np.array([3, 5, 9]), np.arange(-20, 20, 2), np.array([], dtype=np.int64)],
    ids=["few", "many", "none"],
)
@pytest.mark.parametrize("spread", [30, 1 << 40], ids=["dense", "sparse"])
def test_positions_equal_those_of_searchsorted(ascending: NDArray[np.int64], spread: int) -> None:
    values: NDArray[Any] = np.random.default_rng(3).integers(-spread, spread, NUM_ROWS)

    assert (find_positions(values, ascending) == np.searchsorted(ascending, values)).all()


def test_rows_that_tie_in_a_wide_first_key_are_ordered_by_the_others() -> None:
    rng = np.random.default_rng(5)
    first = rng.integers(0, 1 << 61, NUM_ROWS)
    first[rng.integers(0, NUM_ROWS, NUM_ROWS // 20)] = first[7]
    second, third = rng.integers(0, 3, NUM_ROWS), rng.integers(-(1 << 61), 1 << 61, NUM_ROWS)

    assert (argsort_rows(first, second, third) == np.lexsort((third, second, first))).all()


def test_columns_of_these_tests_are_not_sorted_by_numpy() -> None:
    assert sorting._FEW_ROWS < NUM_ROWS


def test_packed_key_is_a_mixed_radix_number() -> None:
    keys = pack_keys(
        [
            KeyColumn(np.array([5, 6], dtype=np.int32), 5, 2),
            KeyColumn(np.array([-1, 1], dtype=np.int8), -1, 3),
            KeyColumn(np.array([True, False]), 0, 2),
        ]
    )

    assert keys.tolist() == [0 * 6 + 0 * 2 + 1, 1 * 6 + 2 * 2 + 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_keys_are_exact_over_the_whole_range_of_a_type(dtype: type) -> None:
    limits = np.iinfo(dtype)
    lowest = int(limits.max) - 2**31 if dtype is not np.int32 else int(limits.min)
    column: NDArray[Any] = np.full(MANY_ROWS, lowest, dtype=dtype)
    column[-1] = limits.max

    keys = pack_keys([KeyColumn(column, lowest, 2**32)])

    assert keys[0] == 0
    assert keys[-1] == int(limits.max) - lowest


def test_rows_of_several_blocks_are_numbered_through() -> None:
    column = np.arange(MANY_ROWS, dtype=np.int64)[::-1] // 10 + 7

    assert (stable_argsort(column) == np.argsort(column, kind="stable")).all()


def test_no_rows_have_no_keys() -> None:
    empty = np.zeros(0, dtype=np.int32)

    assert not len(pack_keys([KeyColumn(empty, 0, 1)]))
