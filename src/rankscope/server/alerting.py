"""Alerts: raised once, resolved once, and sent until the receiver has them, across restarts."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rankscope.analysis.alert_rules import FINDING, find_conditions
from rankscope.collector.errors import StoreError
from rankscope.collector.read.alerts import (
    AlertId,
    Delivery,
    StoredAlert,
    read_alerts,
    write_alert,
    write_delivery,
    write_resolution,
)

from ..terminal.lines import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankscope.analysis.alert_rules import Condition
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.report.tracked_findings import TrackedFinding
    from rankscope.collector.notify.webhook import Webhook
    from rankscope.collector.store.store import Store

RESEND_NS = 24 * 3_600_000_000_000
"""Oldest alert that is still sent if its receiver has not got it yet."""

REPEAT_NS = 60_000_000_000
"""Time after which an alert is sent again: to any receiver that did not get it, and to an
Alertmanager while it is active, because that forgets what is not repeated. Source: Prometheus sends
its alerts every minute."""

FIRING, RESOLVED = "firing", "resolved"
"""States of an alert's document."""


class Alerting:
    """Alerts of the runs of a store.

    Args:
        store: Alerts are stored here before they are sent.
        webhook: Receiver of alerts. It first gets those that an earlier server has not sent. None:
            alerts are only stored.
        page_url: Returns the URL of a page of a run: that of a step, or of the whole run for None.
        unix_ns: Clock of the alerts.
    """

    def __init__(
        self,
        store: Store,
        *,
        webhook: Webhook | None,
        page_url: Callable[[str, int | None], str],
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._webhook = webhook
        self._page_url = page_url
        self._unix_ns = unix_ns
        known = read_alerts(store)
        self._raised = {alert.alert_id for alert in known}
        self._active = {alert.alert_id: alert for alert in known if alert.resolved_ns is None}
        self._sent_ns: dict[AlertId, int] = {}
        self._undelivered: dict[AlertId, tuple[StoredAlert, str]] = {}
        """What receivers did not get, with its state."""

        self.num_undelivered = 0
        """Alerts since the start that the webhook could not deliver at once."""

        missing = {Delivery.PENDING, Delivery.UNDELIVERED}
        after_ns = unix_ns() - RESEND_NS
        for alert in reversed(known):
            if alert.delivery in missing and alert.at_ns > after_ns:
                self._post(alert, RESOLVED if alert.resolved_ns is not None else FIRING)

    def evaluate(
        self, report: RunReport, tracked: Iterable[TrackedFinding] = (), *, is_over: bool = False
    ) -> tuple[StoredAlert, ...]:
        """Raise what is new in a run and resolve what is over; return the alerts that were raised.

        An alert is identified by run, rule and key, which never change: it is raised once.

        Args:
            report: The newest diagnosis of the run.
            tracked: The run's findings, open and closed.
            is_over: Whether the run has ended.
        """
        conditions = find_conditions(report, tracked, is_over=is_over)
        active = set()
        raised = []
        for condition in conditions:
            alert_id = (report.run, condition.rule, condition.key)
            # A finding that is over by now is history; a drop of the MFU is one that cost time.
            is_due = condition.is_active or condition.rule != FINDING
            if alert_id not in self._raised and is_due:
                raised.append(self._raise_alert(report, condition))
            if condition.is_active:
                active.add(alert_id)
        for alert_id, alert in [*self._active.items()]:
            if alert_id[0] == report.run and alert_id not in active:
                self._resolve(alert)
            elif alert_id[0] == report.run and not is_over:
                self._repeat(alert)
        return tuple(raised)

    def retry(self) -> None:
        """Send what receivers did not get again, once a minute for a day."""
        now_ns = self._unix_ns()
        for alert_id, (alert, state) in list(self._undelivered.items()):
            if now_ns - alert.at_ns > RESEND_NS:
                del self._undelivered[alert_id]
            elif now_ns >= self._sent_ns.get(alert_id, 0) + REPEAT_NS:
                self._post(alert, state)

    def _raise_alert(self, report: RunReport, condition: Condition) -> StoredAlert:
        first, last = condition.steps or (None, None)
        alert = StoredAlert(
            run_id=report.run,
            at_ns=self._unix_ns(),
            rule=condition.rule,
            key=condition.key,
            severity=condition.severity,
            first_step=first,
            last_step=last,
            text=condition.text,
            delivery=Delivery.NONE if self._webhook is None else Delivery.PENDING,
        )
        if self._webhook is not None:
            url = self._page_url(report.run, first)
            alert = replace(alert, post=alert_document(alert, condition, url=url))
        write_alert(self._store, alert)
        self._raised.add(alert.alert_id)
        self._active[alert.alert_id] = alert
        self._post(alert, FIRING)
        return alert

    def _resolve(self, alert: StoredAlert) -> None:
        resolved = replace(alert, resolved_ns=self._unix_ns(), delivery=_first_delivery(alert))
        write_resolution(self._store, resolved)
        del self._active[alert.alert_id]
        self._post(resolved, RESOLVED)

    def _repeat(self, alert: StoredAlert) -> None:
        """Send an active alert again, if its receiver forgets what is not repeated."""
        if self._webhook is None or not self._webhook.is_alertmanager:
            return
        if self._unix_ns() >= self._sent_ns.get(alert.alert_id, 0) + REPEAT_NS:
            self._post(alert, FIRING)

    def _post(self, alert: StoredAlert, state: str) -> None:
        if self._webhook is None or alert.post is None:
            return
        is_repeated = alert.alert_id in self._sent_ns
        is_missing = self._undelivered.pop(alert.alert_id, None) is not None
        self._sent_ns[alert.alert_id] = self._unix_ns()
        document = {**alert.post, "state": state, "resolved_ns": alert.resolved_ns}

        def on_done(outcome: Delivery) -> None:
            is_lost = outcome is Delivery.UNDELIVERED
            if is_lost:
                self._undelivered[alert.alert_id] = (alert, state)
            self.num_undelivered += is_lost and not is_missing
            # Of repetitions only a change is news.
            if not is_repeated or state == RESOLVED or is_missing != is_lost:
                self._settle(alert, outcome)

        self._webhook.post(document, on_done=on_done)

    def _settle(self, alert: StoredAlert, outcome: Delivery) -> None:
        try:
            write_delivery(self._store, alert, outcome)
        except StoreError as error:  # a failing store must not stop further alerts
            say(f"the delivery of an alert of run {alert.run_id} could not be stored: {error}")


def _first_delivery(alert: StoredAlert) -> Delivery:
    return Delivery.NONE if alert.post is None else Delivery.PENDING


def alert_document(alert: StoredAlert, condition: Condition, *, url: str) -> dict[str, Any]:
    """Return the JSON document for the webhook; `Alerting` adds ``state`` and ``resolved_ns``.

    Args:
        alert: The alert, as it is stored.
        condition: What it is about.
        url: Page that shows it.
    """
    return {
        "rule": alert.rule,
        "key": alert.key,
        "severity": alert.severity,
        "run": alert.run_id,
        "at_ns": alert.at_ns,
        "steps": None if condition.steps is None else list(condition.steps),
        "finding": None
        if condition.finding is None
        else {**asdict(condition.finding), "help": f"docs/findings.md#{condition.finding.cause}"},
        **condition.numbers,
        "text": alert.text,
        "url": url,
    }
