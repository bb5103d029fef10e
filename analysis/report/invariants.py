"""Statements that hold for every report, whatever was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .report import Severity
from .text import format_percent, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .report import RunReport

SLACK = 1e-6
"""Relative error of sums of seconds."""

MATTERS = (Severity.CRITICAL, Severity.WARNING)


def find_contradictions(report: RunReport) -> tuple[str, ...]:
    """Return the statements that a graded report breaks; none if it is consistent.

    A saving is at most what was lost, a share at most 1, the bar of the step shows the headline's
    price, nothing is healthy beside an alarm, and no step of the start-up is analysed.
    """
    return tuple(_contradictions(report))


def _contradictions(report: RunReport) -> Iterator[str]:
    actual_s, ideal_s = report.step_time_s.actual, report.reachable_step_s
    for each in report.findings:
        if each.recoverable_ratio is not None and each.recoverable_ratio > 1 + SLACK:
            share = format_percent(each.recoverable_ratio)
            yield f"{each.cause} recovers {share} of what was lost"
        if actual_s is None or ideal_s is None or each.saved_s is None:
            continue
        lost_s = actual_s - ideal_s
        if each.saved_s > lost_s + SLACK * actual_s:
            saved = format_seconds(each.saved_s)
            yield f"{each.cause} saves {saved} of {format_seconds(lost_s)} that were lost"
    yield from _contradictions_of_verdict(report)
    for one in report.starved:
        if max(one.wait_ratio, sum(each.ratio for each in one.waits_on)) > 1 + SLACK:
            yield f"rank {one.rank} waits for {format_percent(one.wait_ratio)} of its time"
    if analysed := set(report.steps) & set(report.warmup_steps):
        yield f"steps {sorted(analysed)} are both start-up and analysed"


def _contradictions_of_verdict(report: RunReport) -> Iterator[str]:
    causes = {each.cause for each in report.findings}
    if "healthy" in causes and any(each.severity in MATTERS for each in report.findings):
        yield "healthy beside a finding that matters"
    top, actual_s = report.top_finding, report.step_time_s.actual
    saved_s = top.saved_s or 0.0
    if top.severity in MATTERS and saved_s > 0 and actual_s:
        shown = [part.seconds for part in report.step_parts if part.name == top.cause]
        if min(abs(each - saved_s) for each in (*shown, 0.0)) > SLACK * actual_s:
            yield f"the bar shows {shown} s for {top.cause}, the headline {saved_s} s"
