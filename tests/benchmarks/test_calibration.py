"""Reliability of confidences: scores of findings whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.calibration import brier_score, platt_scaling, reliability


def test_the_brier_score_is_the_mean_squared_doubt() -> None:
    confidence, right = np.array([0.9, 0.8, 0.5]), np.array([1.0, 0.0, 1.0])

    assert brier_score(confidence, right) == pytest.approx((0.01 + 0.64 + 0.25) / 3)


@pytest.mark.parametrize(("num_right", "slope"), [((9, 6), 1.0), ((8, 7), 0.6)])
def test_scaling_is_the_identity_if_as_many_are_right_as_said(
    num_right: tuple[int, int], slope: float
) -> None:
    # GIVEN ten findings with 0.9 and ten with 0.6, of which 9 and 6 are right; or 8 and 7
    confidence = np.repeat([0.9, 0.6], 10)
    right = np.concatenate([np.arange(10) < num for num in num_right]).astype(float)

    a, b = platt_scaling(confidence, right)

    scaled = 1 / (1 + np.exp(-(a + b * np.log(confidence / (1 - confidence)))))
    assert np.unique(scaled.round(3)).tolist() == pytest.approx(sorted(n / 10 for n in num_right))
    assert b < slope + 0.05


def test_the_table_counts_right_findings_by_confidence() -> None:
    lines = reliability([(0.91, True), (0.92, False), (1.0, True)]).splitlines()

    assert lines[7].startswith("| 0.9 to 0.93 | 0.915 | 50.0%")
    assert lines[11].startswith("| 0.99 to 1 | 1.000 | 100.0%")
