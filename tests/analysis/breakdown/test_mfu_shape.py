from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.breakdown.mfu_shape import classify_mfu
from rankscope.analysis.report.report import MfuShape, MfuShapeName

if TYPE_CHECKING:
    from collections.abc import Sequence

STEADY = [0.50, 0.505] * 20
NOISE = np.random.default_rng(2).normal(0.5, 0.04, 40).tolist()
DECLINE = [round(41.1 * 0.97**step, 1) / 100 for step in range(16)]
SAG = [0.50 - 0.002 * step for step in range(40)]


def shape_of(
    values: Sequence[float], *, usual: float | None = None, restarts: Sequence[int] = ()
) -> MfuShape:
    shape = classify_mfu(dict(enumerate(values)), usual=usual, restart_steps=restarts)
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("values", "usual", "restarts", "name"),
    [
        ([0.10] * 40, 0.50, (), MfuShapeName.LOW_FROM_START),
        ([0.43] * 40, 0.50, (), MfuShapeName.STEADY_LOW),
        ([0.3 if k % 8 == 7 else 0.5 for k in range(40)], None, (), MfuShapeName.REGULAR_DIPS),
        ([0.3 if k in {9, 30} else 0.5 for k in range(40)], None, (), MfuShapeName.RARE_DIPS),
        # An evaluation of three steps.
        ([0.3 if k % 10 < 3 else 0.5 for k in range(5, 45)], None, (), MfuShapeName.REGULAR_DIPS),
        # A drop that is over is none that stays, and a decline of the second half is not sudden.
        ([*[0.5] * 20, *[0.4] * 3, *[0.5] * 20], None, (), MfuShapeName.RARE_DIPS),
        ([*[0.411] * 16, *DECLINE], None, (), MfuShapeName.GROWING_SAG),
        (SAG, None, (), MfuShapeName.GROWING_SAG),
        ([*SAG, *SAG[:10]], None, (40,), MfuShapeName.GROWING_SAG),
        ([*STEADY[:30], *[0.38] * 10], None, (), MfuShapeName.SUDDEN_DROP),
        (NOISE, None, (), MfuShapeName.NOISY),
        (STEADY, None, (), MfuShapeName.STEADY),
        (STEADY, 0.50, (), MfuShapeName.STEADY),
    ],
)
def test_each_shape_is_named(
    values: Sequence[float], usual: float | None, restarts: Sequence[int], name: MfuShapeName
) -> None:
    assert shape_of(values, usual=usual, restarts=restarts).name is name


def test_the_text_says_where_and_how_much() -> None:
    shape = shape_of([*[0.5] * 20, *[0.4] * 5])

    assert (shape.steps, shape.text) == ((20, 24), "dropped by 20 % in step 20 and stays low")
    assert shape.causes == "a throttled clock: heat or power"


def test_a_steady_decline_is_no_sudden_drop() -> None:
    # 41.1, 39.9, 38.7, ... 26.0 %: quarters of 39.3, 34.7, 30.8 and 27.3 %.
    shape = shape_of(DECLINE)

    assert (shape.name, shape.steps) == (MfuShapeName.GROWING_SAG, (0, 15))
    assert shape.text == "sags by 31 % from step 0 to 15"


@pytest.mark.parametrize("onset", [3, 4, 5, 6])
@pytest.mark.parametrize("half", [1.0, 0.92])
def test_the_onset_of_an_early_drop_is_reported_as_it_is(onset: int, half: float) -> None:
    # Below 92 % in its first step: the fault began within it.
    before = [0.417, 0.416, 0.417, 0.416, 0.417, 0.416][:onset]
    values = [*before, *([0.417 * half] if half < 1 else []), *[0.347] * 16]

    shape = shape_of(values)

    assert shape.name is MfuShapeName.SUDDEN_DROP
    assert shape.steps[0] == onset + (half < 1)


def test_a_short_curve_has_no_shape() -> None:
    assert classify_mfu(dict(enumerate([0.5] * 15))) is None
    assert classify_mfu({}) is None
    assert classify_mfu(dict(enumerate([0.0] * 20))) is None
