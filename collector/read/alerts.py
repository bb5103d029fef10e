"""Alerts as events of the store: an alert is written before it is sent, so it fires once.

What to send is written with it: a server that ends before it could leaves it to the next.
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
"""The ``process`` column of events that no training process wrote."""

SELECT_ALERTS = """
SELECT run_id, epoch, at_ns, kind, text, data, line FROM events FINAL
WHERE kind IN ({alert:String}, {delivery:String})
ORDER BY at_ns DESC, run_id, line DESC
"""


class Delivery(StrEnum):
    """What became of an alert's webhook."""

    NONE = "none"
    """No webhook was asked for."""

    PENDING = "pending"
    """Not yet sent, or the server ended before it knew: the next one sends it."""

    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"
    """Given up after the last retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAlert:
    """One alert that fired."""

    run_id: str
    at_ns: int
    """When it was written, Unix time."""

    rule: str
    first_step: int
    last_step: int
    """Last step of the drop that was known as the alert fired."""

    text: str
    delivery: Delivery
    post: dict[str, Any] | None = None
    """What the webhook is sent; None where there was none."""


def write_alert(store: Store, alert: StoredAlert) -> None:
    """Write an alert; returns when it is on disk."""
    document = {key: value for key, value in asdict(alert).items() if key in _DOCUMENT_KEYS}
    store.insert_rows("events", [_event(alert, ALERT_KIND, alert.at_ns, document)])


def write_delivery(store: Store, alert: StoredAlert, delivery: Delivery) -> None:
    """Write what became of an alert's webhook."""
    document = {"rule": alert.rule, "first_step": alert.first_step, "delivery": str(delivery)}
    store.insert_rows("events", [_event(alert, DELIVERY_KIND, time.time_ns(), document)])


def read_alerts(store: Store) -> tuple[StoredAlert, ...]:
    """Return every alert, the newest first."""
    rows = store.rows(SELECT_ALERTS, {"alert": ALERT_KIND, "delivery": DELIVERY_KIND})
    # Newest first, so the last delivery told of an alert is the first one met.
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
