"""Alerts, stored as events: an alert is stored before it is sent, so it fires once.

Its webhook's document is stored with it: if the server ends before it was sent, the next server
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
DELIVERY_KIND = "alert-delivery"
WRITER = "rankscope"
"""Prefix of the ``process`` column of events that rankscope itself writes."""

SELECT_ALERTS = """
SELECT run_id, epoch, at_ns, kind, text, data, line FROM events FINAL
WHERE kind IN ({alert:String}, {delivery:String})
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAlert:
    """One alert that fired."""

    run_id: str
    at_ns: int
    """Time at which it was stored, Unix ns."""

    rule: str
    first_step: int
    last_step: int
    """Last step of the drop that was known when the alert fired."""

    text: str
    delivery: Delivery
    post: dict[str, Any] | None = None
    """Document for the webhook; None if there is no webhook."""


def write_alert(store: Store, alert: StoredAlert) -> None:
    """Store an alert. Returns when it is on disk."""
    document = {key: value for key, value in asdict(alert).items() if key in _DOCUMENT_KEYS}
    store.insert_rows("events", [_event(alert, ALERT_KIND, alert.at_ns, document)])


def write_delivery(store: Store, alert: StoredAlert, delivery: Delivery) -> None:
    """Store the state of an alert's webhook."""
    document = {"rule": alert.rule, "first_step": alert.first_step, "delivery": str(delivery)}
    store.insert_rows("events", [_event(alert, DELIVERY_KIND, time.time_ns(), document)])


def read_alerts(store: Store) -> tuple[StoredAlert, ...]:
    """Return all alerts, newest first."""
    rows = store.rows(SELECT_ALERTS, {"alert": ALERT_KIND, "delivery": DELIVERY_KIND})
    # Newest first: the first delivery found of an alert is its last one.
    deliveries: dict[tuple[str, str, int], Delivery] = {}
    for row in rows:
        if row["kind"] == DELIVERY_KIND:
            document = json.loads(row["data"])
            key = (row["run_id"], document["rule"], document["first_step"])
            deliveries.setdefault(key, Delivery(document["delivery"]))
    return tuple(_alert(row, deliveries) for row in rows if row["kind"] == ALERT_KIND)


_DOCUMENT_KEYS = ("rule", "first_step", "last_step", "delivery", "post")


def _event(alert: StoredAlert, kind: str, at_ns: int, document: dict[str, object]) -> Row:
    return {
        "run_id": alert.run_id,
        "epoch": NONE,
        "rank": NONE,
        "at_ns": at_ns,
        "kind": kind,
        "text": alert.text,
        "data": json.dumps(document),
        "process": f"{WRITER}-{alert.rule}",
        "line": alert.first_step,
    }


def _alert(row: Row, deliveries: dict[tuple[str, str, int], Delivery]) -> StoredAlert:
    document = json.loads(row["data"])
    key = (row["run_id"], document["rule"], document["first_step"])
    return StoredAlert(
        run_id=row["run_id"],
        at_ns=row["at_ns"],
        rule=document["rule"],
        first_step=document["first_step"],
        last_step=document["last_step"],
        text=row["text"],
        delivery=deliveries.get(key, Delivery(document["delivery"])),
        post=document.get("post"),
    )
