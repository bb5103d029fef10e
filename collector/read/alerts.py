"""Alerts, stored as events: an alert is stored before it is sent, so it fires and resolves once.

Its document is stored with it, and what each receiver got: if the server ends before an alert was
sent, the next server sends it. Silences and acknowledgements are events too.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..identity import Row
    from ..store.store import Store

ALERT_KIND = "alert"
RESOLVED_KIND = "alert-resolved"
DELIVERY_KIND = "alert-delivery"
ACKNOWLEDGED_KIND = "alert-acknowledged"
SILENCE_KIND = "alert-silence"
NEEDED_KEYS = {
    ALERT_KIND: {"rule", "first_step", "last_step"},
    RESOLVED_KIND: {"rule"},
    DELIVERY_KIND: {"rule"},
    ACKNOWLEDGED_KIND: {"rule", "by"},
    SILENCE_KIND: {"name", "until_ns", "at_ns"},
}
"""Keys of the document of each kind, in all versions."""

KEY_TYPES: dict[str, Any] = {
    **dict.fromkeys(("severity", "cause", "by", "reason", "name"), str),
    **dict.fromkeys(("receiver", "state", "delivery", "message"), str),
    **dict.fromkeys(("ranks", "hosts", "receivers"), list),
    **dict.fromkeys(("first_step", "last_step", "rank"), int | None),
    **dict.fromkeys(("until_ns", "at_ns"), int),
    "key": str | int,
    "rule": str | None,
    "run_id": str | None,
    "post": dict | None,
}

WRITER = "rankscope"
"""Prefix of the ``process`` column of events that rankscope itself writes."""

SELECT_ALERTS = """
SELECT run_id, epoch, at_ns, kind, text, data, line FROM events FINAL
WHERE kind IN {kinds:Array(String)} AND startsWith(process, 'rankscope-') AND epoch = -1
ORDER BY at_ns DESC, run_id, line DESC
"""

FIRING, RESOLVED = "firing", "resolved"
"""States of an alert, as receivers get them."""


class Delivery(StrEnum):
    """State of an alert's message."""

    NONE = "none"
    """No receiver wants it."""

    PENDING = "pending"
    """Not yet sent, or sent and not yet answered: if the server ends now, the next one sends it."""

    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"
    """The last attempt failed."""


AlertId = tuple[str, str, str]
"""Run, rule and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAlert:
    """One alert that fired."""

    run_id: str
    """"" if it is about a host."""

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
    cause: str = ""
    """Cause of its finding; "" if it has none."""

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    receivers: tuple[str, ...] = ()
    """Names of the receivers that are to get it."""

    resolved_ns: int | None = None
    """Time at which it was resolved, Unix ns; None while it is active."""

    acknowledged_ns: int | None = None
    acknowledged_by: str = ""
    deliveries: dict[tuple[str, str], Delivery] = field(default_factory=dict)
    """Outcome of the last message by (receiver, state); missing: none was sent."""

    messages: dict[tuple[str, str], str] = field(default_factory=dict)
    """Id of that message."""

    post: dict[str, Any] | None = None
    """Document for the receivers."""

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

    @property
    def name(self) -> str:
        """Short name of the alert, for commands: eight hexadecimal digits."""
        return hashlib.sha256("\0".join(self.alert_id).encode()).hexdigest()[:8]

    @property
    def group(self) -> tuple[str, str]:
        """Run and cause: alerts of one group are one message."""
        return self.run_id, self.cause or self.rule

    @property
    def state(self) -> str:
        """``firing`` or ``resolved``."""
        return FIRING if self.resolved_ns is None else RESOLVED

    def is_delivered(self, receiver: str, state: str) -> bool:
        """Return whether a receiver has got a state."""
        return self.deliveries.get((receiver, state)) is Delivery.DELIVERED

    @property
    def delivery(self) -> Delivery:
        """Delivery of its current state: the worst over its receivers."""
        states = {self.deliveries.get((name, self.state)) for name in self.receivers}
        if not states:
            return Delivery.NONE
        if Delivery.UNDELIVERED in states:
            return Delivery.UNDELIVERED
        return Delivery.DELIVERED if states == {Delivery.DELIVERED} else Delivery.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Alerts that are not sent until a time. What is None or empty matches everything."""

    name: str
    """Random, for commands."""

    run_id: str | None = None
    rule: str | None = None
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    until_ns: int
    """Unix time."""

    at_ns: int
    by: str = ""
    reason: str = ""

    def covers(self, alert: StoredAlert, now_ns: int) -> bool:
        """Return whether it silences an alert now: one that names another rank or host is news."""
        return (
            now_ns < self.until_ns
            and self.run_id in (None, alert.run_id)
            and self.rule in (None, alert.rule, alert.cause)
            and (not self.ranks or _are_among(alert.ranks, self.ranks))
            and (not self.hosts or _are_among(alert.hosts, self.hosts))
        )


def _are_among(named: tuple[Any, ...], silenced: tuple[Any, ...]) -> bool:
    return bool(named) and set(named) <= set(silenced)


def write_alert(store: Store, alert: StoredAlert) -> None:
    """Store an alert that fired. Returns when it is on disk."""
    document = {key: value for key, value in asdict(alert).items() if key in _DOCUMENT_KEYS}
    store.insert_rows("events", [_event(alert, ALERT_KIND, alert.at_ns, document)])


def write_resolution(store: Store, alert: StoredAlert) -> None:
    """Store that an alert is resolved. Returns when it is on disk."""
    at_ns = time.time_ns() if alert.resolved_ns is None else alert.resolved_ns
    store.insert_rows("events", [_event(alert, RESOLVED_KIND, at_ns, _reference(alert))])


def write_deliveries(  # what a delivery is
    store: Store,
    alerts: Iterable[StoredAlert],
    receiver: str,
    state: str,
    delivery: Delivery,
    *,
    message: str,
) -> None:
    """Store that a message to one receiver is sent now, or what came of it.

    Args:
        delivery: ``PENDING`` before it is sent.
        message: Its id.
    """
    about = {"receiver": receiver, "state": state, "delivery": str(delivery), "message": message}
    kind = f"{DELIVERY_KIND}-{receiver}-{state}"
    at_ns = time.time_ns()
    store.insert_rows(
        "events",
        [
            _event(alert, kind, at_ns, _reference(alert) | about) | {"kind": DELIVERY_KIND}
            for alert in alerts
        ],
    )


def write_acknowledgement(store: Store, alert: StoredAlert, *, by: str, at_ns: int) -> None:
    """Store that a person takes care of an alert. Returns when it is on disk."""
    document = _reference(alert) | {"by": by}
    store.insert_rows("events", [_event(alert, ACKNOWLEDGED_KIND, at_ns, document)])


def write_silence(store: Store, silence: Silence) -> None:
    """Store a silence, or its new end. Returns when it is on disk."""
    row: Row = {
        "run_id": silence.run_id or "",
        "epoch": NONE,
        "rank": NONE,
        "at_ns": time.time_ns(),
        "kind": SILENCE_KIND,
        "text": silence.reason,
        "data": json.dumps(asdict(silence)),
        "process": f"{WRITER}-silence-{silence.name}",
        "line": NONE,
    }
    store.insert_rows("events", [row])


def read_alerts(store: Store) -> tuple[StoredAlert, ...]:
    """Return all alerts, newest first."""
    kinds = [ALERT_KIND, RESOLVED_KIND, DELIVERY_KIND, ACKNOWLEDGED_KIND]
    rows = _read_documents(store, kinds)
    # Newest first: the first delivery found of an alert is its last one.
    deliveries: dict[AlertId, dict[tuple[str, str], Delivery]] = {}
    messages: dict[AlertId, dict[tuple[str, str], str]] = {}
    resolved: dict[AlertId, int] = {}
    acknowledged: dict[AlertId, tuple[int, str]] = {}
    for row, document in rows:
        key = (row["run_id"], document["rule"], _key(document))
        if row["kind"] == RESOLVED_KIND:
            resolved.setdefault(key, row["at_ns"])
        elif row["kind"] == ACKNOWLEDGED_KIND:
            acknowledged.setdefault(key, (row["at_ns"], document["by"]))
        elif row["kind"] == DELIVERY_KIND and "receiver" in document:
            about = document["receiver"], document["state"]
            deliveries.setdefault(key, {}).setdefault(about, Delivery(document["delivery"]))
            messages.setdefault(key, {}).setdefault(about, document.get("message", ""))
    alerts = []
    for row, document in rows:
        if row["kind"] == ALERT_KIND:
            key = (row["run_id"], document["rule"], _key(document))
            at_ns, by = acknowledged.get(key, (None, ""))
            alerts.append(
                StoredAlert(
                    run_id=row["run_id"],
                    at_ns=row["at_ns"],
                    rule=document["rule"],
                    key=_key(document),
                    severity=document.get("severity", "warning"),
                    first_step=document["first_step"],
                    last_step=document["last_step"],
                    text=row["text"],
                    cause=document.get("cause", ""),
                    ranks=tuple(document.get("ranks", ())),
                    hosts=tuple(document.get("hosts", ())),
                    receivers=tuple(document.get("receivers", ())),
                    resolved_ns=resolved.get(key),
                    acknowledged_ns=at_ns,
                    acknowledged_by=by,
                    deliveries=deliveries.get(key, {}),
                    messages=messages.get(key, {}),
                    post=document.get("post"),
                )
            )
    return tuple(alerts)


def _read_documents(store: Store, kinds: Sequence[str]) -> list[tuple[Row, Row]]:
    """Return the rows that rankscope wrote of these kinds, with their documents.

    A job cannot write such a row: `collector.bounds` refuses its kind. One that an older version
    took from a job is left out if it is not what rankscope writes.
    """
    documents = []
    for row in store.rows(SELECT_ALERTS, {"kinds": kinds}):
        with suppress(ValueError):
            document = json.loads(row["data"])
            if _is_own(row["kind"], document):
                documents.append((row, document))
    return documents


def _is_own(kind: str, document: object) -> bool:
    return (
        isinstance(document, dict)
        and NEEDED_KEYS[kind] <= document.keys() <= KEY_TYPES.keys()
        and all(isinstance(value, KEY_TYPES[key]) for key, value in document.items())
        and (kind == SILENCE_KIND or document["rule"] is not None)
        and document.get("delivery", Delivery.NONE) in set(Delivery)
    )


def read_silences(store: Store) -> tuple[Silence, ...]:
    """Return the newest form of each silence, also of those that are over; newest first."""
    silences: dict[str, Silence] = {}
    for _, document in _read_documents(store, [SILENCE_KIND]):
        rank = document.pop("rank", None)  # of an older version, whose silences had one at most
        ranks = document.pop("ranks", [] if rank is None else [rank])
        silence = Silence(**document | {"ranks": tuple(ranks)})
        silences.setdefault(silence.name, silence)
    return tuple(silences.values())


_DOCUMENT_KEYS = (
    "rule", "key", "severity", "first_step", "last_step", "cause", "ranks", "hosts", "receivers",
    "post",
)  # fmt: skip


def _reference(alert: StoredAlert) -> dict[str, object]:
    return {"rule": alert.rule, "key": alert.key}


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
