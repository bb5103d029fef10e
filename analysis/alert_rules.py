"""Alert rules: findings that matter, a drop of the MFU or of the speed, records that were lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .breakdown.drops import find_drops
from .diagnose import ends_run
from .report.report import Finding, Severity
from .report.text import format_percent, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
    for drop in find_drops(by_step, skipped_steps={*report.warmup_steps, *report.planned_steps}):
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
