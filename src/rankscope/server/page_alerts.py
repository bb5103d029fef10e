"""Data of the alerts page, and its changes: silence and acknowledge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.report.text import format_time
from rankscope.collector.http.gate import GRANT_KEY
from rankscope.collector.http.tokens import Role
from rankscope.dashboard.records.alert_list import AlertList, AlertState, ShownAlert, ShownSilence

from ..errors import BadInputError
from .alert_changes import AlertChange, apply_change, describe_silence

if TYPE_CHECKING:
    from rankscope.collector.http.tokens import Grant
    from rankscope.collector.read.alerts import Silence, StoredAlert

    from .alerting import Alerting

MAX_ALERTS = 500
"""Alerts that a page lists, the newest."""

NOT_ALLOWED = "this session may only read: open the URL that `rankscope serve` printed"


class PageAlerts:
    """Alerts and silences, as the page shows and changes them.

    Args:
        alerting: Alerts. None: there are none.
    """

    def __init__(self, alerting: Alerting | None) -> None:
        self._alerting = alerting

    def alerts(self) -> AlertList:
        """Return the alerts of all runs, the newest first, and the silences in force."""
        if self._alerting is None:
            return AlertList()
        alerts, now_ns = self._alerting.alerts, self._alerting.now_ns()
        silences = (one for one in self._alerting.silences if one.until_ns > now_ns)
        return AlertList(
            alerts=tuple(show_alert(self._alerting, alert) for alert in alerts[:MAX_ALERTS]),
            num_left_out=max(len(alerts) - MAX_ALERTS, 0),
            silences=tuple(map(_silence, silences)),
            may_change=may_change(),
        )

    def of_finding(self, run_id: str, number: int) -> ShownAlert | None:
        """Return the alert about a finding, the active one of several; None if none was raised."""
        alerting = self._alerting
        if alerting is None:
            return None
        alerts = [
            alert
            for alert in alerting.alerts
            if alert.run_id == run_id and (alert.post or {}).get("finding_number") == number
        ]
        alerts.sort(key=lambda alert: alert.resolved_ns is not None)
        return show_alert(alerting, alerts[0]) if alerts else None

    def acknowledge_alert(self, name: str) -> str:
        """Note that a person takes care of an alert; return what was done, or why not."""
        return self._change(AlertChange(what="acknowledge", name=name, by="the page"))

    def silence_alert(self, name: str, *, for_s: float) -> str:
        """Silence an alert's cause on its ranks and hosts; return what was done, or why not."""
        alerts = () if self._alerting is None else self._alerting.alerts
        alert = next((alert for alert in alerts if alert.name == name), None)
        if alert is None:
            return f"no alert {name!r}"
        run_id, cause = alert.group
        return self._change(
            AlertChange(
                what="silence",
                run_id=run_id,
                rule=cause,
                ranks=list(alert.ranks),
                hosts=list(alert.hosts),
                for_s=for_s,
                by="the page",
            )
        )

    def _change(self, change: AlertChange) -> str:
        if self._alerting is None or not may_change():
            return NOT_ALLOWED
        try:
            return apply_change(self._alerting, change)
        except BadInputError as error:
            return str(error)


def may_change() -> bool:
    """Return whether the session of the current request may change alerts.

    Sessions that were opened with the server's own token may, and tokens of role ``admin``.
    """
    grant = _request_grant()
    return grant is not None and grant.allows(Role.ADMIN) and not grant.run_prefix


def request_holder() -> str:
    """Return the holder of the token of the current request; "" if it is the server's own."""
    grant = _request_grant()
    return "" if grant is None else grant.holder


def _request_grant() -> Grant | None:
    from flask import has_request_context, request

    if not has_request_context():
        return None
    grant: Grant | None = request.environ.get("asgi.scope", {}).get(GRANT_KEY)
    return grant


def show_alert(alerting: Alerting, alert: StoredAlert) -> ShownAlert:
    """Return an alert as a page shows it."""
    document = alert.post or {}
    number = document.get("finding_number")
    return ShownAlert(
        name=alert.name,
        run=alert.run_id,
        rule=alert.rule,
        cause=alert.cause,
        severity=alert.severity,
        state=_state(alerting, alert),
        steps=alert.steps,
        ranks=alert.ranks,
        hosts=alert.hosts,
        text=alert.text,
        cost=str(document.get("cost", "")),
        action=str(document.get("action", "")),
        fired=format_time(alert.at_ns),
        resolved="" if alert.resolved_ns is None else format_time(alert.resolved_ns),
        resolved_because=str(document.get("resolved_because", "")),
        acknowledged_by=alert.acknowledged_by,
        delivery=str(alert.delivery),
        incident=number if isinstance(number, int) else None,
    )


def _state(alerting: Alerting, alert: StoredAlert) -> AlertState:
    if alert.resolved_ns is not None:
        return AlertState.RESOLVED
    if alerting.is_silenced(alert):
        return AlertState.SILENCED
    return AlertState.OPEN if alert.acknowledged_ns is None else AlertState.ACKNOWLEDGED


def _silence(silence: Silence) -> ShownSilence:
    return ShownSilence(
        name=silence.name,
        covers=describe_silence(silence),
        until=format_time(silence.until_ns),
        by=silence.by,
        reason=silence.reason,
    )
