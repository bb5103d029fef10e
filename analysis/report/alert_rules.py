"""Alert rules: MFU that stays below the run's own baseline."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .report import Mfu

MFU_DROP = "mfu-drop"
"""Name of the rule, as alerts carry it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MfuDropRule:
    """MFU at least ``depth_ratio`` below the baseline for ``num_steps`` consecutive steps."""

    depth_ratio: float = 0.10
    num_steps: int = 3
    """Consecutive steps below that make a drop, and consecutive steps above that end it."""

    min_baseline_steps: int = 5
    """Steps that the baseline needs; fewer may all be warm-up."""

    def __post_init__(self) -> None:
        if not 0 < self.depth_ratio < 1:
            raise ValueError(
                f"MfuDropRule.depth_ratio must be between 0 and 1, got {self.depth_ratio}"
            )
        for name in ("num_steps", "min_baseline_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"MfuDropRule.{name} must be at least 1, got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MfuDrop:
    """A period of low MFU."""

    first_step: int
    last_step: int
    """Last step below so far; the drop may continue."""

    mfu: float
    """Median over the drop's steps, 0..1."""

    median: float
    """Baseline: median of the steps before the drop, 0..1."""

    @property
    def depth_ratio(self) -> float:
        """Distance below the baseline, as a share of it."""
        return 1 - self.mfu / self.median


def mfu_drops(
    mfu: Mfu, *, rule: MfuDropRule | None = None, warmup_steps: Collection[int] = ()
) -> tuple[MfuDrop, ...]:
    """Return the drops of a run's MFU, in step order.

    Each step is compared with the median of the earlier steps that belong to no drop. A drop never
    becomes part of its own baseline, so it has the same first step while the run trains and
    afterwards, however long it lasts. It ends when ``num_steps`` consecutive steps are above the
    threshold again. Steps that ``mfu`` does not have are skipped.

    Args:
        mfu: MFU by step.
        rule: Depth and length; the default rule (10 %, 3 steps) if None.
        warmup_steps: Steps that are neither compared nor part of the baseline.

    Source:
        Imbue's report on training a 70B model: a sudden drop that stays is a throttled clock, one
        low step is a checkpoint.
    """
    rule = rule or MfuDropRule()
    skipped = set(warmup_steps)
    series = [(step, mfu.by_step[step]) for step in sorted(mfu.by_step) if step not in skipped]
    return tuple(_find_drops(series, rule))


def _find_drops(series: list[tuple[int, float]], rule: MfuDropRule) -> Iterator[MfuDrop]:
    baseline: list[float] = []
    low: list[tuple[int, float]] = []
    """Low steps of the drop, or of what may become one."""
    recovered: list[float] = []
    """Steps above the threshold since the last low step of a drop."""
    for step, value in series:
        level = median(baseline) if len(baseline) >= rule.min_baseline_steps else None
        if level is not None and value <= level * (1 - rule.depth_ratio):
            low.append((step, value))
            recovered.clear()
            continue
        if len(low) < rule.num_steps:
            baseline.extend(below for _, below in low)
            baseline.append(value)
            low.clear()
            continue
        recovered.append(value)
        if len(recovered) == rule.num_steps and level is not None:
            yield _drop(low, level)
            baseline.extend(recovered)
            low.clear()
            recovered.clear()
    if len(low) >= rule.num_steps:
        yield _drop(low, median(baseline))


def _drop(low: list[tuple[int, float]], level: float) -> MfuDrop:
    return MfuDrop(
        first_step=low[0][0],
        last_step=low[-1][0],
        mfu=median(value for _, value in low),
        median=level,
    )
