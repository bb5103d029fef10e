"""The alerts page's data: what a later finding adds to an alert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import Finding, Severity
from rankscope.analysis.report.tracked_findings import FindingTracker
from rankscope.server.alerting import Alerting
from rankscope.server.page_alerts import PageAlerts
from tests.support.dashboard.builders import report

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

FOUND = Finding(
    cause="slow-compute",
    ranks=(5,),
    steps=(10, 13),
    confidence=0.9,
    evidence="rank 5 takes 1.5 x",
    severity=Severity.WARNING,
)


@pytest.mark.parametrize(
    ("steps", "cause", "because"),
    [
        ((10, 13), "slow-compute", "found later: slow-compute: rank 5 takes 1.5 x"),
        ((2, 4), "", "no finding explains it"),
    ],
)
def test_a_drop_names_the_finding_of_its_steps_that_came_after_it(
    empty_store: Store, steps: tuple[int, int], cause: str, because: str
) -> None:
    # GIVEN a rise of the step time in steps 10 to 13 that was sent without a finding
    alerting = Alerting(empty_store, page_url=lambda *_: "")
    seconds = dict(enumerate([1.0] * 10 + [1.5] * 4))
    made = replace(
        report(run="job"),
        mfu=None,
        findings=(),
        startup_s_by_step={},
        steps=tuple(seconds),
        actual_s_by_step=seconds,
    )
    alerting.evaluate(made)

    # WHEN a finding follows
    tracker = FindingTracker("job")
    found = replace(made, findings=(replace(FOUND, steps=steps),))
    tracker.update(found, at_ns=1)
    tracked = [replace(one, closed_ns=None) for one in tracker.findings]
    alerting.evaluate(made, tracked)

    # THEN the alert of the drop names it if they share a step
    (rise,) = (
        alert for alert in PageAlerts(alerting).alerts().alerts if alert.rule == "step-time-rise"
    )
    assert rise.text.endswith(f"to 1.50 s; {because}")
    assert rise.cause == cause
    assert rise.ranks == ((5,) if cause else ())
    assert rise.action.startswith("Restart without" if cause else "open the step")
