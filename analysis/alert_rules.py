"""Alert rules: findings that matter, a drop of the MFU or of the speed, records that were lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from .diagnose import ends_run
from .report.report import Finding, Severity
from .report.text import format_percent, format_seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from .report.report import RunReport
    from .report.tracked_findings import TrackedFinding

MFU_DROP = "mfu-drop"
STEP_TIME_RISE = "step-time-rise"
FINDING = "finding"
LOST_RECORDS = "lost-records"
"""Names of the rules, as alerts carry them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something to alert about."""

    rule: str
    key: str
    """Identifies it among those of its rule and run; it never changes."""

    severity: Severity
    steps: tuple[int, int] | None
    """First and last step that show it so far; None if no step does."""

    is_active: bool
    """False: it is over."""

    text: str
    """One sentence."""

    finding: Finding | None
    """The finding that it is about, or that overlaps it; None if there is none."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    """Values behind the sentence, by name."""


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


def find_conditions(
    report: RunReport, tracked: Iterable[TrackedFinding], *, is_over: bool = False
) -> tuple[Condition, ...]:
    """Return all that a run gives reason to alert about, whether it is over or not.

    Args:
        report: The newest diagnosis.
        tracked: The run's findings.
        is_over: Whether the run has ended: then only what ended it is active.
    """
    found = [*_from_findings(tracked), *_from_values(report), *_from_account(report)]
    if not is_over:
        return tuple(found)
    return tuple(
        each
        if each.rule == FINDING and each.finding is not None and ends_run(each.finding)
        else replace(each, is_active=False)
        for each in found
    )


def _from_findings(tracked: Iterable[TrackedFinding]) -> Iterator[Condition]:
    for one in tracked:
        severity = one.finding.severity
        if severity not in {Severity.WARNING, Severity.CRITICAL}:
            continue
        steps = None
        if one.onset_step is not None and one.last_step is not None:
            steps = one.onset_step, one.last_step
        yield Condition(
            rule=FINDING,
            key=str(one.number),
            severity=severity,
            steps=steps,
            is_active=one.closed_ns is None,
            text=f"{one.run_id}: {one.finding.cause}: {one.finding.evidence}",
            finding=one.finding,
        )


def _from_values(report: RunReport) -> Iterator[Condition]:
    """Yield drops of the MFU, or of the steps per second if the MFU is unknown."""
    if report.mfu is not None:
        rule, by_step = MFU_DROP, report.mfu.by_step
    else:
        rule = STEP_TIME_RISE
        by_step = {step: 1 / s for step, s in report.actual_s_by_step.items() if s > 0}
    for drop in find_drops(by_step, warmup_steps=report.warmup_steps):
        steps = drop.first_step, drop.last_step
        finding = _overlapping(report, steps)
        because = (
            "no finding explains it" if finding is None else f"top finding: {finding.evidence}"
        )
        if rule == MFU_DROP:
            change = (
                f"MFU of {report.run} dropped by {format_percent(drop.depth_ratio)} in step"
                f" {drop.first_step}, from {format_percent(drop.usual, digits=1)} to"
                f" {format_percent(drop.value, digits=1)}"
            )
            numbers = {"mfu": drop.value, "median": drop.usual}
        else:
            now, usual = 1 / drop.value, 1 / drop.usual
            change = (
                f"the step time of {report.run} rose by {format_percent(now / usual - 1)} in step"
                f" {drop.first_step}, from {format_seconds(usual)} to {format_seconds(now)}"
            )
            numbers = {"step_time_s": now, "median_s": usual}
        yield Condition(
            rule=rule,
            key=str(drop.first_step),
            severity=Severity.CRITICAL,
            steps=steps,
            is_active=not drop.is_over,
            text=f"{change}; {because}",
            finding=finding,
            numbers=numbers,
        )


def _overlapping(report: RunReport, steps: tuple[int, int]) -> Finding | None:
    """Return the first finding that matters and shows in these steps."""
    first, last = steps
    for finding in report.findings:
        if finding.severity in {Severity.MINOR, Severity.NONE} or finding.steps is None:
            continue
        if finding.steps[0] <= last and finding.steps[1] >= first:
            return finding
    return None


def _from_account(report: RunReport) -> Iterator[Condition]:
    """Yield the loss of records: what is missing may hide a cause."""
    account = report.quality.account
    if not account.num_dropped:
        return
    reasons = sorted(account.dropped.items(), key=lambda item: -item[1])
    whole = "" if account.produced is None else f" of {account.produced:,}"
    yield Condition(
        rule=LOST_RECORDS,
        key="0",
        severity=Severity.WARNING,
        steps=None,
        is_active=True,
        text=(
            f"{report.run}: {account.num_dropped:,}{whole} records were lost:"
            f" {', '.join(f'{num:,} {reason}' for reason, num in reasons)}"
        ),
        finding=None,
        numbers={"num_lost": float(account.num_dropped)},
    )


def find_drops(
    by_step: Mapping[int, float],
    *,
    rule: DropRule | None = None,
    warmup_steps: Collection[int] = (),
) -> tuple[Drop, ...]:
    """Return the drops of a value, in step order.

    Each step is compared with the median of the earlier steps that belong to no drop. A drop never
    becomes part of its own baseline, so it has the same first step while the run trains and
    afterwards, however long it lasts. It ends when ``num_steps`` consecutive steps are above the
    threshold again. Steps that ``by_step`` does not have are skipped.

    Args:
        by_step: MFU or steps per second, by step.
        rule: Depth and length; the default rule (10 %, 3 steps) if None.
        warmup_steps: Steps that are neither compared nor part of the baseline.

    Source:
        Imbue's report on training a 70B model: a sudden drop that stays is a throttled clock, one
        low step is a checkpoint.
    """
    rule = rule or DropRule()
    skipped = set(warmup_steps)
    series = [(step, by_step[step]) for step in sorted(by_step) if step not in skipped]
    return tuple(_find_drops(series, rule))


def _find_drops(series: list[tuple[int, float]], rule: DropRule) -> Iterator[Drop]:
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
            yield _drop(low, level, is_over=True)
            baseline.extend(recovered)
            low.clear()
            recovered.clear()
    if len(low) >= rule.num_steps:
        yield _drop(low, median(baseline), is_over=False)


def _drop(low: list[tuple[int, float]], level: float, *, is_over: bool) -> Drop:
    return Drop(
        first_step=low[0][0],
        last_step=low[-1][0],
        value=median(value for _, value in low),
        usual=level,
        is_over=is_over,
    )
