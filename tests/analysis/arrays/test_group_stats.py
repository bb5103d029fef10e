from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.arrays.group_stats import group_medians, medians_by_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

VALUES: dict[str, Callable[[np.random.Generator], NDArray[Any]]] = {
    "integers": lambda rng: rng.integers(-(1 << 40), 1 << 40, 5_000),
    "integers as floats": lambda rng: rng.integers(-(1 << 40), 1 << 40, 5_000).astype(np.float64),
    "fractions": lambda rng: rng.normal(size=5_000),
    "beyond exact integers": lambda rng: rng.normal(size=5_000) * 1e30,
    "one NaN": lambda rng: np.append(rng.integers(0, 9, 4_999).astype(np.float64), np.nan),
    "one infinite": lambda rng: np.append(rng.integers(0, 9, 4_999) * 1.0, np.inf),
}
"""Values by their kind: integers that fit into one key with the group are sorted as keys."""


@pytest.mark.parametrize("name", VALUES)
def test_group_median_equals_that_of_numpy(name: str) -> None:
    rng = np.random.default_rng(1)
    values, group = VALUES[name](rng), rng.integers(0, 9, 5_000)
    group[group == 3] = 4

    medians, num = group_medians(values, group, 10)

    for k in range(10):
        own = values[group == k]
        assert num[k] == len(own)
        known = np.sort(own)  # NaN counts as the largest
        expected = (known[(len(own) - 1) // 2] + known[len(own) // 2]) / 2 if len(own) else np.nan
        np.testing.assert_equal(medians[k], expected)


def test_rows_are_compared_with_the_median_of_their_kind() -> None:
    values = np.array([[1.0, 4.0], [3.0, np.nan], [10.0, 20.0]])

    medians, enough = medians_by_kind(values, np.array([0, 0, 1]))

    assert medians.tolist() == [[2.0, 4.0], [2.0, 4.0], [10.0, 20.0]]
    assert enough.tolist() == [False, False, False]


def test_no_rows_have_no_medians() -> None:
    # A kind of transfer without a usable instance.
    medians, enough = medians_by_kind(np.zeros((0, 16)), np.zeros(0, dtype=np.int64))

    assert medians.shape == (0, 16)
    assert enough.shape == (0,)
