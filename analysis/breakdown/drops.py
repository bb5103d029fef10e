"""Drops: periods in which a value that should not fall, such as the MFU, is low."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

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
    """Baseline: median of the steps before the drop."""

    is_over: bool
    """Whether as many consecutive steps are above the threshold again as a drop needs."""

    @property
    def depth_ratio(self) -> float:
        """Distance below the baseline, as a share of it."""
        return 1 - self.value / self.usual


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The baseline at one step."""

    usual: float
    deviation: float
    """Robust deviation of its steps."""

    num_steps: int
    rule: DropRule

    @property
    def _margin(self) -> float:
        depth = self.usual * self.rule.depth_ratio
        return min(MARGIN_DEVIATIONS * self.deviation, MAX_MARGIN_RATIO * depth)

    def is_low(self, value: float) -> bool:
        """Return whether one step is low."""
        return value <= self.usual * (1 - self.rule.depth_ratio) + self._margin

    def is_drop(self, low: list[tuple[int, float]]) -> bool:
        """Return whether low steps are a drop: enough, deep enough, and beyond the noise."""
        if len(low) < self.rule.num_steps:
            return False
        root = sqrt(len(low))
        # Of the difference between the mean of the low steps and the median of the baseline.
        error = self.deviation * sqrt(1 / len(low) + MEDIAN_VARIANCE / self.num_steps)
        below = self.usual - fmean(value for _, value in low)
        depth = self.usual * self.rule.depth_ratio - self._margin / root
        return below >= max(depth * (1 - 1e-12), MIN_DEVIATIONS * error)


def find_drops(
    by_step: Mapping[int, float],
    *,
    rule: DropRule | None = None,
    skipped_steps: Collection[int] = (),
) -> tuple[Drop, ...]:
    """Return the drops of a value, in step order.

    Each step is compared with the median of the newest earlier steps that belong to no drop. A
    drop never becomes part of its own baseline, so it has the same first step while the run trains
    and afterwards, however long it lasts. It exceeds the noise of the baseline: where
    sequence lengths vary, the values do. It ends when ``num_steps`` consecutive steps are above
    the threshold again. Steps that ``by_step`` does not have are skipped.

    Args:
        by_step: MFU or steps per second, by step.
        rule: Depth and length; the default rule (10 %, 3 steps) if None.
        skipped_steps: Steps that are neither compared nor part of the baseline: the warm-up, and
            steps with planned pauses.

    Source:
        Imbue's report on training a 70B model: a sudden drop that stays is a throttled clock, one
        low step is a checkpoint.
    """
    skipped = set(skipped_steps)
    series = [(step, by_step[step]) for step in sorted(by_step) if step not in skipped]
    return tuple(_find_drops(series, rule or DropRule()))


def _find_drops(series: list[tuple[int, float]], rule: DropRule) -> Iterator[Drop]:
    baseline: list[float] = []
    low: list[tuple[int, float]] = []
    """Low steps of the drop, or of what may become one."""
    recovered: list[float] = []
    """Steps above the threshold since the last low step of a drop."""
    is_drop = False
    level = _level(baseline, rule)
    for step, value in series:
        if level is not None and level.is_low(value):
            low.append((step, value))
            recovered.clear()
            is_drop = is_drop or level.is_drop(low)
            continue
        if is_drop and level is not None:
            recovered.append(value)
            if len(recovered) < rule.num_steps:
                continue
            yield _drop(low, level.usual, is_over=True)
            baseline.extend(recovered)
        else:
            baseline.extend(below for _, below in low)
            baseline.append(value)
        low.clear()
        recovered.clear()
        is_drop = False
        level = _level(baseline, rule)
    if is_drop and level is not None:
        yield _drop(low, level.usual, is_over=False)


def _level(baseline: list[float], rule: DropRule) -> _Level | None:
    if len(baseline) < rule.min_baseline_steps:
        return None
    newest = baseline[-BASELINE_STEPS:]
    usual = median(newest)
    deviation = ROBUST * median(abs(value - usual) for value in newest)
    return _Level(usual=usual, deviation=deviation, num_steps=len(newest), rule=rule)


def _drop(low: list[tuple[int, float]], usual: float, *, is_over: bool) -> Drop:
    return Drop(
        first_step=low[0][0],
        last_step=low[-1][0],
        value=median(value for _, value in low),
        usual=usual,
        is_over=is_over,
    )
