"""Findings that alert."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.alert_rules import find_conditions
from rankscope.analysis.report.report import Finding, Severity
from rankscope.analysis.report.tracked_findings import FindingTracker
from tests.support.dashboard.builders import report


@pytest.mark.parametrize(
    ("cause", "ranks", "severity", "does_alert"),
    [
        ("slow-compute", (5,), Severity.WARNING, True),
        ("slow-compute", (5,), Severity.MINOR, False),
        ("network-degradation", (), Severity.WARNING, True),
        # Unequal lengths are in all steps alike: nothing began, unless the job straggles.
        ("sequence-imbalance", (), Severity.WARNING, False),
        ("sequence-imbalance", (), Severity.CRITICAL, True),
        ("sequence-imbalance", (5,), Severity.WARNING, True),  # experts of one rank
    ],
)
def test_a_finding_alerts_if_something_began(
    cause: str, ranks: tuple[int, ...], severity: Severity, *, does_alert: bool
) -> None:
    base = replace(report(run="job"), mfu=None, actual_s_by_step=dict.fromkeys(range(9), 1.0))
    finding = Finding(
        cause=cause, ranks=ranks, steps=(0, 8), confidence=0.9, evidence="", severity=severity
    )
    tracker = FindingTracker("job")
    tracker.update(replace(base, findings=(finding,)), at_ns=1)

    found = find_conditions(base, tracker.findings)

    assert [each.rule for each in found] == ["finding"] * does_alert
