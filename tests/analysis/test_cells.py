from __future__ import annotations

import numpy as np

from analysis.cells import median_by_kind


def test_rows_are_held_against_the_median_of_their_kind() -> None:
    values = np.array([[1.0, 4.0], [3.0, np.nan], [10.0, 20.0]])

    medians, enough = median_by_kind(values, np.array([0, 0, 1]))

    assert medians.tolist() == [[2.0, 4.0], [2.0, 4.0], [10.0, 20.0]]
    assert enough.tolist() == [False, False, False]


def test_no_rows_have_no_medians() -> None:
    """A kind of transfer none of whose instances could be used."""
    medians, enough = median_by_kind(np.zeros((0, 16)), np.zeros(0, dtype=np.int64))

    assert medians.shape == (0, 16)
    assert enough.shape == (0,)
