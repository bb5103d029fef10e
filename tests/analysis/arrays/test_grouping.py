from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.arrays.grouping import (
    NO_GROUP,
    _number_by_hash,
    cumcount,
    factorize,
    max_over_group,
    sorted_unique,
)

NUMBERS = st.lists(st.integers(-(2**62), 2**62) | st.integers(-3, 3), max_size=40)
ROWS = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(-(2**62), 2**62), st.integers(0, 2)),
    min_size=1,
    max_size=40,
)


@given(NUMBERS)
def test_unique_values_are_those_of_a_set(values: list[int]) -> None:
    assert sorted_unique(np.array(values, dtype=np.int64)).tolist() == sorted(set(values))


def test_numbers_of_groups_are_larger_than_any_signed_one() -> None:
    group_id = np.array([2**63 + 9, 2**63 + 7, 2**63 + 9], dtype=np.uint64)

    assert sorted_unique(group_id).tolist() == [2**63 + 7, 2**63 + 9]


def test_codes_of_many_rows_equal_those_of_numpy() -> None:
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 1 << 64, 300, dtype=np.uint64)[rng.integers(0, 300, 5_000)]
    crowded = np.where(rng.random(5_000) < 0.9, rng.integers(0, 50, 5_000), 1 << 60)
    many = rng.integers(-(1 << 62), 1 << 62, 40_000)

    for column in (hashes, crowded, many):
        codes, num = factorize(column)

        values, expected = np.unique(column, return_inverse=True)
        assert num == len(values)
        assert (codes == expected).all()


def test_values_of_equal_hash_are_numbered_by_the_next_multiplier() -> None:
    column = np.tile(np.array([3, 8], dtype=np.int64), 2_000)  # products with 1 share slot 0

    assert _number_by_hash(column, (1,)) is None

    found = _number_by_hash(column, (1, 1))
    assert found is not None
    assert found[1][found[0]].tolist() == column.tolist()


@given(ROWS)
def test_codes_ascend_with_the_columns(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]

    codes, num = factorize(*columns)

    order = sorted(set(rows))
    assert num == len(order)
    assert codes.tolist() == [order.index(row) for row in rows]


def test_rows_of_consecutive_equal_keys_are_numbered_from_zero() -> None:
    assert cumcount(np.array([4, 4, 7, 7, 7, 4])).tolist() == [0, 1, 0, 1, 2, 0]


def test_all_members_of_a_group_get_its_largest_value() -> None:
    group = np.array([1, NO_GROUP, 1, 0], dtype=np.int64)

    assert max_over_group(group, np.array([5, 9, 8, 2])).tolist() == [8, 9, 8, 2]
