"""Alert rules: findings that matter, a drop of the MFU or of the speed, records that were lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from .breakdown.drops import DropRule, Measure, find_drops
from .report.report import Finding, Severity
from .report.text import format_duration, format_percent, format_price, format_seconds
from .severity import ends_run, is_of_the_work
from .statistics.noise import lower_half_deviation
from .statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .breakdown.drops import Drop
    from .report.report import RunReport
    from .report.tracked_findings import TrackedFinding

FINDING = "finding"
MFU_DROP = "mfu-drop"
STEP_TIME_RISE = "step-time-rise"
DROPS = frozenset({MFU_DROP, STEP_TIME_RISE})
LOST_RECORDS = "lost-records"
CLOCK_ERROR = "clock-error"
SILENT_RANK = "silent-rank"
RDMA_TRAFFIC = "rdma-traffic"
LOSS = "loss"
COLLECTOR_BEHIND = "collector-behind"
ANALYSIS_BEHIND = "analysis-behind"
BAD_HOST = "bad-host"
"""Names of the rules, as alerts and the configuration carry them."""

UNEXPLAINED = "no finding explains it"
"""End of the text of a drop that was seen before the finding that explains it, if there is one."""

MIN_S = 0.2
"""Time that a finding or a drop must last to alert. Source: choice: in steps of milliseconds noise
lasts three steps, and steps of 70 ms and more still alert after three."""

MIN_UNEXPLAINED_S = 5.0
"""The same for a drop that no finding explains. Source: choice, two analyses of a running job; the
machine's own pauses are shorter."""

HOLD_S = 10.0
"""Time for which a finding must be over before its alert is. Source: choice, several analyses."""

ACTIONS = {
    MFU_DROP: "open the step on the timeline and compare it with the one before the drop; if no"
    " finding explains it, look at the clocks and the power of the devices",
    STEP_TIME_RISE: "open the step on the timeline and compare it with the one before the rise",
    LOST_RECORDS: "see docs/tracer.md: give the spool more room, record fewer levels, or sample",
    CLOCK_ERROR: "see docs/clocks.md: is the path between agent and collector congested?",
    SILENT_RANK: "log in to the host: does the process live, does the agent run and reach the"
    " collector?",
    RDMA_TRAFFIC: "look at the host's ports (`ibstat`, `rdma statistic`) and its samples",
    LOSS: "stop or roll back to the last checkpoint before the step; look at its data and at the"
    " gradient norm",
    COLLECTOR_BEHIND: "look at the agents' and the collector's log: is the store slow, the disk"
    " full, a token expired?",
    ANALYSIS_BEHIND: "look at the server's log and its processors; diagnoses and alerts are late",
    BAD_HOST: "keep jobs from it (`rankscope hosts exclude`); once it is repaired, run `rankscope"
    " doctor --active` there",
}
"""What to do, by rule, if no finding explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """Settings that all rules have."""

    enabled: bool = True
    severity: Severity | None = None
    """Severity of its alerts; None: the rule's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSettings(RuleSettings):
    """`DropRule` as a rule: MFU, or the steps per second where the MFU is unknown."""

    depth_ratio: float = 0.10
    num_steps: int = 3
    min_baseline_steps: int = 5

    def __post_init__(self) -> None:
        self.rule()

    def rule(self) -> DropRule:
        """Return the rule.

        Raises:
            ValueError: A value is out of its range.
        """
        return DropRule(
            depth_ratio=self.depth_ratio,
            num_steps=self.num_steps,
            min_baseline_steps=self.min_baseline_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRecordsSettings(RuleSettings):
    """Lost records."""

    ratio: float = 0.0
    """Share of the produced records above which it alerts. 0: any loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockErrorSettings(RuleSettings):
    """Error of the clocks between hosts."""

    step_ratio: float = 0.01
    """Share of the step time. Source: a tenth of the 10 % of a step for which a finding is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelaySettings(RuleSettings):
    """A state that lasts too long."""

    after_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSettings(RuleSettings):
    """RDMA traffic of a host that differs from that of the other hosts."""

    ratio: float = 0.5
    """Change against its own baseline, beyond that of the other hosts. Source: choice, far above
    what routing changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings(RuleSettings):
    """A loss that is no number, or that jumps."""

    ratio: float = 0.5
    """Rise above the median of the 20 steps before. Source: choice, half as much again."""

    deviations: float = 10.0
    """Robust deviations of these steps that it must exceed as well."""

    num_steps: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BadHostSettings(RuleSettings):
    """Hosts whose checks report errors, or that findings of several runs name."""

    num_runs: int = 3
    """Runs whose findings name it. Source: choice. In a job of few hosts two runs name the same one
    by chance; about 3 % of machines fail per week, and the same ones again (Imbue)."""

    def __post_init__(self) -> None:
        if self.num_runs < 1:
            raise ValueError("num_runs must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRules:
    """All rules with their thresholds. The defaults need no configuration."""

    finding: RuleSettings = RuleSettings()
    mfu_drop: DropSettings = DropSettings()
    step_time_rise: DropSettings = DropSettings()
    lost_records: LostRecordsSettings = LostRecordsSettings()
    clock_error: ClockErrorSettings = ClockErrorSettings()
    silent_rank: DelaySettings = DelaySettings(after_s=30.0)
    """Twice `liveness.SILENT_NS`, from which on a page shows the rank as silent."""

    rdma_traffic: TrafficSettings = TrafficSettings()
    loss: LossSettings = LossSettings()
    collector_behind: DelaySettings = DelaySettings(after_s=60.0)
    analysis_behind: DelaySettings = DelaySettings(after_s=120.0)
    bad_host: BadHostSettings = BadHostSettings()

    def of(self, rule: str) -> RuleSettings:
        """Return the settings of a rule by its name."""
        settings: RuleSettings = getattr(self, rule.replace("-", "_"))
        return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something to alert about."""

    rule: str
    key: str
    """Identifies it among those of its rule and run; it never changes."""

    severity: Severity
    text: str
    """One sentence."""

    steps: tuple[int, int] | None = None
    """First and last step that show it so far; None if no step does."""

    is_active: bool = True
    """False: it is over."""

    finding: Finding | None = None
    """The finding that it is about, or that explains it; None if there is none."""

    number: int | None = None
    """Number of that finding in the run; None if it is not tracked."""

    ranks: tuple[int, ...] = ()
    """Ranks at fault; empty if none is named."""

    hosts: tuple[str, ...] = ()
    """Hosts at fault, if they are known without the ranks."""

    cost: str = ""
    """What it costs, in words; "" if unknown."""

    hold_s: float = 0.0
    """Time for which it must be gone before it is over. A state that was measured once a second
    may flap; what was measured on steps has its hysteresis in steps."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    """Values behind the sentence, by name."""

    @property
    def action(self) -> str:
        """Next step for a person; that about a finding is of `report.advice`."""
        return "" if self.finding is not None else ACTIONS.get(self.rule, "")


def find_conditions(
    report: RunReport,
    tracked: Iterable[TrackedFinding],
    *,
    rules: AlertRules | None = None,
    is_over: bool = False,
) -> tuple[Condition, ...]:
    """Return all that a run gives reason to alert about, whether it is over or not.

    Args:
        is_over: Whether the run has ended: then only what ended it is active.
    """
    rules, tracked = rules or AlertRules(), tuple(tracked)
    conditions = [
        *_from_values(report, tracked, rules),
        *_from_findings(report, tracked),
        *_from_quality(report, rules),
    ]
    if is_over:
        conditions = [
            condition
            if condition.rule == FINDING
            and condition.finding is not None
            and ends_run(condition.finding)
            else replace(condition, is_active=False)
            for condition in conditions
        ]
    return apply_settings(conditions, rules)


def find_held(report: RunReport, tracked: Iterable[TrackedFinding]) -> frozenset[int]:
    """Return the numbers of the findings whose alerts stay active: open ones, and those of late.

    A finding that noise hides for a moment, or that becomes minor while it is open, ends no alert.
    """
    left_s, late = HOLD_S, -1
    for step, seconds in reversed(report.actual_s_by_step.items()):
        left_s -= seconds
        if left_s <= 0:
            late = step
            break
    return frozenset(
        finding.number
        for finding in tracked
        if finding.closed_ns is None
        or (finding.last_step is not None and finding.last_step >= late)
    )


def _seconds(report: RunReport, first: int, last: int) -> list[float]:
    """Return the times of the steps from one to another, as far as they are known."""
    seconds = report.actual_s_by_step
    return [seconds[step] for step in range(first, last + 1) if step in seconds]


def apply_settings(conditions: Iterable[Condition], rules: AlertRules) -> tuple[Condition, ...]:
    """Return the conditions of the enabled rules, with the severity that is configured."""
    return tuple(
        replace(condition, severity=rules.of(condition.rule).severity or condition.severity)
        for condition in conditions
        if rules.of(condition.rule).enabled
    )


def _from_findings(report: RunReport, tracked: Iterable[TrackedFinding]) -> Iterator[Condition]:
    for item in tracked:
        severity = item.finding.severity
        if severity not in {Severity.WARNING, Severity.CRITICAL}:
            continue
        if is_of_the_work(item.finding) and not _surely_costs(item.finding, report):
            continue
        steps = None
        if item.onset_step is not None and item.last_step is not None:
            steps = item.onset_step, item.last_step
            is_measured = item.closed_ns is None and item.finding.saved_s is not None
            if is_measured and sum(_seconds(report, *steps)) < MIN_S:
                continue
        yield Condition(
            rule=FINDING,
            key=str(item.number),
            severity=severity,
            steps=steps,
            is_active=item.closed_ns is None,
            text=f"{item.run_id}: {item.finding.cause}: {item.finding.evidence}",
            finding=item.finding,
            number=item.number,
            ranks=item.finding.ranks,
            cost=_cost(item.finding, report),
        )


def _surely_costs(finding: Finding, report: RunReport) -> bool:
    """Return whether a finding of the work costs so much that it is critical, chance left out.

    It is in all steps alike, so nothing began. What it costs is a mean over the steps seen so far,
    of which the lengths that they happened to have are a sample.
    """
    seconds = np.array(list(report.actual_s_by_step.values()))
    if finding.severity is not Severity.CRITICAL or finding.saved_s is None or not len(seconds):
        return False
    error_s = 2.0 * lower_half_deviation(seconds) / sqrt(len(seconds))
    return finding.saved_s - error_s >= THRESHOLDS.critical_share * float(seconds.mean())


def _cost(finding: Finding, report: RunReport) -> str:
    """Return what a finding costs in each step, in words; "" if it is unknown."""
    price = report.price(finding)
    if price is None or price.seconds <= 0:
        return ""
    return format_price(price.seconds, price.share, since=price.since)


def _from_values(
    report: RunReport, tracked: Sequence[TrackedFinding], rules: AlertRules
) -> Iterator[Condition]:
    """Yield drops of the MFU, or of the steps per second if the MFU is unknown."""
    tokens: Mapping[int, float]
    if report.mfu is not None:
        rule, by_step, tokens = MFU_DROP, report.mfu.by_step, report.mfu.flops_by_step
        settings, measure = rules.mfu_drop, Measure.MFU
    else:
        rule, tokens = STEP_TIME_RISE, report.tokens_by_step
        settings, measure = rules.step_time_rise, Measure.STEPS_PER_S
        by_step = {step: 1 / s for step, s in report.actual_s_by_step.items() if s > 0}
    skipped = {*report.warmup_steps, *report.planned_steps}
    for drop in find_drops(
        by_step,
        rule=settings.rule(),
        skipped_steps=skipped,
        tokens_by_step=tokens,
        squares_by_step=report.squares_by_step,
        measure=measure,
    ):
        steps = drop.first_step, drop.last_step
        seconds = _seconds(report, *steps)
        lost_s = median(seconds) * drop.depth_ratio if seconds else 0.0
        finding, number = _explaining(report, tracked, steps, lost_s)
        if 0 < sum(seconds) < (MIN_UNEXPLAINED_S if finding is None else MIN_S):
            continue
        if finding is not None and finding.steps is not None and finding.steps[0] in range(*steps):
            steps = finding.steps[0], steps[1]  # noise may have begun the drop before its cause
        change, numbers = _describe(report, rule, drop, steps[0])
        because, cost = UNEXPLAINED, format_price(lost_s, drop.depth_ratio) if lost_s else ""
        if finding is not None:
            because = f"top finding: {finding.cause}: {finding.evidence}"
            cost = _cost(finding, report) or cost
        yield Condition(
            rule=rule,
            key=str(drop.first_step),
            severity=Severity.CRITICAL,
            steps=steps,
            is_active=not drop.is_over,
            text=f"{change}; {because}",
            finding=finding,
            number=number,
            ranks=() if finding is None else finding.ranks,
            cost=cost,
            numbers=numbers,
        )


def _describe(report: RunReport, rule: str, drop: Drop, first: int) -> tuple[str, dict[str, float]]:
    """Return a drop that begins in a step as a clause, with the numbers behind it."""
    if rule == MFU_DROP:
        shape = report.mfu_shape
        named = (
            f" ({shape.name})" if shape is not None and shape.steps[0] == drop.first_step else ""
        )
        change = "dropped by {} in step {}" if drop.is_sudden else "fell by {} from step {} on"
        return (
            f"MFU of {report.run} {change.format(format_percent(drop.depth_ratio), first)},"
            f" from {format_percent(drop.usual, digits=1)} to"
            f" {format_percent(drop.value, digits=1)}{named}"
        ), {"mfu": drop.value, "median": drop.usual}
    now, usual = 1 / drop.value, 1 / drop.usual
    return (
        f"the step time of {report.run} rose by {format_percent(now / usual - 1)} in step"
        f" {first}, from {format_seconds(usual)} to {format_seconds(now)}"
    ), {"step_time_s": now, "median_s": usual}


def _explaining(
    report: RunReport, tracked: Iterable[TrackedFinding], steps: tuple[int, int], lost_s: float
) -> tuple[Finding | None, int | None]:
    """Return the first finding that matters, shows in these steps, and costs most of the drop."""
    known = [(one.finding, one.number) for one in tracked if one.closed_ns is None]
    for finding, number in (*known, *((each, None) for each in report.findings)):
        if finding.severity in {Severity.MINOR, Severity.NONE} or finding.steps is None:
            continue
        price = report.price(finding)
        is_enough = price is None or price.seconds >= THRESHOLDS.majority_share * lost_s
        if finding.steps[0] <= steps[1] and finding.steps[1] >= steps[0] and is_enough:
            return finding, number
    return None, None


def _from_quality(report: RunReport, rules: AlertRules) -> Iterator[Condition]:
    """Yield what may hide a cause: lost records, and clocks that are too uncertain."""
    account = report.quality.account
    produced = account.produced
    is_many = produced is None or account.num_dropped > rules.lost_records.ratio * produced
    if account.num_dropped and is_many:
        reasons = sorted(account.dropped.items(), key=lambda item: -item[1])
        whole = "" if produced is None else f" of {produced:,}"
        yield Condition(
            rule=LOST_RECORDS,
            key="0",
            severity=Severity.WARNING,
            text=(
                f"{report.run}: {account.num_dropped:,}{whole} records were lost:"
                f" {', '.join(f'{num:,} {reason}' for reason, num in reasons)}"
            ),
            numbers={"num_lost": float(account.num_dropped)},
        )
    error_ns, step_s = report.quality.clock_error_ns, report.step_time_s.actual
    if error_ns is not None and step_s and error_ns > rules.clock_error.step_ratio * step_s * 1e9:
        yield Condition(
            rule=CLOCK_ERROR,
            key="0",
            severity=Severity.WARNING,
            text=(
                f"{report.run}: the clocks of the hosts agree within {format_duration(error_ns)}"
                f" only, {format_percent(error_ns / 1e9 / step_s)} of a step: waits between hosts"
                " are uncertain by as much"
            ),
            hold_s=60.0,
            numbers={"clock_error_ns": float(error_ns)},
        )
