"""Alerts: one for each drop of a run's MFU, also across restarts of the server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.alert_rules import MFU_DROP, mfu_drops
from rankscope.analysis.report.text import format_percent
from rankscope.collector.errors import StoreError
from rankscope.collector.read.alerts import (
    Delivery,
    StoredAlert,
    read_alerts,
    write_alert,
    write_delivery,
)

from ..terminal.lines import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.report.alert_rules import MfuDrop
    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.notify.webhook import Webhook
    from rankscope.collector.store.store import Store

RESEND_NS = 24 * 3_600_000_000_000
"""Oldest alert that is still sent if an earlier server ended before it could send it."""


class Alerting:
    """Alerts of the runs of a store.

    Args:
        store: Alerts are stored here before they are sent.
        webhook: Receiver of alerts. It first gets those that an earlier server has not sent. None:
            alerts are only stored.
        page_url: Returns the URL of a run's page.
    """

    def __init__(
        self, store: Store, *, webhook: Webhook | None, page_url: Callable[[str], str]
    ) -> None:
        self._store = store
        self._webhook = webhook
        self._page_url = page_url
        known = [alert for alert in read_alerts(store) if alert.rule == MFU_DROP]
        self._raised = {(alert.run_id, alert.first_step) for alert in known}
        self.num_undelivered = 0
        """Alerts since the start that the webhook could not deliver."""

        after_ns = time.time_ns() - RESEND_NS
        for alert in reversed(known):
            if alert.delivery is Delivery.PENDING and alert.at_ns > after_ns:
                self._post(alert)

    def evaluate(self, report: RunReport) -> tuple[StoredAlert, ...]:
        """Raise and return the alerts of a diagnosis that have not been raised before.

        A drop is identified by run and first step, which never changes
        (`analysis.report.alert_rules.mfu_drops`).
        """
        if report.mfu is None:
            return ()
        drops = mfu_drops(report.mfu, warmup_steps=report.warmup_steps)
        due = [drop for drop in drops if (report.run, drop.first_step) not in self._raised]
        return tuple(self._raise_alert(report, drop) for drop in due)

    def _raise_alert(self, report: RunReport, drop: MfuDrop) -> StoredAlert:
        document = alert_document(report, drop, url=self._page_url(report.run))
        alert = StoredAlert(
            run_id=report.run,
            at_ns=time.time_ns(),
            rule=MFU_DROP,
            first_step=drop.first_step,
            last_step=drop.last_step,
            text=format_alert(report, drop),
            delivery=Delivery.NONE if self._webhook is None else Delivery.PENDING,
            post=None if self._webhook is None else document,
        )
        write_alert(self._store, alert)
        self._raised.add((report.run, drop.first_step))
        self._post(alert)
        return alert

    def _post(self, alert: StoredAlert) -> None:
        if self._webhook is not None and alert.post is not None:
            self._webhook.post(alert.post, on_done=lambda outcome: self._settle(alert, outcome))

    def _settle(self, alert: StoredAlert, outcome: Delivery) -> None:
        self.num_undelivered += outcome is Delivery.UNDELIVERED
        try:
            write_delivery(self._store, alert, outcome)
        except StoreError as error:  # a failing store must not stop further alerts
            say(f"the delivery of an alert of run {alert.run_id} could not be stored: {error}")


def format_alert(report: RunReport, drop: MfuDrop) -> str:
    """Return the alert in one sentence."""
    return (
        f"MFU of {report.run} dropped by {format_percent(drop.depth_ratio)} in step"
        f" {drop.first_step}, from {format_percent(drop.median, digits=1)} to"
        f" {format_percent(drop.mfu, digits=1)}; top finding: {report.top_finding.evidence}"
    )


def alert_document(report: RunReport, drop: MfuDrop, *, url: str) -> dict[str, Any]:
    """Return the JSON document for the webhook."""
    top = report.top_finding
    return {
        "rule": MFU_DROP,
        "run": report.run,
        "steps": [drop.first_step, drop.last_step],
        "finding": {
            "cause": top.cause,
            "ranks": list(top.ranks),
            "steps": None if top.steps is None else list(top.steps),
            "confidence": top.confidence,
            "evidence": top.evidence,
        },
        "mfu": drop.mfu,
        "median": drop.median,
        "text": format_alert(report, drop),
        "url": url,
    }
