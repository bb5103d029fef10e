"""Drops: periods in which a value that should not fall, such as the MFU, is low."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import sqrt
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

BASELINE_STEPS = 100
"""Steps of the baseline, the newest. Source: choice, some minutes of training: more than a drop
needs to stand out, and few enough to follow a daily swing of the room or of the network, or a new
phase of the training."""

MIN_DEVIATIONS = 4.0
"""Robust deviations of the mean of the low steps below the baseline that make a drop. Source: as
for `slow-compute`, docs/diagnosis.md."""

MARGIN_DEVIATIONS = 2.0
"""Robust deviations by which a single low step may miss the depth: noise moves a drop of exactly
the depth above its threshold in half of the steps. The mean of the steps must reach the depth
within the same noise."""

MAX_MARGIN_RATIO = 0.5
"""Largest such margin, as a share of the depth."""

MEDIAN_VARIANCE = 1.57
"""Variance of a median over that of a mean of as many normal values: pi / 2. A short baseline is
uncertain itself. Source: formula."""

ROBUST = 1.4826
"""Factor from the median absolute deviation to the standard deviation of normal noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRule:
    """A value ``depth_ratio`` or more below its baseline for ``num_steps`` consecutive steps."""

    depth_ratio: float = 0.10
    num_steps: int = 3
    """Consecutive steps below that make a drop, and consecutive steps above that end it."""

    min_baseline_steps: int = 5
    """Steps that the baseline needs; fewer may all be warm-up."""

    def __post_init__(self) -> None:
        if not 0 < self.depth_ratio < 1:
            raise ValueError(
                f"DropRule.depth_ratio must be between 0 and 1, got {self.depth_ratio}"
            )
        for name in ("num_steps", "min_baseline_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"DropRule.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A period in which a value that should not fall is low: the MFU, or the steps per second."""

    first_step: int
    last_step: int
    """Last step below so far; the drop may continue."""

    value: float
    """Median over the drop's steps."""

    usual: float
    """Median over the drop's steps of what the steps before it had, at as many tokens."""

    is_over: bool
    """Whether as many consecutive steps are above the threshold again as a drop needs."""

    @property
    def depth_ratio(self) -> float:
        """Distance below the baseline, as a share of it."""
        return 1 - self.value / self.usual


class Measure(Enum):
    """Quantity that may drop."""

    MFU = "mfu"
    STEPS_PER_S = "steps-per-s"


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the series."""

    step: int
    value: float
    tokens: float
    """1.0 in all steps if those of one are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The baseline at one step."""

    usual: float
    """At ``tokens``."""

    deviation: float
    """Robust deviation of its steps."""

    num_steps: int
    rule: DropRule
    tokens: float
    """Median of its steps."""

    shares: tuple[float, float]
    """Range of the share of a step's time that grows with its tokens, as its steps leave it."""

    measure: Measure

    def expected(self, step: _Step) -> float:
        """Return the least value that a step with its tokens should have."""
        ratio = step.tokens / self.tokens
        longest = max(1 + share * (ratio - 1) for share in self.shares)
        return self.usual / longest * (ratio if self.measure is Measure.MFU else 1.0)

    @property
    def _margin(self) -> float:
        depth = self.usual * self.rule.depth_ratio
        return min(MARGIN_DEVIATIONS * self.deviation, MAX_MARGIN_RATIO * depth)

    def is_low(self, step: _Step) -> bool:
        """Return whether one step is low."""
        threshold = 1 - self.rule.depth_ratio + self._margin / self.usual
        return step.value <= self.expected(step) * threshold

    def is_drop(self, low: list[_Step]) -> bool:
        """Return whether low steps are a drop: enough, deep enough, and beyond the noise."""
        if len(low) < self.rule.num_steps:
            return False
        root = sqrt(len(low))
        # Of the difference between the mean of the low steps and the median of the baseline.
        error = self.deviation * sqrt(1 / len(low) + MEDIAN_VARIANCE / self.num_steps)
        below = self.usual * (1 - fmean(step.value / self.expected(step) for step in low))
        depth = self.usual * self.rule.depth_ratio - self._margin / root
        return below >= max(depth * (1 - 1e-12), MIN_DEVIATIONS * error)


def find_drops(
    by_step: Mapping[int, float],
    *,
    rule: DropRule | None = None,
    skipped_steps: Collection[int] = (),
    tokens_by_step: Mapping[int, int] | None = None,
    measure: Measure = Measure.MFU,
) -> tuple[Drop, ...]:
    """Return the drops of a value, in step order.

    Each step is compared with the median of the newest earlier steps that belong to no drop. A
    drop never becomes part of its own baseline, so it has the same first step while the run trains
    and afterwards, however long it lasts. It exceeds the noise of the baseline: where
    sequence lengths vary, the values do. It ends when ``num_steps`` consecutive steps are above
    the threshold again. Steps that ``by_step`` does not have are skipped.

    The time of a step is a fixed part and one that is proportional to its tokens. So a step with
    fewer tokens than the baseline's has a lower MFU by nature, and one with more takes longer. How
    much, the baseline shows if its tokens vary; as far as it does not, any part may be fixed.

    Args:
        by_step: MFU or steps per second, by step.
        rule: Depth and length; the default rule (10 %, 3 steps) if None.
        skipped_steps: Steps that are neither compared nor part of the baseline: the warm-up, and
            steps with planned pauses.
        tokens_by_step: Tokens of each step; those of all steps count as equal if one is unknown.
        measure: Quantity of the values.

    Source:
        Imbue's report on training a 70B model: a sudden drop that stays is a throttled clock, one
        low step is a checkpoint.
    """
    skipped = set(skipped_steps)
    steps = [step for step in sorted(by_step) if step not in skipped]
    tokens = tokens_by_step or {}
    are_known = all(tokens.get(step, 0) > 0 for step in steps)
    series = [_Step(step, by_step[step], tokens[step] if are_known else 1.0) for step in steps]
    return tuple(_find_drops(series, rule or DropRule(), measure))


def _find_drops(series: list[_Step], rule: DropRule, measure: Measure) -> Iterator[Drop]:
    baseline: list[_Step] = []
    low: list[_Step] = []
    """Low steps of the drop, or of what may become one."""
    recovered: list[_Step] = []
    """Steps above the threshold since the last low step of a drop."""
    is_drop = False
    level = _level(baseline, rule, measure)
    for step in series:
        if level is not None and level.is_low(step):
            low.append(step)
            recovered.clear()
            is_drop = is_drop or level.is_drop(low)
            continue
        if is_drop and level is not None:
            recovered.append(step)
            if len(recovered) < rule.num_steps:
                continue
            yield _drop(low, level, is_over=True)
            baseline.extend(recovered)
        else:
            baseline.extend(low)
            baseline.append(step)
        low.clear()
        recovered.clear()
        is_drop = False
        level = _level(baseline, rule, measure)
    if is_drop and level is not None:
        yield _drop(low, level, is_over=False)


def _level(baseline: list[_Step], rule: DropRule, measure: Measure) -> _Level | None:
    if len(baseline) < rule.min_baseline_steps:
        return None
    newest = baseline[-BASELINE_STEPS:]
    tokens = median(step.tokens for step in newest)
    values = [step.value for step in newest]
    shares = 0.0, 1.0
    if any(step.tokens != tokens for step in newest) and min(values) > 0:
        ratio = np.array([step.tokens / tokens for step in newest])
        per_token = ratio if measure is Measure.MFU else 1.0
        share, shares = _fit_share(ratio - 1, per_token / np.array(values))
        values = (np.array(values) * (1 + share * (ratio - 1)) / per_token).tolist()
    usual = median(values)
    return _Level(
        usual=usual,
        deviation=ROBUST * median(abs(value - usual) for value in values),
        num_steps=len(newest),
        rule=rule,
        tokens=tokens,
        shares=shares,
        measure=measure,
    )


def _fit_share(
    excess: NDArray[np.float64], time: NDArray[np.float64]
) -> tuple[float, tuple[float, float]]:
    """Return the share of a step's time that grows with its tokens, and its range, in 0..1.

    A line by least squares, once more without the steps that are far from the first one: a pause is
    no growth. The range is two standard errors to each side.

    Args:
        excess: Tokens of each step over their median, less 1.
        time: Time of each step, in any unit.
    """
    is_used = np.ones(len(excess), dtype=bool)
    share, error = 0.5, np.inf
    for _ in range(2):
        x, y = excess[is_used], time[is_used]
        spread = float(((x - x.mean()) ** 2).sum())
        if not spread:
            break
        slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
        rest = time - slope * excess
        level = float(np.median(rest[is_used]))
        deviation = ROBUST * float(np.median(np.abs(rest[is_used] - level)))
        if level <= 0:
            break
        share, error = slope / level, deviation / level / sqrt(spread)
        is_used = np.abs(rest - level) <= max(MIN_DEVIATIONS * deviation, 1e-9 * level)
    low, middle, high = np.clip([share - 2 * error, share, share + 2 * error], 0.0, 1.0)
    return float(middle), (float(low), float(high))


def _drop(low: list[_Step], level: _Level, *, is_over: bool) -> Drop:
    return Drop(
        first_step=low[0].step,
        last_step=low[-1].step,
        value=median(step.value for step in low),
        usual=median(level.expected(step) for step in low),
        is_over=is_over,
    )
