from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.breakdown.drops import Drop, DropRule, Measure, find_drops

if TYPE_CHECKING:
    from collections.abc import Iterable


def by_step(values: Iterable[float]) -> dict[int, float]:
    return dict(enumerate(values))


def steps_of(drops: Iterable[Drop]) -> list[tuple[int, int]]:
    return [(drop.first_step, drop.last_step) for drop in drops]


HEALTHY = [0.50] * 10


def test_three_steps_a_tenth_below_the_median_are_a_drop() -> None:
    (drop,) = find_drops(by_step([*HEALTHY, 0.40, 0.39, 0.41]))

    assert (drop.first_step, drop.last_step) == (10, 12)
    assert drop.usual == 0.50
    assert drop.value == 0.40
    assert drop.depth_ratio == pytest.approx(0.2)


FLAPPING = [*HEALTHY, *[0.30] * 3, 0.50, 0.50, *[0.30] * 2]
WITH_NOISE = [0.50 + 0.005 * (-1) ** step for step in range(20)]


@pytest.mark.parametrize(
    ("values", "drops"),
    [
        pytest.param([*HEALTHY, 0.30, 0.30, 0.50], [], id="only-two-steps"),
        pytest.param([*HEALTHY, *[0.46] * 9], [], id="less-than-a-tenth"),
        pytest.param([*HEALTHY, *[0.45] * 3], [(10, 12)], id="exactly-a-tenth"),
        pytest.param([*WITH_NOISE, 0.455, 0.445, 0.450], [(20, 22)], id="a-tenth-within-noise"),
        # In a median of all steps, the 40 low ones would be the baseline.
        pytest.param([*HEALTHY, *[0.30] * 40], [(10, 49)], id="longer-than-the-healthy-time"),
        pytest.param(FLAPPING, [(10, 16)], id="two-steps-above-end-no-drop"),
        pytest.param([*FLAPPING, *[0.50] * 3, 0.30], [(10, 16)], id="three-steps-above-end-it"),
        pytest.param(
            [*HEALTHY, *[0.30] * 3, *[0.50] * 3, *[0.35] * 3],
            [(10, 12), (16, 18)],
            id="another-one-after-a-recovery",
        ),
        pytest.param([*[0.50] * 4, 0.30] * 10, [], id="single-steps-as-of-checkpoints"),
        pytest.param([0.50] * 2 + [0.10] * 8, [], id="no-baseline"),
    ],
)
def test_a_drop_is_as_deep_and_long_as_the_rule_says(
    values: list[float], drops: list[tuple[int, int]]
) -> None:
    assert steps_of(find_drops(by_step(values))) == drops


def test_warm_up_steps_are_neither_compared_nor_part_of_the_baseline() -> None:
    # The warm-up is twice as fast here: as part of the baseline it would make a drop.
    values = [0.90] * 5 + [0.50] * 8

    assert steps_of(find_drops(by_step(values))) == [(5, 12)]
    assert find_drops(by_step(values), skipped_steps=range(5)) == ()


def test_missing_steps_are_skipped() -> None:
    known = {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5, 9: 0.5, 12: 0.3, 15: 0.3, 16: 0.3}

    assert steps_of(find_drops(known)) == [(12, 16)]


def test_a_baseline_follows_a_daily_swing() -> None:
    # Down by 20 % over 400 steps, and up again: each step is within 3 % of the steps before it.
    swing = [0.50 - 0.10 * (1 - abs(step - 400) / 400) for step in range(800)]

    assert find_drops(by_step(swing)) == ()
    assert steps_of(find_drops(by_step([*swing[:400], *[0.36] * 3]))) == [(400, 402)]


def test_noise_as_of_varying_sequence_lengths_is_no_drop_but_a_deeper_fall_is() -> None:
    noise = np.random.default_rng(3).normal(0.50, 0.05, 400).tolist()

    assert find_drops(by_step(noise)) == ()
    (drop,) = find_drops(by_step([*noise, 0.35, 0.36, 0.33]))
    assert drop.first_step == 400


def test_planned_steps_make_no_drop() -> None:
    values = [*HEALTHY, 0.2, 0.2, 0.2, *HEALTHY]

    assert steps_of(find_drops(by_step(values))) == [(10, 12)]
    assert find_drops(by_step(values), skipped_steps=(10, 11, 12)) == ()


def test_a_rule_sets_depth_and_length() -> None:
    rule = DropRule(depth_ratio=0.3, num_steps=2)
    values = [*HEALTHY, 0.40, 0.40, 0.50, 0.30, 0.30]

    assert steps_of(find_drops(by_step(values), rule=rule)) == [(13, 14)]


@pytest.mark.parametrize(
    "wrong",
    [{"depth_ratio": 0.0}, {"depth_ratio": 1.0}, {"num_steps": 0}, {"min_baseline_steps": 0}],
)
def test_an_impossible_rule_is_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DropRule(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def seconds_of(tokens: Iterable[int], *, fixed_s: float = 0.3) -> list[float]:
    """Return step times of which a part is fixed and the rest is 1 s for 1000 tokens."""
    return [fixed_s + num / 1000 for num in tokens]


def mfu_of(tokens: Iterable[int], seconds: Iterable[float]) -> dict[int, float]:
    return by_step(num / 2000 / s for num, s in zip(tokens, seconds, strict=True))


def test_steps_with_fewer_tokens_have_a_lower_mfu_and_no_drop() -> None:
    # The batch is halved from step 20 on: 0.3 s of 0.8 s are fixed, before of 1.3 s.
    tokens = [1000] * 20 + [500] * 20
    mfu = mfu_of(tokens, seconds_of(tokens))

    assert mfu[20] < 0.9 * mfu[19]
    assert find_drops(mfu, tokens_by_step=by_step(tokens)) == ()


def test_a_step_with_fewer_tokens_that_takes_longer_is_low() -> None:
    # The time should be between 0.65 s, if it follows the tokens, and 1.3 s, if it is fixed.
    tokens = [1000] * 20 + [500] * 3
    seconds = [*seconds_of(tokens[:20]), 1.5, 1.5, 1.5]

    (drop,) = find_drops(mfu_of(tokens, seconds), tokens_by_step=by_step(tokens))

    assert (drop.first_step, drop.last_step) == (20, 22)
    assert drop.depth_ratio == pytest.approx(1 - 1.3 / 1.5)


def test_a_larger_batch_takes_longer_and_is_no_drop_of_the_speed() -> None:
    tokens = [1000] * 20 + [2000] * 20
    speed = by_step(1 / s for s in seconds_of(tokens))

    assert steps_of(find_drops(speed)) == [(20, 39)]
    assert find_drops(speed, tokens_by_step=by_step(tokens), measure=Measure.STEPS_PER_S) == ()


def test_where_the_tokens_vary_the_baseline_shows_what_fewer_of_them_cost() -> None:
    # Step 40 has a batch as it was before, and takes 15 % longer than such a step did.
    tokens = [600, 800, 1000, 700, 1100] * 8 + [600, 600, 600]
    seconds = seconds_of(tokens)
    known = by_step(tokens)

    assert find_drops(mfu_of(tokens, seconds), tokens_by_step=known) == ()
    slow = [*seconds[:40], *(1.18 * s for s in seconds[40:])]
    (drop,) = find_drops(mfu_of(tokens, slow), tokens_by_step=known)
    assert (drop.first_step, drop.last_step) == (40, 42)
    assert drop.depth_ratio == pytest.approx(1 - 1 / 1.18, abs=0.02)


def test_longer_sequences_take_longer_and_are_no_drop() -> None:
    # Half of a usual step's time is attention; from step 30 on, sequences are 1.5 times as long.
    length = [1000, 1050, 900, 1100, 950] * 6 + [1500] * 10
    squares = [1000 * num for num in length]
    seconds = [0.5 + num / 2000 for num in length]
    tokens = by_step([1000] * 40)
    known = dict(enumerate(squares))

    assert steps_of(find_drops(mfu_of([1000] * 40, seconds), tokens_by_step=tokens)) == [(30, 39)]
    mfu = mfu_of([1000] * 40, seconds)
    assert find_drops(mfu, tokens_by_step=tokens, squares_by_step=known) == ()
    slow = mfu_of([1000] * 40, [*seconds[:30], *(1.2 * s for s in seconds[30:])])
    (drop,) = find_drops(slow, tokens_by_step=tokens, squares_by_step=known)
    assert (drop.first_step, drop.last_step) == (30, 39)
    assert drop.depth_ratio == pytest.approx(1 - 1 / 1.2, abs=0.01)


def test_one_step_with_another_batch_does_not_show_what_a_batch_costs() -> None:
    # A fifth of the first large batch's time was saved by chance; the next ones take their time.
    tokens = [500, 500, 500, 500, 500, 500, 500, 500, 1500, 1500, 1500, 1500, 1500]
    seconds = seconds_of(tokens)
    seconds[8] *= 0.8

    assert find_drops(mfu_of(tokens, seconds), tokens_by_step=by_step(tokens)) == ()


def test_a_level_that_changed_with_the_batch_is_not_taken_for_what_a_batch_costs() -> None:
    # The machines became 4 % slower when the batch became 5 % smaller; later it grows by 24 %.
    tokens = [1000] * 10 + [950] * 10 + [1240] * 10
    slowness = [1.0] * 10 + [1.04] * 20
    seconds = [slow * num / 1000 for slow, num in zip(slowness, tokens, strict=True)]

    assert find_drops(mfu_of(tokens, seconds), tokens_by_step=by_step(tokens)) == ()


def test_tokens_that_are_unknown_in_one_step_are_left_out_of_all() -> None:
    tokens = [1000] * 20 + [500] * 3
    known = {**by_step(tokens), 4: 0}

    assert steps_of(find_drops(mfu_of(tokens, seconds_of(tokens)), tokens_by_step=known)) == [
        (20, 22)
    ]


@given(
    st.lists(st.integers(100, 10_000), min_size=1, max_size=60),
    st.floats(0.0, 5.0),
)
def test_no_batch_is_a_drop_if_each_step_takes_its_fixed_time_and_that_of_its_tokens(
    tokens: list[int], fixed_s: float
) -> None:
    seconds = seconds_of(tokens, fixed_s=fixed_s)
    known = by_step(tokens)
    speed = by_step(1 / s for s in seconds)

    assert find_drops(mfu_of(tokens, seconds), tokens_by_step=known) == ()
    assert find_drops(speed, tokens_by_step=known, measure=Measure.STEPS_PER_S) == ()


@given(st.lists(st.floats(0.05, 0.95), max_size=60))
def test_a_drop_found_while_training_keeps_its_first_step(values: list[float]) -> None:
    if not values:
        return
    final = {drop.first_step for drop in find_drops(by_step(values))}

    for num_steps in range(1, len(values)):
        early = find_drops(by_step(values[:num_steps]))
        assert {drop.first_step for drop in early} <= final


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=60))
def test_drops_are_separate_and_as_long_and_deep_as_the_rule_says(values: list[float]) -> None:
    drops = find_drops(by_step(values))

    for earlier, later in pairwise(drops):
        assert later.first_step > earlier.last_step + 3
    for drop in drops:
        assert drop.last_step - drop.first_step >= 2
        assert drop.depth_ratio > 0
