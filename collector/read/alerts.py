"""Alerts, stored as events: an alert is stored before it is sent, so it fires and resolves once.

The webhook's document is stored with it: if the server ends before it was sent, the next server
sends it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

ALERT_KIND = "alert"
RESOLVED_KIND = "alert-resolved"
DELIVERY_KIND = "alert-delivery"
WRITER = "rankscope"
"""Prefix of the ``process`` column of events that rankscope itself writes."""

SELECT_ALERTS = """
SELECT run_id, epoch, at_ns, kind, text, data, line FROM events FINAL
WHERE kind IN {kinds:Array(String)}
ORDER BY at_ns DESC, run_id, line DESC
"""


class Delivery(StrEnum):
    """State of an alert's webhook."""

    NONE = "none"
    """No webhook is configured."""

    PENDING = "pending"
    """Not yet sent, or the server ended before it knew: the next server sends it."""

    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"
    """The last retry failed."""


AlertId = tuple[str, str, str]
"""Run, rule and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAlert:
    """One alert that fired."""

    run_id: str
    at_ns: int
    """Time at which it was stored, Unix ns."""

    rule: str
    key: str
    """Identifies the alert among those of its run and rule."""

    severity: str
    first_step: int | None
    """None if no step shows it."""

    last_step: int | None
    """Last step that was known when the alert fired."""

    text: str
    delivery: Delivery
    """Of the newest post: that it fired, or that it is resolved."""

    resolved_ns: int | None = None
    """Time at which it was resolved, Unix ns; None while it is active."""

    post: dict[str, Any] | None = None
    """Document for the webhook; None if there is no webhook."""

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step; None if no step shows it."""
        if self.first_step is None or self.last_step is None:
            return None
        return self.first_step, self.last_step

    @property
    def alert_id(self) -> AlertId:
        """Identity of the alert."""
        return self.run_id, self.rule, self.key


def write_alert(store: Store, alert: StoredAlert) -> None:
    """Store an alert that fired. Returns when it is on disk."""
    document = {key: value for key, value in asdict(alert).items() if key in _DOCUMENT_KEYS}
    store.insert_rows("events", [_event(alert, ALERT_KIND, alert.at_ns, document)])


def write_resolution(store: Store, alert: StoredAlert) -> None:
    """Store that an alert is resolved. Returns when it is on disk."""
    document = _reference(alert, alert.delivery)
    at_ns = time.time_ns() if alert.resolved_ns is None else alert.resolved_ns
    store.insert_rows("events", [_event(alert, RESOLVED_KIND, at_ns, document)])


def write_delivery(store: Store, alert: StoredAlert, delivery: Delivery) -> None:
    """Store the state of an alert's webhook."""
    document = _reference(alert, delivery)
    store.insert_rows("events", [_event(alert, DELIVERY_KIND, time.time_ns(), document)])


def read_alerts(store: Store) -> tuple[StoredAlert, ...]:
    """Return all alerts, newest first."""
    kinds = [ALERT_KIND, RESOLVED_KIND, DELIVERY_KIND]
    rows = store.rows(SELECT_ALERTS, {"kinds": kinds})
    # Newest first: the first delivery found of an alert is its last one.
    deliveries: dict[AlertId, Delivery] = {}
    resolved: dict[AlertId, int] = {}
    for row in rows:
        document = json.loads(row["data"])
        key = (row["run_id"], document["rule"], _key(document))
        if row["kind"] == RESOLVED_KIND:
            resolved.setdefault(key, row["at_ns"])
        if row["kind"] != ALERT_KIND:
            deliveries.setdefault(key, Delivery(document["delivery"]))
    return tuple(_alert(row, deliveries, resolved) for row in rows if row["kind"] == ALERT_KIND)


_DOCUMENT_KEYS = ("rule", "key", "severity", "first_step", "last_step", "delivery", "post")


def _reference(alert: StoredAlert, delivery: Delivery) -> dict[str, object]:
    return {"rule": alert.rule, "key": alert.key, "delivery": str(delivery)}


def _key(document: dict[str, Any]) -> str:
    """Return the key of an alert; that of an older version was its first step."""
    return str(document.get("key", document.get("first_step")))


def _event(alert: StoredAlert, kind: str, at_ns: int, document: dict[str, object]) -> Row:
    return {
        "run_id": alert.run_id,
        "epoch": NONE,
        "rank": NONE,
        "at_ns": at_ns,
        "kind": kind,
        "text": alert.text,
        "data": json.dumps(document),
        "process": f"{WRITER}-{alert.rule}-{alert.key}-{kind}",
        "line": NONE if alert.first_step is None else alert.first_step,
    }


def _alert(
    row: Row, deliveries: dict[AlertId, Delivery], resolved: dict[AlertId, int]
) -> StoredAlert:
    document = json.loads(row["data"])
    key = (row["run_id"], document["rule"], _key(document))
    return StoredAlert(
        run_id=row["run_id"],
        at_ns=row["at_ns"],
        rule=document["rule"],
        key=_key(document),
        severity=document.get("severity", "warning"),
        first_step=document["first_step"],
        last_step=document["last_step"],
        text=row["text"],
        delivery=deliveries.get(key, Delivery(document["delivery"])),
        resolved_ns=resolved.get(key),
        post=document.get("post"),
    )
