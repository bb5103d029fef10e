"""Experts' compute with micro-batches of equal length."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.arrays.grouping import NO_GROUP
from rankscope.analysis.causes.equal_lengths import equalize_experts
from tests.analysis.breakdown.test_starved import model_of

OUTSIDE_NS = (10, 20, 30)
EQUALIZED = np.array([20.0, 0.0] * 3)
"""What compute outside the experts would take; of theirs nothing is known yet."""

EXPERTS = np.array([False, True] * 3)


def equal(experts_ns: tuple[int, int, int]) -> tuple[list[bool], list[float]]:
    """Even three micro-batches of one rank: each computes outside, then in its experts."""
    ops, now = [], 0
    for pair in zip(OUTSIDE_NS, experts_ns, strict=True):
        for took in pair:
            ops.append((0, now, now + took, NO_GROUP))
            now += took
    part, found = equalize_experts(model_of(ops, []), EXPERTS, ~EXPERTS, EQUALIZED)
    return part.tolist(), found[EXPERTS].tolist()


def test_experts_would_be_shorter_by_as_much_as_what_was_computed_before_them() -> None:
    part, found = equal((22, 40, 63))

    assert part == [True] * 6
    assert found == pytest.approx([22 * 20 / 10, 40, 63 * 20 / 30])


def test_experts_that_go_another_way_are_left_alone() -> None:
    part, found = equal((60, 40, 20))

    assert part == (~EXPERTS).tolist()
    assert found == [0.0] * 3
