"""Severity of findings, and contradictions of a report in which they are graded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .causes.detector import insufficient
from .causes.order import CAUSES
from .replay.replayer import ratio
from .report.report import Severity
from .report.text import format_percent, format_seconds
from .report.tracked_findings import NO_PROBLEM
from .statistics.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .report.report import Finding, RunReport

HEALTHY = "healthy"

MATTERS = (Severity.CRITICAL, Severity.WARNING)

SLACK = 1e-6
"""Relative error of sums of seconds."""


def grade_findings(report: RunReport) -> RunReport:
    """Return a report whose findings have severity and price, without `healthy` if one matters."""
    priced = [
        replace(finding, shown_saved_s=finding.saved_s * len(report.steps) / num_shown)
        if finding.saved_s is not None and (num_shown := len(report.shown_steps(finding)))
        else finding
        for finding in report.findings
    ]
    graded = tuple(replace(finding, severity=grade(report, finding)) for finding in priced)
    undecided = tuple(finding for finding in graded[1:] if finding.cause in NO_PROBLEM)
    rest = tuple(finding for finding in graded if finding not in undecided)
    if any(finding.severity in MATTERS for finding in graded):
        graded = tuple(finding for finding in graded if finding.cause not in NO_PROBLEM)
        unexplained = _unexplained_wait(report, "no finding explains half of it")
        if unexplained is not None and not any(map(ends_run, graded)):
            graded += (replace(unexplained, severity=Severity.NONE),)
    elif undecided:
        least_s = THRESHOLDS.minor_share * (report.step_time_s.actual or 0.0)
        matter = tuple(
            finding
            for finding in undecided
            if finding.saved_s is None or finding.saved_s >= least_s
        )
        graded = (*matter, *rest[1:]) if matter else rest
    elif graded[0].cause == HEALTHY:
        unexplained = _unexplained_wait(report, "no cause of it is significant")
        if unexplained is not None:
            graded = (replace(unexplained, severity=Severity.NONE), *graded[1:])
    return replace(report, findings=graded)


def find_contradictions(report: RunReport) -> Iterator[str]:
    """Yield the statements that a graded report breaks; none if it is consistent.

    A saving is at most what was lost, a share at most 1, the bar of the step shows the headline's
    price, nothing is healthy beside an alarm, and no step of the start-up is analysed.
    """
    actual_s, ideal_s = report.step_time_s.actual, report.reachable_step_s
    for finding in report.findings:
        if finding.recoverable_ratio is not None and finding.recoverable_ratio > 1 + SLACK:
            share = format_percent(finding.recoverable_ratio)
            yield f"{finding.cause} recovers {share} of what was lost"
        if actual_s is None or ideal_s is None or finding.saved_s is None:
            continue
        lost_s = actual_s - ideal_s
        if finding.saved_s > lost_s + SLACK * actual_s:
            saved = format_seconds(finding.saved_s)
            yield f"{finding.cause} saves {saved} of {format_seconds(lost_s)} that were lost"
    yield from _contradictions_of_verdict(report)
    for waiting in report.starved:
        if max(waiting.wait_ratio, sum(on.ratio for on in waiting.waits_on)) > 1 + SLACK:
            yield f"rank {waiting.rank} waits for {format_percent(waiting.wait_ratio)} of its time"
    if analysed := set(report.steps) & set(report.warmup_steps):
        yield f"steps {sorted(analysed)} are both start-up and analysed"


def _contradictions_of_verdict(report: RunReport) -> Iterator[str]:
    causes = {finding.cause for finding in report.findings}
    if HEALTHY in causes and any(finding.severity in MATTERS for finding in report.findings):
        yield "healthy beside a finding that matters"
    top, actual_s = report.top_finding, report.step_time_s.actual
    saved_s = top.saved_s or 0.0
    if top.severity in MATTERS and saved_s > 0 and actual_s:
        shown = [part.seconds for part in report.step_parts if part.name == top.cause]
        if min(abs(seconds - saved_s) for seconds in (*shown, 0.0)) > SLACK * actual_s:
            yield f"the bar shows {shown} s for {top.cause}, the headline {saved_s} s"


def _unexplained_wait(report: RunReport, reason: str) -> Finding | None:
    """Return that ranks wait for one culprit, and that no finding says why; None if one does.

    The culprit is a rank, or a link with slow transfers. If most of all waiting is for one, and it
    costs what would be critical, something is slow, whether or not it was found.
    """
    waterfall, actual_s = report.waterfall, report.step_time_s.actual
    if waterfall is None or not waterfall.waiting_on or not actual_s or len(waterfall.ranks) == 1:
        return None
    top = waterfall.waiting_on[0]
    num = len(waterfall.ranks)
    # Members of a link transfer while the others wait; a rank that is waited for does not wait.
    share = top.ratio * (num / (num - 1) if top.link is None else 1.0)
    culprits = {top.rank} if top.link is None else set(report.waited_links[top.link].members)
    total = sum(each.ratio for each in waterfall.waiting_on)
    if share < THRESHOLDS.critical_share or top.ratio <= THRESHOLDS.majority_share * total:
        return None
    for each in report.findings:
        concerns = not each.ranks or not culprits.isdisjoint(each.ranks)
        # Work that is shared equally saves what the others do not take over.
        most_s = share * actual_s * (1.0 if each.ranks else (num - 1) / num)
        if concerns and (each.saved_s or 0.0) >= THRESHOLDS.majority_share * most_s:
            return None
    who = "the other rank waits" if num == 2 else f"the other {num - 1:,} ranks wait"  # noqa: PLR2004
    who = who if top.link is None else "ranks wait"
    return insufficient(
        f"{who} for {report.name_waited_for(top)} for {format_percent(share)} of the time, and"
        f" {reason}"
    )


def grade(report: RunReport, finding: Finding) -> Severity:
    """Return how much a finding matters: by the share of the step time that fixing it saves.

    The share is of all analysed steps; of a finding that one of the newest steps still shows, it is
    of the steps that show it, because that is what it will go on to cost. A share that is no larger
    than the error of the replay, from which it comes, is not known to be above zero. One within two
    standard errors of the mean of these steps (once all findings are fixed) could not be measured:
    they vary as much by chance. A finding that only the ends show is minor: the last analysed step,
    in which a job saves or is cut off, or the first ones of the job, fewer than a phase lasts, in
    which it warms up. Nothing is critical of a job of one rank, which holds no other one up.
    """
    if finding.cause in NO_PROBLEM or not is_alarm(finding):
        return Severity.NONE
    if ends_run(finding):
        return Severity.CRITICAL
    shown = report.shown_steps(finding)
    if shown and len(report.steps) > THRESHOLDS.min_several:
        num_first = 1 if report.num_earlier_steps else THRESHOLDS.min_lasting_steps - 1
        if shown[-1] in report.steps[:num_first] or shown[0] == report.steps[-1]:
            return Severity.MINOR
    counted = shown if shown and report.is_open(finding) else report.steps
    whole_s = sum(report.actual_s_by_step[step] for step in counted)
    saved_s = finding.saved_s
    share = None if saved_s is None else ratio(saved_s * len(report.steps), whole_s)
    if share is None:
        return (
            Severity.WARNING
            if finding.confidence >= THRESHOLDS.undecided_certainty
            else Severity.MINOR
        )
    chance = 2.0 * (finding.noise_s or 0.0) * len(counted) ** 0.5 / whole_s
    if share < max(THRESHOLDS.minor_share, report.replay_error_ratio or 0.0, chance):
        return Severity.MINOR
    is_critical = share >= THRESHOLDS.critical_share and report.world_size > 1
    return Severity.CRITICAL if is_critical else Severity.WARNING


def is_alarm(finding: Finding) -> bool:
    """Return whether a finding, if certain, replaces `healthy`."""
    return finding.cause not in CAUSES or CAUSES[finding.cause].is_alarm


def ends_run(finding: Finding) -> bool:
    """Return whether the job ended with a finding."""
    return finding.cause in CAUSES and CAUSES[finding.cause].ends_run


def is_of_the_work(finding: Finding) -> bool:
    """Return whether a finding is in the work of all steps alike, and of no rank."""
    return not finding.ranks and finding.cause in CAUSES and not CAUSES[finding.cause].has_onset
