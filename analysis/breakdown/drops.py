"""Drops: periods in which a value that should not fall, such as the MFU, is low."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf, nan, sqrt
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

FIT_SHARE = 0.1
"""Growth of the baseline after which its sizes are fitted again. Source: choice, for speed."""

TINY = 1e-9
"""Relative error of the arithmetic, and what makes sizes that vary only together solvable."""

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

    is_sudden: bool
    """Whether half of the depth was lost within two steps; else the value declines."""

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
    sizes: tuple[float, float]
    """FLOPs or tokens, and squared lengths; nan if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Time of a step by its sizes: a fixed part, and one that is proportional to each."""

    usual: tuple[float, float]
    """Medians; nan if one is unknown."""

    shares: tuple[float, float] = (0.0, 0.0)
    """Shares of a usual step's time that are proportional to them."""

    errors: tuple[float, float, float] = (inf, inf, 0.0)
    """Variances of the shares, and their covariance."""

    def excess(self, step: _Step) -> tuple[float, float]:
        """Return the sizes of a step over the usual ones, less 1; 0 if unknown."""
        (tokens, squares), usual = step.sizes, self.usual
        return (
            0.0 if tokens != tokens or usual[0] != usual[0] else tokens / usual[0] - 1,
            0.0 if squares != squares or usual[1] != usual[1] else squares / usual[1] - 1,
        )

    def as_usual(self, step: _Step, measure: Measure) -> float:
        """Return the value of a step as if it had the usual sizes; its own if they are unknown."""
        if self.errors[0] == inf and self.errors[1] == inf:
            return step.value
        x, y = self.excess(step)
        time = 1 + self.shares[0] * x + self.shares[1] * y
        return step.value * time / (1 + x if measure is Measure.MFU else 1.0)

    def expected(self, step: _Step, measure: Measure) -> float:
        """Return the least value of a step, relative to a usual one's.

        The time is the longest that two standard errors of the shares allow, and some shares from
        0 to 1 whose sum is 1 at most.
        """
        x, y = self.excess(step)
        if not x and not y:
            return 1.0
        of_x, of_y, of_both = self.errors
        error = inf if (x and of_x == inf) or (y and of_y == inf) else 0.0
        if not error:
            variance = (x * x * of_x if x else 0.0) + (y * y * of_y if y else 0.0)
            error = 2 * sqrt(max(variance + 2 * x * y * of_both, 0.0))
        time = 1 + self.shares[0] * x + self.shares[1] * y + error
        time = min(max(time, 1 + min(x, y, 0.0)), 1 + max(x, y, 0.0))
        return (1 + x if measure is Measure.MFU else 1.0) / time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The baseline at one step."""

    usual: float
    """Of a step of usual sizes."""

    deviation: float
    """Robust deviation of ``values``."""

    values: list[float]
    """Its steps, all as if of usual sizes."""

    num_steps: int
    """Steps of the series that it is made of, older ones included."""

    num_fitted: int
    """As many when the sizes were fitted."""

    rule: DropRule
    sizes: _Sizes
    measure: Measure

    def expected(self, step: _Step) -> float:
        """Return the least value that a step of its sizes should have."""
        return self.usual * self.sizes.expected(step, self.measure)

    @property
    def _margin(self) -> float:
        depth = self.usual * self.rule.depth_ratio
        return min(MARGIN_DEVIATIONS * self.deviation, MAX_MARGIN_RATIO * depth)

    def is_low(self, step: _Step) -> bool:
        """Return whether one step is low. From 0 nothing drops."""
        least = self.usual * (1 - self.rule.depth_ratio) + self._margin
        return self.usual > 0 and step.value <= least * self.sizes.expected(step, self.measure)

    def is_drop(self, low: list[_Step]) -> bool:
        """Return whether low steps are a drop: enough, deep enough, and beyond the noise."""
        if len(low) < self.rule.num_steps:
            return False
        root = sqrt(len(low))
        # Of the difference between the mean of the low steps and the median of the baseline.
        error = self.deviation * sqrt(1 / len(low) + MEDIAN_VARIANCE / len(self.values))
        below = self.usual * (1 - fmean(step.value / self.expected(step) for step in low))
        depth = self.usual * self.rule.depth_ratio - self._margin / root
        return below >= max(depth * (1 - 1e-12), MIN_DEVIATIONS * error)


def find_drops(
    by_step: Mapping[int, float],
    *,
    rule: DropRule | None = None,
    skipped_steps: Collection[int] = (),
    tokens_by_step: Mapping[int, float] | None = None,
    squares_by_step: Mapping[int, int] | None = None,
    measure: Measure = Measure.MFU,
) -> tuple[Drop, ...]:
    """Return the drops of a value, in step order.

    Each step is compared with the median of the newest earlier steps that belong to no drop. A
    drop never becomes part of its own baseline, so it has the same first step while the run trains
    and afterwards, however long it lasts. It exceeds the noise of the baseline: where
    sequence lengths vary, the values do. It ends when ``num_steps`` consecutive steps are above
    the threshold again. Steps that ``by_step`` does not have are skipped.

    The time of a step is a fixed part, one that is proportional to its FLOPs or tokens, and one
    that is proportional to the squared lengths of its longest rank. So a step with fewer tokens
    than the baseline's, or longer sequences, has a lower MFU by nature, and one with more takes
    longer. How much, the baseline shows if they vary; as far as it does not, any part may be fixed.

    Args:
        by_step: MFU or steps per second, by step.
        rule: Depth and length; the default rule (10 %, 3 steps) if None.
        skipped_steps: Steps that are neither compared nor part of the baseline: the warm-up, and
            steps with planned pauses.
        tokens_by_step: Tokens of each step; of an MFU better its FLOPs, of which it is the rate.
        squares_by_step: Largest sum of squared lengths of a data position in each step: the others
            wait for it. Sizes that are unknown in one step of a baseline count as equal.

    Source:
        Imbue's report on training a 70B model: a sudden drop that stays is a throttled clock, one
        low step is a checkpoint.
    """
    skipped = set(skipped_steps)
    steps = [step for step in sorted(by_step) if step not in skipped]
    sizes = tokens_by_step or {}, squares_by_step or {}
    series = [
        _Step(step, by_step[step], (_known(sizes[0].get(step)), _known(sizes[1].get(step))))
        for step in steps
    ]
    return tuple(_find_drops(series, rule or DropRule(), measure))


def _find_drops(series: list[_Step], rule: DropRule, measure: Measure) -> Iterator[Drop]:
    baseline: list[_Step] = []
    low: list[_Step] = []
    """Low steps of the drop, or of what may become one."""
    recovered: list[_Step] = []
    """Steps above the threshold since the last low step of a drop."""
    is_drop = False
    level = _level(baseline, rule, measure, None)
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
            yield _drop(low, level, before=baseline[-1], is_over=True)
            baseline.extend(recovered)
        else:
            baseline.extend(low)
            baseline.append(step)
        low.clear()
        recovered.clear()
        is_drop = False
        is_first = level is None
        level = _level(baseline, rule, measure, level)
        while is_first and level is not None and level.is_low(baseline[-1]):
            low.insert(0, baseline.pop())  # a drop began before the baseline was long enough
    if is_drop and level is not None:
        yield _drop(low, level, before=baseline[-1], is_over=False)


def _level(
    baseline: list[_Step], rule: DropRule, measure: Measure, before: _Level | None
) -> _Level | None:
    """Return the level of a baseline that has grown; its sizes are fitted now and then."""
    if len(baseline) < rule.min_baseline_steps:
        return None
    newest = baseline[-BASELINE_STEPS:]
    if before is None or len(baseline) - before.num_fitted >= FIT_SHARE * len(newest):
        sizes, num_fitted = _fit_sizes(newest, rule, measure), len(baseline)
        values = [sizes.as_usual(step, measure) for step in newest]
    else:
        sizes, num_fitted = before.sizes, before.num_fitted
        added = [sizes.as_usual(step, measure) for step in baseline[before.num_steps :]]
        values = [*before.values, *added][-BASELINE_STEPS:]
    usual = median(values)
    return _Level(
        usual=usual,
        deviation=ROBUST * median(abs(value - usual) for value in values),
        values=values,
        num_steps=len(baseline),
        num_fitted=num_fitted,
        rule=rule,
        sizes=sizes,
        measure=measure,
    )


def _known(size: float | None) -> float:
    return float(size) if size is not None and size > 0 else nan


def _fit_sizes(steps: list[_Step], rule: DropRule, measure: Measure) -> _Sizes:
    """Return the time of steps by their sizes.

    By least squares, once more without the steps that are far from the first result: a pause is no
    size. Each slope must rest on as many steps as a baseline needs.
    """
    values = [step.value for step in steps]
    if all(step.sizes == steps[0].sizes for step in steps) or min(values) <= 0:
        return _Sizes(usual=steps[0].sizes)
    table = np.array([step.sizes for step in steps])
    usual = np.median(table, axis=0)  # nan if one is
    excess = np.nan_to_num(table / usual - 1)
    varies = np.flatnonzero(excess.any(axis=0))
    ratio = 1 + excess[:, 0] if measure is Measure.MFU else np.ones(len(steps))
    time = ratio / np.array(values)
    design = np.column_stack([np.ones(len(steps)), excess[:, varies]])
    is_used = _bearing_steps(design, rule.min_baseline_steps)
    if not is_used.any():
        return _Sizes(usual=(float(usual[0]), float(usual[1])))
    level, slopes, variance = _fit_line(design[is_used], time[is_used])
    rest = np.abs(time - design @ (level, *slopes))
    deviation = ROBUST * float(np.median(rest[is_used]))
    is_used &= rest <= max(MIN_DEVIATIONS * deviation, TINY * level)
    level, slopes, variance = _fit_line(design[is_used], time[is_used])
    shares, covariance = np.zeros(2), np.diag([inf, inf])
    shares[varies] = slopes / level
    covariance[np.ix_(varies, varies)] = variance / level**2
    return _Sizes(
        usual=(float(usual[0]), float(usual[1])),
        shares=(float(shares[0]), float(shares[1])),
        errors=(float(covariance[0, 0]), float(covariance[1, 1]), float(covariance[0, 1])),
    )


def _bearing_steps(design: NDArray[np.float64], num: int) -> NDArray[np.bool_]:
    """Return the steps on which slopes may rest: none if a size has not changed often enough.

    A level may have changed for another reason together with a size, so at least ``num`` changes
    must bear on each slope. Single steps that are far larger than the others are left out, since
    the slope would be theirs.
    """
    none = np.zeros(len(design), dtype=bool)
    is_used, columns = ~none, range(1, design.shape[1])
    while columns and is_used.sum() >= num + design.shape[1]:
        used = design[is_used]
        # Values without those that equal the one before.
        excess = {k: used[np.diff(used[:, k], prepend=np.nan) != 0, k] for k in columns}
        bearing = {k: _num_bearing(each) for k, each in excess.items()}
        least = min(columns, key=bearing.__getitem__)
        if bearing[least] >= num:
            return is_used
        largest = excess[least][np.abs(excess[least] - excess[least].mean()).argmax()]
        is_used &= design[:, least] != largest
    return none


def _num_bearing(values: NDArray[np.float64]) -> float:
    """Return the number of values that bear on a slope, by their participation ratio.

    It is their number if all are as far from the mean, and 1 if one of them is far from the others.
    """
    squared = (values - values.mean()) ** 2
    total = float(squared.sum())
    return total**2 / float((squared**2).sum()) if total > TINY**2 else 0.0


def _fit_line(
    design: NDArray[np.float64], time: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Return level, slopes and the slopes' variance of a fit by least squares."""
    num_steps, num = design.shape
    inverse = np.linalg.inv(design.T @ design + TINY * np.eye(num))
    fitted = inverse @ (design.T @ time)
    freedom = sqrt(num_steps / max(num_steps - num, 1))
    deviation = freedom * ROBUST * float(np.median(np.abs(time - design @ fitted)))
    return float(fitted[0]), fitted[1:], (inverse[1:, 1:] * deviation**2).astype(np.float64)


def _drop(low: list[_Step], level: _Level, *, before: _Step, is_over: bool) -> Drop:
    value = median(step.value for step in low)
    usual = median(level.expected(step) for step in low)
    begin, end = (step.value / level.expected(step) for step in (before, low[:2][-1]))
    return Drop(
        first_step=low[0].step,
        last_step=low[-1].step,
        value=value,
        usual=usual,
        is_over=is_over,
        is_sudden=begin - end >= (1 - value / usual) / 2,
    )
