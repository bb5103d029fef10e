"""The alerts page's data: what a later finding adds to an alert, and what a silence covers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from flask import Flask

from rankscope.analysis.report.report import Finding, Severity
from rankscope.analysis.report.tracked_findings import FindingTracker
from rankscope.collector.http.gate import GRANT_KEY
from rankscope.collector.http.tokens import FULL_GRANT
from rankscope.collector.read.alerts import read_silences
from rankscope.dashboard.records.alert_list import AlertState
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


def test_silencing_an_alert_leaves_the_same_cause_on_another_rank_and_host(
    empty_store: Store,
) -> None:
    # GIVEN two alerts of one run and cause
    hosts = {5: "node-a", 9: "node-b"}
    alerting = Alerting(empty_store, page_url=lambda *_: "", hosts_of=lambda _: hosts)
    found = replace(report(run="job"), findings=(FOUND, replace(FOUND, ranks=(9,))))
    tracker = FindingTracker("job")
    tracker.update(found, at_ns=1)
    alerting.evaluate(found, [replace(one, closed_ns=None) for one in tracker.findings])
    page = PageAlerts(alerting)
    name = next(alert.name for alert in page.alerts().alerts if alert.ranks == (5,))

    # WHEN one of them is silenced
    with Flask(__name__).test_request_context(
        environ_overrides={"asgi.scope": {GRANT_KEY: FULL_GRANT}}
    ):
        page.silence_alert(name, for_s=3600.0)

    # THEN the other is open, and the page says what is silenced
    listed = page.alerts()
    state = {alert.ranks: alert.state for alert in listed.alerts}
    assert state[5,] is AlertState.SILENCED
    assert state[9,] is AlertState.OPEN
    (silence,) = listed.silences
    assert silence.covers == "run job, rule slow-compute, rank 5, host node-a"


def test_a_silence_of_an_older_version_keeps_its_rank(empty_store: Store) -> None:
    alerting = Alerting(empty_store, page_url=lambda *_: "")
    made = alerting.silence(for_s=600, by="me")
    old = json.dumps({"name": "old", "rank": 5, "until_ns": made.until_ns, "at_ns": made.at_ns})
    (row,) = empty_store.rows("SELECT * FROM events WHERE kind = 'alert-silence'")
    empty_store.insert_rows("events", [row | {"data": old, "process": "rankscope-silence-old"}])

    ranks = {silence.name: silence.ranks for silence in read_silences(empty_store)}

    assert ranks == {"old": (5,), made.name: ()}
