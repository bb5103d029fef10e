"""Alerts: raised once, resolved once, and sent until each receiver has them, across restarts.

What is to be sent follows from the store alone: alerts, what each receiver got of them, silences
and acknowledgements. So nothing is lost if the server, a receiver or both go away; what a receiver
may have got when the server was killed is sent again.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rankscope.analysis.alert_rules import (
    DROPS,
    FINDING,
    UNEXPLAINED,
    find_conditions,
    find_held,
)
from rankscope.analysis.alert_signals import find_host_conditions, find_signal_conditions
from rankscope.analysis.report.advice import advise
from rankscope.analysis.report.report import Severity
from rankscope.collector.errors import StoreError
from rankscope.collector.read.alerts import (
    FIRING,
    AlertId,
    Delivery,
    Silence,
    StoredAlert,
    read_alerts,
    read_silences,
    write_acknowledgement,
    write_alert,
    write_deliveries,
    write_resolution,
    write_silence,
)
from rankscope.collector.read.runs import read_recent_runs

from ..terminal.lines import say
from .alert_config import AlertConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rankscope.analysis.alert_rules import Condition
    from rankscope.analysis.alert_signals import HostRecord, RunSignals
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.report.tracked_findings import TrackedFinding
    from rankscope.collector.notify.receiver import Receiver
    from rankscope.collector.store.store import Store

IS_GONE = "it no longer shows"
JOB_ENDED = "the job ended; nothing shows that the cause is gone"
ON_REQUEST = "on request"
"""Reasons for which an alert was resolved."""

RESEND_NS = 24 * 3_600_000_000_000
"""Oldest alert that is still sent if its receiver has not got it yet."""

REPEAT_NS = 60_000_000_000
"""Time after which a message is sent again: to any receiver that did not get it, and to an
Alertmanager while its alerts are active, because that forgets what is not repeated. Source:
Prometheus sends its alerts every minute."""

REREAD_NS = 5_000_000_000
"""Age of silences and acknowledgements from which on they are read again: a command may have
written them directly to a store that several processes share."""

NS_PER_S = 1_000_000_000

NO_RUN = ""
"""Run of alerts about hosts."""

HEARTBEAT = "heartbeat"
TEST = "test"
"""Rules of messages that are about no run: a sign of life, and that of `rankscope alerts test`."""


MessageKey = tuple[str, tuple[str, str], str]
"""Receiver, run and cause, and state of a message."""


class Alerting:
    """Alerts of the runs of a store. Threads may share it.

    Args:
        store: Alerts are stored here before they are sent.
        receivers: Receivers of alerts. They first get what an earlier server has not sent.
        config: Rules, and which alerts each receiver wants; a receiver without a configuration
            wants all.
        page_url: Returns the URL that shows a run: the step on the timeline with these ranks
            marked, or the run's page if the step is None.
        incident_url: Returns the URL of the page of a run's finding, by its number; None: alerts
            lead to the run's page.
        picture_url: Returns the URL of the picture that proves a run's finding of a cause; None:
            there is none.
        hosts_of: Returns the host of each rank of a run.
        unix_ns: Clock of the alerts.
    """

    def __init__(  # noqa: PLR0913  # what it sends, and where to
        self,
        store: Store,
        *,
        receivers: Sequence[Receiver] = (),
        config: AlertConfig | None = None,
        page_url: Callable[[str, int | None, Sequence[int]], str],
        incident_url: Callable[[str, int], str] | None = None,
        picture_url: Callable[[str, str], str] | None = None,
        hosts_of: Callable[[str], Mapping[int, str]] | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._config = config or AlertConfig()
        self._receivers = {receiver.name: receiver for receiver in receivers}
        self._wishes = {receiver.name: receiver for receiver in self._config.receivers}
        self._page_url = page_url
        self._incident_url = incident_url or (lambda run, _number: page_url(run, None, ()))
        self._picture_url = picture_url or (lambda _run, _cause: "")
        self._hosts_of = hosts_of or (lambda _run: {})
        self._unix_ns = unix_ns
        self._lock = threading.RLock()
        self._alerts = {alert.alert_id: alert for alert in read_alerts(store)}
        self._silences = read_silences(store)
        self._read_ns = unix_ns()
        self._gone_ns: dict[AlertId, int] = {}
        """When the condition of an active alert was first gone."""

        self._sent_ns: dict[MessageKey, int] = {}
        """When a message was last sent."""

        self._in_flight: set[MessageKey] = set()
        """Messages that their receivers have not answered yet."""

        self.num_undelivered = 0
        """Messages since the start that could not be delivered at once."""

    @property
    def alerts(self) -> tuple[StoredAlert, ...]:
        """All alerts, newest first."""
        with self._lock:
            return tuple(self._alerts.values())

    @property
    def num_in_flight(self) -> int:
        """Messages that receivers have not answered yet."""
        with self._lock:
            return len(self._in_flight)

    @property
    def silences(self) -> tuple[Silence, ...]:
        """All silences, also those that are over."""
        return self._silences

    def now_ns(self) -> int:
        """Return the time of the alerts' clock, Unix ns."""
        return self._unix_ns()

    def unsettled_runs(self) -> set[str]:
        """Return the runs whose alerts an earlier server may not have raised or resolved."""
        active = {alert.run_id for alert in self.alerts if alert.resolved_ns is None}
        return active | read_recent_runs(self._store, since_ns=self._unix_ns() - RESEND_NS)

    def evaluate(
        self, report: RunReport, tracked: Iterable[TrackedFinding] = (), *, is_over: bool = False
    ) -> tuple[StoredAlert, ...]:
        """Raise what is new in a run's diagnosis, resolve what is over, send; return what is new.

        An alert is identified by run, rule and key, which never change: it is raised once. One
        fault is one alert: of a drop and the finding that explains it, the first raises it. If that
        was the drop, the alert gets the cause when the finding is there, and is sent again.

        Args:
            tracked: The run's findings, open and closed.
        """
        tracked = tuple(tracked)
        conditions = find_conditions(report, tracked, rules=self._config.rules, is_over=is_over)
        held = frozenset() if is_over else find_held(report, tracked)
        reason = JOB_ENDED if is_over else IS_GONE
        return self._update(report.run, conditions, source="report", held=held, reason=reason)

    def evaluate_signals(self, signals: RunSignals) -> tuple[StoredAlert, ...]:
        """Do the same for what the store knows of a live run beyond its diagnosis."""
        conditions = find_signal_conditions(signals, rules=self._config.rules)
        return self._update(signals.run, conditions, source="signals")

    def evaluate_hosts(self, records: Iterable[HostRecord]) -> tuple[StoredAlert, ...]:
        """Do the same for the hosts, whatever runs on them."""
        conditions = find_host_conditions(records, rules=self._config.rules)
        return self._update(NO_RUN, conditions, source="hosts")

    def _update(
        self,
        run_id: str,
        conditions: Iterable[Condition],
        *,
        source: str,
        held: frozenset[int] = frozenset(),
        reason: str = IS_GONE,
    ) -> tuple[StoredAlert, ...]:
        with self._lock:
            raised = []
            active: set[AlertId] = set()
            for condition in conditions:
                if not condition.is_active:
                    continue  # what is over by now is history
                alert_id = self._identify(run_id, condition)
                if alert_id not in self._alerts:
                    alert = self._same_fault(run_id, condition)
                    if alert is None:
                        raised.append(self._raise_alert(alert_id, condition, source=source))
                    else:
                        alert_id = alert.alert_id
                        self._extend(alert, condition)
                active.add(alert_id)
                self._note_cost(alert_id, condition)
            now_ns = self._unix_ns()
            for alert in self.alerts:
                post = alert.post or {}
                is_other = alert.run_id != run_id or post.get("source", source) != source
                if is_other or alert.resolved_ns is not None:
                    continue
                if alert.alert_id in active or post.get("finding_number") in held:
                    self._gone_ns.pop(alert.alert_id, None)
                    continue
                gone_ns = now_ns - self._gone_ns.setdefault(alert.alert_id, now_ns)
                if gone_ns >= float(post.get("hold_s", 0.0)) * NS_PER_S:
                    self._resolve(alert, reason)
        self.deliver()
        return tuple(raised)

    def _note_cost(self, alert_id: AlertId, condition: Condition) -> None:
        """Keep the newest price of an alert's finding, as the pages of its run show it."""
        alert = self._alerts[alert_id]
        post = alert.post or {}
        if condition.finding is not None and condition.cost and post.get("cost") != condition.cost:
            self._alerts[alert_id] = replace(alert, post=post | {"cost": condition.cost})

    def _same_fault(self, run_id: str, condition: Condition) -> StoredAlert | None:
        """Return the active alert of a drop that a finding explains, or of the finding that does.

        A drop is the same fault as its finding, and as one that opens later in its steps while it
        has none.
        """
        for alert in self._alerts.values():
            if alert.run_id != run_id or alert.resolved_ns is not None or alert.steps is None:
                continue
            number = (alert.post or {}).get("finding_number")
            if condition.rule in DROPS and alert.rule in {FINDING, *DROPS}:
                is_same = condition.number is not None and number == condition.number
            elif condition.rule == FINDING and alert.rule in DROPS:
                is_later = condition.steps is not None and condition.steps[1] >= alert.steps[0]
                is_same = number == condition.number or (not alert.cause and is_later)
            else:
                is_same = False
            if is_same:
                return alert
        return None

    def _extend(self, alert: StoredAlert, condition: Condition) -> None:
        """Add to an alert what a further condition of the same fault says, and send it again.

        It is sent to whom the condition makes it new: to all if it adds the cause.
        """
        finding = condition.finding
        severity = min(alert.severity, condition.severity)  # "critical" comes before "warning"
        wanting = self._wanting(condition.rule, severity)
        receivers = tuple(dict.fromkeys((*alert.receivers, *wanting)))
        extended = replace(alert, severity=severity, receivers=receivers)
        post = {**(alert.post or {}), "severity": severity, "finding_number": condition.number}
        if finding is not None and not alert.cause:
            about = f"found later: {finding.cause}: {finding.evidence}"
            extended = replace(
                extended,
                text=f"{alert.text.removesuffix(UNEXPLAINED)}{about}",
                cause=finding.cause,
                ranks=condition.ranks,
                hosts=self._hosts(alert.run_id, condition),
                deliveries={},
                messages={},
            )
            post |= self._document(extended, condition) | {"steps": post.get("steps")}
            post["update"] = 1
        if extended == alert and post == alert.post:
            return
        extended = replace(extended, post=post)
        for receiver, state in alert.deliveries.keys() - extended.deliveries.keys():
            write_deliveries(self._store, [extended], receiver, state, Delivery.PENDING, message="")
        write_alert(self._store, extended)
        self._alerts[alert.alert_id] = extended

    def _identify(self, run_id: str, condition: Condition) -> AlertId:
        """Return the identity of a condition's alert: a new one if a state has come back."""
        alert_id = (run_id, condition.rule, condition.key)
        number = 1
        while condition.hold_s and (earlier := self._alerts.get(alert_id)) is not None:
            if earlier.resolved_ns is None:
                break
            number += 1
            alert_id = (run_id, condition.rule, f"{condition.key}#{number}")
        return alert_id

    def _raise_alert(self, alert_id: AlertId, condition: Condition, *, source: str) -> StoredAlert:
        run_id, rule, key = alert_id
        first, last = condition.steps or (None, None)
        alert = StoredAlert(
            run_id=run_id,
            at_ns=self._unix_ns(),
            rule=rule,
            key=key,
            severity=condition.severity,
            first_step=first,
            last_step=last,
            text=condition.text,
            cause="" if condition.finding is None else condition.finding.cause,
            ranks=condition.ranks,
            hosts=self._hosts(run_id, condition),
            receivers=self._wanting(rule, condition.severity),
        )
        document = self._document(alert, condition)
        alert = replace(alert, post=document | {"source": source, "hold_s": condition.hold_s})
        write_alert(self._store, alert)
        self._alerts = {alert.alert_id: alert, **self._alerts}
        return alert

    def _document(self, alert: StoredAlert, condition: Condition) -> dict[str, Any]:
        finding, number = condition.finding, condition.number
        return alert_document(
            alert,
            condition,
            url=self._page_url(alert.run_id, alert.first_step, condition.ranks),
            help_url=self._page_url(alert.run_id, None, ())
            if number is None
            else self._incident_url(alert.run_id, number),
            picture_url="" if finding is None else self._picture_url(alert.run_id, finding.cause),
        )

    def _hosts(self, run_id: str, condition: Condition) -> tuple[str, ...]:
        names = self._hosts_of(run_id) if condition.ranks else {}
        return condition.hosts or tuple(
            sorted({names[rank] for rank in condition.ranks if names.get(rank)})
        )

    def _wanting(self, rule: str, severity: str) -> tuple[str, ...]:
        return tuple(
            name
            for name in self._receivers
            if name not in self._wishes or self._wishes[name].wants(rule=rule, severity=severity)
        )

    def _resolve(self, alert: StoredAlert, reason: str) -> None:
        post = (alert.post or {}) | {"resolved_because": reason}
        resolved = replace(alert, resolved_ns=self._unix_ns(), post=post)
        write_alert(self._store, resolved)  # with the last price
        write_resolution(self._store, resolved)
        self._alerts[alert.alert_id] = resolved
        self._gone_ns.pop(alert.alert_id, None)

    def resolve(self, name: str) -> StoredAlert | None:
        """End an alert on request; return it, or None if there is none.

        What ended a run, a hang or a crash, is over when a person says so. A finding that still
        shows raises no second alert; a state that lasts, such as a silent rank, does.
        """
        with self._lock:
            alert = self._named(name)
            if alert is not None and alert.resolved_ns is None:
                self._resolve(alert, ON_REQUEST)
                return self._alerts[alert.alert_id]
            return alert

    def _named(self, name: str) -> StoredAlert | None:
        return next((each for each in self._alerts.values() if each.name == name), None)

    def acknowledge(self, name: str, *, by: str) -> StoredAlert | None:
        """Note that a person takes care of an alert; return it, or None if there is none."""
        with self._lock:
            alert = self._named(name)
            if alert is None or alert.acknowledged_ns is not None:
                return alert
            at_ns = self._unix_ns()
            write_acknowledgement(self._store, alert, by=by, at_ns=at_ns)
            taken = replace(alert, acknowledged_ns=at_ns, acknowledged_by=by)
            self._alerts[alert.alert_id] = taken
            return taken

    def silence(  # noqa: PLR0913  # what may be silenced
        self,
        *,
        run_id: str | None = None,
        rule: str | None = None,
        ranks: tuple[int, ...] = (),
        hosts: tuple[str, ...] = (),
        for_s: float,
        by: str,
        reason: str = "",
    ) -> Silence:
        """Stop sending alerts for a time. What is still active then is sent."""
        now_ns = self._unix_ns()
        silence = Silence(
            name=secrets.token_hex(4),
            run_id=run_id,
            rule=rule,
            ranks=ranks,
            hosts=hosts,
            until_ns=now_ns + round(for_s * NS_PER_S),
            at_ns=now_ns,
            by=by,
            reason=reason,
        )
        write_silence(self._store, silence)
        with self._lock:
            self._silences = (silence, *self._silences)
        return silence

    def end_silence(self, name: str) -> Silence | None:
        """End a silence now; return it, or None if there is none of this name."""
        with self._lock:
            found = next((each for each in self._silences if each.name == name), None)
            if found is None:
                return None
            ended = replace(found, until_ns=min(found.until_ns, self._unix_ns()))
            write_silence(self._store, ended)
            self._silences = tuple(ended if each is found else each for each in self._silences)
        return ended

    def is_silenced(self, alert: StoredAlert) -> bool:
        """Return whether an alert is silenced now."""
        now_ns = self._unix_ns()
        return any(silence.covers(alert, now_ns) for silence in self._silences)

    def turn(self) -> None:
        """Send what is due, and repeat it; read what a command has written."""
        if self._unix_ns() - self._read_ns >= REREAD_NS:
            self._reread()
        self.deliver()

    def _reread(self) -> None:
        with self._lock:
            before = set(self._alerts)  # all of them are on disk
        silences, stored = read_silences(self._store), read_alerts(self._store)
        with self._lock:
            self._silences, self._read_ns = silences, self._unix_ns()
            for alert_id in before - {alert.alert_id for alert in stored}:
                self._alerts.pop(alert_id, None)  # its run was deleted
                self._gone_ns.pop(alert_id, None)
            for alert in stored:
                current = self._alerts.get(alert.alert_id)
                if current is not None:
                    self._alerts[alert.alert_id] = replace(
                        current,
                        acknowledged_ns=current.acknowledged_ns or alert.acknowledged_ns,
                        acknowledged_by=current.acknowledged_by or alert.acknowledged_by,
                        resolved_ns=current.resolved_ns or alert.resolved_ns,
                    )
            runs = {"", *(alert.run_id for alert in self._alerts.values())}
            self._sent_ns = {key: ns for key, ns in self._sent_ns.items() if key[1][0] in runs}

    def beat(self) -> None:
        """Send a heartbeat to the receivers that want one. Call it only if the server works."""
        now_ns = self._unix_ns()
        for wish in self._config.receivers:
            receiver = self._receivers.get(wish.name)
            if receiver is None or not wish.heartbeat_s:
                continue
            key: MessageKey = wish.name, ("", HEARTBEAT), FIRING
            with self._lock:
                is_due = now_ns - self._sent_ns.get(key, 0) >= wish.heartbeat_s * NS_PER_S
                # A receiver that is down gets its alerts when it is back, not old signs of life.
                if not is_due or key in self._in_flight:
                    continue
                self._start(key, now_ns)
            text = "rankscope works: its absence is the alarm"
            url = self._page_url("", None, ())
            document = plain_document(HEARTBEAT, text, at_ns=now_ns, url=url)
            receiver.post(document, on_done=partial(self._note, key, ()))

    def deliver(self) -> None:
        """Send what the receivers have not got, one message for each run and cause."""
        now_ns = self._unix_ns()
        due: dict[MessageKey, list[StoredAlert]] = {}
        with self._lock:
            for receiver in self._receivers.values():
                for alert in self._alerts.values():
                    if receiver.name in alert.receivers and self._is_wanted(receiver, alert):
                        key = receiver.name, alert.group, alert.state
                        due.setdefault(key, []).append(alert)
            due = {key: alerts for key, alerts in due.items() if self._is_due(key, alerts, now_ns)}
            for key in due:
                self._start(key, now_ns)
        for key, alerts in due.items():
            receiver_name, _, state = key
            self._receivers[receiver_name].post(
                message_document(alerts, state), on_done=partial(self._note, key, alerts)
            )

    def _start(self, key: MessageKey, now_ns: int) -> None:
        self._in_flight.add(key)
        self._sent_ns[key] = now_ns

    def _is_wanted(self, receiver: Receiver, alert: StoredAlert) -> bool:
        """Return whether a receiver lacks an alert in its current state."""
        if self.is_silenced(alert):
            return False
        if receiver.is_alertmanager and alert.state == FIRING:
            return True  # it takes what is not repeated for resolved
        is_taken = alert.state == FIRING and alert.acknowledged_ns is not None
        is_done = is_taken or alert.is_delivered(receiver.name, alert.state)
        return not is_done and self._unix_ns() - (alert.resolved_ns or alert.at_ns) <= RESEND_NS

    def _is_due(self, key: MessageKey, alerts: Sequence[StoredAlert], now_ns: int) -> bool:
        receiver, _, state = key
        if key in self._in_flight:
            return False
        if key not in self._sent_ns:
            return True
        has_failed = any(
            alert.deliveries.get((receiver, state)) is Delivery.UNDELIVERED for alert in alerts
        )
        if has_failed or (self._receivers[receiver].is_alertmanager and state == FIRING):
            pause_ns = REPEAT_NS
        else:
            pause_ns = round(self._config.group_interval_s * NS_PER_S) if state == FIRING else 0
        return now_ns - self._sent_ns[key] >= pause_ns

    def _note(self, key: MessageKey, alerts: Sequence[StoredAlert], outcome: Delivery) -> None:
        """Keep and store what came of a message. Of repetitions only a change is news."""
        receiver, (run_id, _), state = key
        changed = []
        with self._lock:
            self._in_flight.discard(key)
            for alert in alerts:
                current = self._alerts.get(alert.alert_id)
                # Not if its run was deleted since, or if it got its cause, which is to be sent.
                if current is None or message_id([current], state) != message_id([alert], state):
                    continue
                if current.deliveries.get((receiver, state)) is not outcome:
                    changed.append(
                        replace(
                            current,
                            deliveries=current.deliveries | {(receiver, state): outcome},
                            messages=current.messages
                            | {(receiver, state): message_id(alerts, state)},
                        )
                    )
            self._alerts.update((alert.alert_id, alert) for alert in changed)
            if changed and outcome is Delivery.UNDELIVERED:
                self.num_undelivered += 1
        if changed:
            message = message_id(alerts, state)
            try:
                write_deliveries(self._store, changed, receiver, state, outcome, message=message)
            except StoreError as error:  # a failing store must not stop further alerts
                say(f"the delivery of an alert of run {run_id} could not be stored: {error}")


def alert_document(
    alert: StoredAlert, condition: Condition, *, url: str, help_url: str = "", picture_url: str = ""
) -> dict[str, Any]:
    """Return the JSON document of an alert; `message_document` adds its state.

    Args:
        condition: What it is about.
        url: Page that shows it.
        help_url: Page of its incident: its proof, what to do about it, cost and history.
        picture_url: Picture of that proof.
    """
    finding = condition.finding
    advice, about = None, {}
    if finding is not None:
        advice = advise(finding.cause, run=alert.run_id, ranks=alert.ranks, hosts=alert.hosts)
        about = {key: value for key, value in asdict(finding).items() if key != "card"}
        about |= {"help": help_url, "picture": picture_url}
    return {
        "rule": alert.rule,
        "key": alert.key,
        "name": alert.name,
        "severity": alert.severity,
        "run": alert.run_id,
        "at_ns": alert.at_ns,
        "steps": None if condition.steps is None else list(condition.steps),
        "cause": alert.cause,
        "ranks": list(alert.ranks),
        "hosts": list(alert.hosts),
        "finding_number": condition.number,
        "cost": condition.cost,
        "action": condition.action if advice is None else advice.do,
        "commands": [] if advice is None else list(advice.commands),
        "finding": about or None,
        **condition.numbers,
        "text": alert.text,
        "url": url,
    }


def message_id(alerts: Iterable[StoredAlert], state: str) -> str:
    """Return the id of a message: that of its alert, or a hash of those of its alerts.

    An alert that got its cause later is another message.
    """
    names = sorted(
        f"{alert.name}-cause" if (alert.post or {}).get("update") else alert.name
        for alert in alerts
    )
    if len(names) > 1:
        names = [hashlib.sha256("-".join(names).encode()).hexdigest()[:16]]
    return f"{names[0]}-{state}"


def message_document(alerts: Sequence[StoredAlert], state: str) -> dict[str, Any]:
    """Return a message: the gravest alert's document, and those of all its alerts.

    ``id`` is the same if the message is sent again, so that a receiver can leave out a repetition;
    each of its alerts has an ``id`` too, which is the same in every message about this state.
    """
    documents = [
        {
            **{
                k: v
                for k, v in (alert.post or {}).items()
                if k not in {"source", "hold_s", "update"}
            },
            "id": message_id([alert], state),
            "state": state,
            "resolved_ns": alert.resolved_ns,
        }
        for alert in alerts
    ]
    leader = next((each for each in documents if each.get("severity") == Severity.CRITICAL), None)
    return {**(leader or documents[0]), "id": message_id(alerts, state), "alerts": documents}


def plain_document(rule: str, text: str, *, at_ns: int, url: str) -> dict[str, Any]:
    """Return a message that is about no run: a heartbeat or a test."""
    return {
        "rule": rule,
        "key": "0",
        "severity": "none",
        "run": "",
        "at_ns": at_ns,
        "steps": None,
        "finding": None,
        "text": text,
        "url": url,
        "state": FIRING,
        "resolved_ns": None,
    }
