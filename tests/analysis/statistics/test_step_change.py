from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.statistics.step_change import StepChange, compare_step_times

RANDOM = np.random.default_rng(7)


def steps(mean_s: float, *, noise_s: float, num: int = 40) -> list[float]:
    noise = RANDOM.normal(0.0, noise_s, num)
    return [float(value) for value in mean_s + noise - noise.mean()]


@pytest.mark.parametrize(("after_s", "ratio"), [(0.106, 1.06), (0.094, 0.94)])
def test_a_change_beyond_the_noise_is_significant_in_both_directions(
    after_s: float, ratio: float
) -> None:
    found = compare_step_times(steps(0.1, noise_s=0.002), steps(after_s, noise_s=0.002))

    assert found.ratio == pytest.approx(ratio)
    assert found.is_significant is True


def test_the_same_change_is_noise_where_steps_differ_more() -> None:
    found = compare_step_times(steps(0.1, noise_s=0.04), steps(0.106, noise_s=0.04))

    assert found.is_significant is False


def test_a_run_that_drifts_is_no_evidence_although_its_neighbouring_steps_are_alike() -> None:
    slow_half = [0.1] * 20 + [0.13] * 20
    slow_most = [0.1] * 15 + [0.13] * 25

    assert compare_step_times(slow_half, slow_most).is_significant is False


def test_one_long_checkpoint_is_no_regression() -> None:
    found = compare_step_times([0.1] * 20, [0.1] * 19 + [0.5])

    assert found.ratio == pytest.approx(1.2)
    assert found.is_significant is False


@pytest.mark.parametrize("num", [1, 4])
def test_of_few_steps_the_noise_is_unknown(num: int) -> None:
    found = compare_step_times([0.125] * num, [0.25] * 9)

    assert found == StepChange(ratio=2.0, is_significant=None)


def test_without_steps_nothing_is_known() -> None:
    assert compare_step_times([], [0.1] * 9) == StepChange(ratio=None, is_significant=None)


def test_steps_without_noise_differ_by_any_amount() -> None:
    assert compare_step_times([0.1] * 9, [0.1] * 9).is_significant is False
    assert compare_step_times([0.125] * 9, [0.25] * 9).is_significant is True


def test_the_margin_is_the_difference_at_which_a_change_becomes_significant() -> None:
    before, after = steps(0.1, noise_s=0.002), steps(0.103, noise_s=0.002)

    found = compare_step_times(before, after)

    assert found.margin_s is not None
    assert 0 < found.margin_s < 0.003
    for more_s, is_significant in ((1.01, True), (0.99, False)):
        shifted = [value - 0.003 + more_s * found.margin_s for value in after]
        assert compare_step_times(before, shifted).is_significant is is_significant
