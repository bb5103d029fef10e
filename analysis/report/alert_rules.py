"""When a run deserves an alert: MFU that stays below the run's own median."""

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
    """MFU at least ``depth_ratio`` below the median for ``num_steps`` steps in a row."""

    depth_ratio: float = 0.10
    num_steps: int = 3
    """Steps in a row below that make a drop, and steps in a row above that end it."""

    min_baseline_steps: int = 5
    """Steps that the median needs: fewer don't tell a run's own level from its start-up."""

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
    """One time of low MFU."""

    first_step: int
    last_step: int
    """Last step below so far; the drop may go on."""

    mfu: float
    """Median over the drop's steps, 0..1."""

    median: float
    """The run's own median before the drop, 0..1."""

    @property
    def depth_ratio(self) -> float:
        """How far below the median, as a share of it."""
        return 1 - self.mfu / self.median


def mfu_drops(
    mfu: Mfu, *, rule: MfuDropRule | None = None, warmup_steps: Collection[int] = ()
) -> tuple[MfuDrop, ...]:
    """Return the drops of a run's MFU in step order.

    Steps are judged in order, each against the median of the steps before it
    that belong to no drop. So a drop is found at the same first step while the
    run trains and afterwards, however long it lasts: its own steps never pull
    the median down to themselves. A drop lasts until ``num_steps`` steps in a
    row are back above; steps that are left out of ``mfu`` are passed over.

    Args:
        mfu: MFU by step.
        rule: Depth and length; the standing rule (10 %, 3 steps) where None.
        warmup_steps: Start-up steps, neither judged nor part of the median.

    Source:
        The shapes of MFU in Imbue's report on training a 70B model: a sudden
        drop that stays is a throttled clock, a one-step dip a checkpoint.
    """
    standing = rule or MfuDropRule()
    skipped = set(warmup_steps)
    series = [(step, mfu.by_step[step]) for step in sorted(mfu.by_step) if step not in skipped]
    return tuple(_walk(series, standing))


def _walk(series: list[tuple[int, float]], rule: MfuDropRule) -> Iterator[MfuDrop]:
    baseline: list[float] = []
    low: list[tuple[int, float]] = []
    """Steps below in the drop, or in what may become one."""
    recovered: list[float] = []
    """Steps back above since the last low one of a standing drop."""
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
