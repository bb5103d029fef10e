from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.alert_signals import RunSignals
from rankscope.analysis.report.report import Finding, Mfu, Severity
from rankscope.analysis.report.tracked_findings import FindingTracker
from rankscope.analysis.trace.account import RecordAccount
from rankscope.collector.notify.webhook import Webhook
from rankscope.collector.read.alerts import Delivery, read_alerts
from rankscope.collector.store.store import open_store
from rankscope.server.alert_config import AlertConfig, ReceiverConfig
from rankscope.server.alerting import Alerting
from tests.rankscope.server.test_upkeep import Clock
from tests.support.dashboard.builders import report
from tests.support.receiver import TIMEOUT_S, Receiver
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.read.alerts import StoredAlert
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

DROPS_AT_10 = [0.50] * 10 + [0.40] * 5
DROPS_TWICE = [*DROPS_AT_10, *[0.50] * 4, *[0.30] * 4]


def report_with(mfu: list[float] | None) -> RunReport:
    """Return the report of a run with this MFU by step."""
    base = report(run="job", slow_rank=5)
    if mfu is None:
        return replace(base, mfu=None)
    by_step = dict(enumerate(mfu))
    return replace(base, mfu=Mfu(convention="", mean=0.4, by_step=by_step), startup_s_by_step={})


def page_url(run_id: str, step: int | None, ranks: Sequence[int]) -> str:
    return f"http://127.0.0.1:8050/run/{run_id}/{step}/{','.join(map(str, ranks))}"


MINUTE_NS = 60_000_000_000


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def webhook(receiver: Receiver) -> Iterator[Webhook]:
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    yield webhook
    webhook.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def clock() -> Clock:
    return Clock(now_ns=1_790_000_000_000_000_000)


@pytest.fixture
def alerting(empty_store: Store, clock: Clock) -> Alerting:
    """Return alerts that are stored and sent to no receiver."""
    return Alerting(empty_store, page_url=page_url, unix_ns=clock)


@pytest.fixture
def sending(empty_store: Store, webhook: Webhook, clock: Clock) -> Alerting:
    """Return alerts that are sent to `receiver`."""
    return Alerting(
        empty_store,
        receivers=[webhook],
        page_url=page_url,
        incident_url=lambda run, number: f"http://127.0.0.1:8050/run/{run}/incident/{number}",
        unix_ns=clock,
    )


def first_steps(store: Store) -> list[int | None]:
    return [alert.first_step for alert in read_alerts(store)]


def test_each_drop_raises_one_alert(empty_store: Store, alerting: Alerting) -> None:
    for seen in range(1, len(DROPS_TWICE) + 1):
        alerting.evaluate(report_with(DROPS_TWICE[:seen]))

    assert first_steps(empty_store) == [19, 10]  # the newest first


def test_an_alert_is_not_raised_again_after_a_restart(empty_store: Store) -> None:
    Alerting(empty_store, page_url=page_url).evaluate(report_with(DROPS_AT_10))

    again = Alerting(empty_store, page_url=page_url).evaluate(report_with(DROPS_AT_10))

    assert again == ()
    assert first_steps(empty_store) == [10]


def test_without_a_reason_there_is_no_alert(empty_store: Store, alerting: Alerting) -> None:
    assert alerting.evaluate(steady()) == ()
    assert alerting.evaluate(report_with([0.5] * 30)) == ()
    minor = replace(slow(), severity=Severity.MINOR)
    assert alerting.evaluate(steady(), tracked(minor).findings) == ()
    assert first_steps(empty_store) == []


def test_the_webhook_gets_run_steps_finding_and_page(
    empty_store: Store, receiver: Receiver, webhook: Webhook, sending: Alerting
) -> None:
    sending.evaluate(report_with(DROPS_AT_10))
    posted = receiver.next()
    webhook.close(timeout_s=TIMEOUT_S)

    assert posted["run"] == "job"
    assert posted["steps"] == [10, 14]
    assert posted["finding"]["cause"] == "slow-compute"
    assert posted["finding"]["ranks"] == [5]
    assert (posted["mfu"], posted["median"]) == (0.40, 0.50)
    assert posted["url"] == "http://127.0.0.1:8050/run/job/10/5"
    assert posted["text"].startswith(
        "MFU of job dropped by 20 % in step 10, from 50.0 % to 40.0 %;"
    )
    (alert,) = read_alerts(empty_store)
    assert alert.delivery is Delivery.DELIVERED


def test_an_undelivered_alert_is_stored_and_counted(
    empty_store: Store, receiver: Receiver, webhook: Webhook, sending: Alerting
) -> None:
    receiver.statuses = [404]

    sending.evaluate(report_with(DROPS_AT_10))
    receiver.bodies.get(timeout=TIMEOUT_S)
    webhook.close(timeout_s=TIMEOUT_S)

    (alert,) = read_alerts(empty_store)
    assert alert.delivery is Delivery.UNDELIVERED
    assert sending.num_undelivered == 1


def test_an_alert_is_stored_before_it_is_sent(
    empty_store: Store, receiver: Receiver, sending: Alerting
) -> None:
    receiver.hold.clear()

    sending.evaluate(report_with(DROPS_AT_10))
    receiver.bodies.get(timeout=TIMEOUT_S)
    (alert,) = read_alerts(empty_store)
    receiver.hold.set()

    assert alert.delivery is Delivery.PENDING


def test_an_alert_that_one_server_could_not_send_is_sent_by_the_next(
    empty_store: Store, receiver: Receiver
) -> None:
    # GIVEN an unavailable receiver, and a server that ends before the next attempt
    receiver.statuses = [503]
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S, retry_delays_s=[TIMEOUT_S])
    Alerting(empty_store, receivers=[webhook], page_url=page_url).evaluate(report_with(DROPS_AT_10))
    first = receiver.bodies.get(timeout=TIMEOUT_S)
    webhook.close(timeout_s=TIMEOUT_S)
    (left,) = read_alerts(empty_store)

    # WHEN the server is started twice more
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    Alerting(empty_store, receivers=[webhook], page_url=page_url).evaluate(report_with(DROPS_AT_10))
    second = receiver.bodies.get(timeout=TIMEOUT_S)
    webhook.close(timeout_s=TIMEOUT_S)
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    Alerting(empty_store, receivers=[webhook], page_url=page_url).evaluate(report_with(DROPS_AT_10))
    webhook.post({"rule": "last"}, on_done=lambda _outcome: None)
    last = receiver.bodies.get(timeout=TIMEOUT_S)
    webhook.close(timeout_s=TIMEOUT_S)

    # THEN the alert was sent once more, and is stored once
    assert left.delivery is Delivery.PENDING
    assert second == first
    assert json.loads(last) == {"rule": "last"}
    (alert,) = read_alerts(empty_store)
    assert alert.delivery is Delivery.DELIVERED


def test_a_failing_store_does_not_stop_further_alerts(tmp_path: Path, receiver: Receiver) -> None:
    # GIVEN a store that is closed before the receiver answers
    store = open_store(f"chdb://{tmp_path}/away")
    receiver.hold.clear()
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    Alerting(store, receivers=[webhook], page_url=page_url).evaluate(report_with(DROPS_AT_10))
    receiver.bodies.get(timeout=TIMEOUT_S)
    store.close()
    receiver.hold.set()

    # WHEN there is another alert to send
    webhook.post({"rule": "next"}, on_done=lambda _outcome: None)

    # THEN it is sent
    assert receiver.next() == {"rule": "next"}
    webhook.close(timeout_s=TIMEOUT_S)


def slow(rank: int = 5) -> Finding:
    return Finding(
        cause="slow-compute",
        ranks=(rank,),
        steps=(3, 9),
        confidence=0.9,
        evidence=f"rank {rank} takes 1.5 x",
        severity=Severity.WARNING,
    )


def tracked(*findings: Finding) -> FindingTracker:
    """Return the findings of a run, by default one that began in step 3 and is open."""
    tracker = FindingTracker("job")
    tracker.update(healthy_with(*(findings or [slow()]), last=9), at_ns=1)
    return tracker


def healthy_with(*findings: Finding, last: int) -> RunReport:
    return replace(report_with(None), findings=findings, steps=tuple(range(last + 1)))


def steady() -> RunReport:
    """Return a report that gives no reason for an alert by itself."""
    seconds = dict.fromkeys(range(30), 1.0)
    return replace(report_with(None), actual_s_by_step=seconds, findings=())


def test_a_finding_that_matters_alerts_once_and_resolves(
    empty_store: Store, receiver: Receiver, webhook: Webhook, sending: Alerting
) -> None:
    tracker = tracked()

    sending.evaluate(steady(), tracker.findings)
    sending.evaluate(steady(), tracker.findings)
    tracker.update(healthy_with(last=20), at_ns=2)
    sending.evaluate(steady(), tracker.findings)
    fired, resolved = (receiver.next() for _ in range(2))
    webhook.close(timeout_s=TIMEOUT_S)

    assert (fired["state"], fired["rule"], fired["severity"]) == ("firing", "finding", "warning")
    assert fired["text"] == "job: slow-compute: rank 5 takes 1.5 x"
    assert fired["finding"]["help"] == "http://127.0.0.1:8050/run/job/incident/0"
    assert "card" not in fired["finding"]
    assert fired["url"] == "http://127.0.0.1:8050/run/job/3/5"
    assert (resolved["state"], resolved["key"]) == ("resolved", fired["key"])
    assert resolved["resolved_ns"] >= fired["at_ns"]
    assert receiver.bodies.empty()
    (alert,) = read_alerts(empty_store)
    assert (alert.resolved_ns, alert.delivery) == (resolved["resolved_ns"], Delivery.DELIVERED)


@pytest.mark.parametrize(("cause", "is_active"), [("slow-compute", False), ("hang", True)])
def test_the_end_of_a_run_resolves_all_but_what_ended_it(
    empty_store: Store, cause: str, alerting: Alerting, *, is_active: bool
) -> None:
    tracker = tracked(replace(slow(), cause=cause, severity=Severity.CRITICAL))
    alerting.evaluate(steady(), tracker.findings)

    alerting.evaluate(steady(), tracker.findings, is_over=True)

    (alert,) = read_alerts(empty_store)
    assert (alert.resolved_ns is None) is is_active
    # AND it says that this does not mean that the cause is gone
    assert ("the job ended" in str((alert.post or {}).get("resolved_because"))) is not is_active


def test_a_rise_of_the_step_time_alerts_where_the_mfu_is_unknown(alerting: Alerting) -> None:
    seconds = dict(enumerate([1.0] * 10 + [1.5] * 4))

    (alert,) = alerting.evaluate(replace(steady(), actual_s_by_step=seconds))

    assert (alert.rule, alert.steps, alert.severity) == ("step-time-rise", (10, 13), "critical")
    assert alert.text == (
        "the step time of job rose by 50 % in step 10, from 1.00 s to 1.50 s;"
        " no finding explains it"
    )


RISE = dict(enumerate([1.0] * 10 + [1.5] * 8))
RISEN = replace(slow(), steps=(10, 17), saved_s=0.2, shown_saved_s=0.45)


def rise(num_steps: int) -> RunReport:
    """Return the report of a run whose step time rises by a half in step 10."""
    seconds = {step: RISE[step] for step in range(num_steps)}
    return replace(steady(), steps=tuple(seconds), actual_s_by_step=seconds)


def risen(num_steps: int) -> FindingTracker:
    """Return the findings of that run, with the one that explains the rise."""
    tracker = FindingTracker("job")
    finding = replace(RISEN, steps=(10, num_steps - 1))
    tracker.update(replace(rise(num_steps), findings=(finding,)), at_ns=1)
    return tracker


def test_a_drop_and_its_finding_are_one_alert(empty_store: Store) -> None:
    alerting, tracker = Alerting(empty_store, page_url=page_url), risen(18)

    for seen in range(8, 19):
        tracker = risen(seen) if seen > 12 else FindingTracker("job")
        alerting.evaluate(rise(seen), tracker.findings)

    (alert,) = alerting.alerts
    assert (alert.rule, alert.cause, alert.ranks) == ("step-time-rise", "slow-compute", (5,))
    assert alert.post is not None
    assert alert.post["cost"] == "450 ms per step since step 10 (30 %)"
    assert alert.resolved_ns is None

    # The price follows the finding's while it is open, and is stored with the end.
    dearer = [
        replace(one, finding=replace(one.finding, shown_saved_s=0.48)) for one in tracker.findings
    ]
    alerting.evaluate(rise(18), dearer)
    alerting.evaluate(rise(18), dearer, is_over=True)
    (ended,) = read_alerts(empty_store)
    assert ended.resolved_ns is not None
    assert (ended.post or {})["cost"] == "480 ms per step since step 10 (32 %)"


def test_a_drop_that_gets_its_cause_later_is_sent_again_with_another_id(
    empty_store: Store, receiver: Receiver, webhook: Webhook, sending: Alerting
) -> None:
    sending.evaluate(rise(15))
    first = receiver.next()
    wait_until(lambda: sending.alerts[0].is_delivered("webhook", "firing"))
    sending.evaluate(rise(18), risen(18).findings)
    second = receiver.next()
    sending.evaluate(rise(18), risen(18).findings)
    webhook.close(timeout_s=TIMEOUT_S)

    assert first["text"].endswith("no finding explains it")
    assert second["text"].endswith("found later: slow-compute: rank 5 takes 1.5 x")
    assert (first["name"], second["cause"]) == (second["name"], "slow-compute")
    assert first["id"] != second["id"]
    assert receiver.bodies.empty()
    (stored,) = read_alerts(empty_store)
    assert (stored.cause, stored.delivery) == ("slow-compute", Delivery.DELIVERED)


def test_what_is_over_when_it_is_seen_or_as_the_job_ends_raises_nothing(alerting: Alerting) -> None:
    over = {step: 1.5 if 10 <= step < 16 else 1.0 for step in range(30)}

    alerting.evaluate(replace(steady(), actual_s_by_step=over))
    alerting.evaluate(rise(18), risen(18).findings, is_over=True)

    assert alerting.alerts == ()


def test_an_alert_outlives_the_moment_in_which_noise_hides_its_finding(alerting: Alerting) -> None:
    tracker = tracked()
    alerting.evaluate(steady(), tracker.findings)
    healthy = replace(steady(), actual_s_by_step=dict.fromkeys(range(19), 1.0))

    tracker.update(healthy_with(last=18), at_ns=2)
    alerting.evaluate(healthy, tracker.findings)  # step 9 was the last: 9 s ago
    assert [each.resolved_ns is None for each in alerting.alerts] == [True]
    alerting.evaluate(steady(), tracker.findings)  # 20 s ago
    assert [each.resolved_ns is None for each in alerting.alerts] == [False]


def test_lost_records_alert(alerting: Alerting) -> None:
    account = RecordAccount(produced=1000, dropped={"lane-full": 30, "torn": 1})
    lossy = replace(steady(), quality=replace(steady().quality, account=account))

    (alert,) = alerting.evaluate(lossy)

    assert alert.text == "job: 31 of 1,000 records were lost: 30 lane-full, 1 torn"


def test_what_a_receiver_did_not_get_is_sent_again_after_a_minute(
    empty_store: Store, receiver: Receiver, webhook: Webhook, clock: Clock, sending: Alerting
) -> None:
    # GIVEN a receiver that was away when the alert fired
    receiver.statuses = [404]
    sending.evaluate(steady(), tracked().findings)
    first = receiver.bodies.get(timeout=TIMEOUT_S)
    wait_until(lambda: sending.num_undelivered == 1)

    # WHEN less than a minute passes, and then the rest
    sending.turn()
    clock.now_ns += MINUTE_NS
    sending.turn()
    second = receiver.bodies.get(timeout=TIMEOUT_S)
    webhook.close(timeout_s=TIMEOUT_S)

    # THEN it was sent once more
    assert second == first
    assert receiver.bodies.empty()
    (alert,) = read_alerts(empty_store)
    assert alert.delivery is Delivery.DELIVERED


def test_an_alertmanager_gets_an_active_alert_every_minute_until_it_is_resolved(
    empty_store: Store, receiver: Receiver, clock: Clock
) -> None:
    webhook = Webhook(f"{receiver.url}/api/v2/alerts", timeout_s=TIMEOUT_S)
    alerting = Alerting(empty_store, receivers=[webhook], page_url=page_url, unix_ns=clock)
    tracker = tracked()

    for _ in range(4):  # in two minutes
        alerting.evaluate(steady(), tracker.findings)
        wait_until(lambda: alerting.num_in_flight == 0)
        clock.now_ns += MINUTE_NS // 2
    tracker.update(healthy_with(last=20), at_ns=2)
    alerting.evaluate(steady(), tracker.findings)
    sent = [receiver.next()[0] for _ in range(3)]
    webhook.close(timeout_s=TIMEOUT_S)

    assert receiver.bodies.empty()
    assert sent[0]["labels"] == sent[1]["labels"] == sent[2]["labels"]
    assert {one["startsAt"] for one in sent} == {"2026-09-21T14:13:20+00:00"}
    assert sent[2]["endsAt"] == "2026-09-21T14:15:20+00:00"


def test_alerts_of_one_run_and_cause_are_one_message(
    empty_store: Store, receiver: Receiver, webhook: Webhook
) -> None:
    alerting = Alerting(
        empty_store,
        receivers=[webhook],
        page_url=page_url,
        hosts_of=lambda _run: {5: "host-a", 6: "host-b"},
    )

    alerting.evaluate(steady(), tracked(slow(5), slow(6)).findings)
    message = receiver.next()
    wait_until(lambda: all(each.is_delivered("webhook", "firing") for each in alerting.alerts))
    webhook.close(timeout_s=TIMEOUT_S)

    assert [each["ranks"] for each in message["alerts"]] == [[6], [5]]
    assert [each["hosts"] for each in message["alerts"]] == [["host-b"], ["host-a"]]
    assert message["alerts"][1]["url"] == "http://127.0.0.1:8050/run/job/3/5"
    assert message["alerts"][1]["action"].startswith("Restart without the host")
    assert message["alerts"][1]["commands"][0].startswith("ssh host-a nvidia-smi")
    assert receiver.bodies.empty()


def test_one_receiver_that_is_down_keeps_no_other_from_its_alerts_and_gets_them_later(
    empty_store: Store, receiver: Receiver, clock: Clock
) -> None:
    # GIVEN two receivers, one of which is down, and a server that ends meanwhile
    down = Receiver()
    down.close()

    def webhooks() -> list[Webhook]:
        urls = {"up": receiver.url, "down": down.url}
        return [
            Webhook(url, name=name, timeout_s=TIMEOUT_S, retry_delays_s=())
            for name, url in urls.items()
        ]

    first = webhooks()
    alerting = Alerting(empty_store, receivers=first, page_url=page_url, unix_ns=clock)
    alerting.evaluate(steady(), tracked().findings)
    wait_until(lambda: alerting.num_in_flight == 0)
    for webhook in first:
        webhook.close(timeout_s=TIMEOUT_S)

    # WHEN it is up again, and the server too
    again = Receiver(port=down.port)
    second = webhooks()
    alerting = Alerting(empty_store, receivers=second, page_url=page_url, unix_ns=clock)
    alerting.turn()
    late = json.loads(again.bodies.get(timeout=TIMEOUT_S))
    wait_until(lambda: read_alerts(empty_store)[0].delivery is Delivery.DELIVERED)
    for webhook in second:
        webhook.close(timeout_s=TIMEOUT_S)
    again.close()

    # THEN each got it once
    assert receiver.bodies.qsize() == 1
    assert json.loads(receiver.bodies.get_nowait()) == late
    assert again.bodies.empty()


def test_a_silenced_alert_is_sent_when_the_silence_ends(
    empty_store: Store, receiver: Receiver, webhook: Webhook, clock: Clock
) -> None:
    def start() -> Alerting:
        return Alerting(empty_store, receivers=[webhook], page_url=page_url, unix_ns=clock)

    alerting = start()
    alerting.silence(run_id="job", ranks=(5,), for_s=600, by="me")
    alerting.evaluate(steady(), tracked().findings)
    alerting = start()  # a silence survives a restart
    alerting.turn()
    is_silent = receiver.bodies.empty() and alerting.is_silenced(alerting.alerts[0])
    clock.now_ns += 11 * MINUTE_NS
    alerting.turn()
    sent = receiver.next()

    assert is_silent
    assert sent["ranks"] == [5]


def test_an_acknowledged_alert_is_known_after_a_restart_and_its_end_is_sent(
    empty_store: Store, receiver: Receiver, webhook: Webhook, clock: Clock
) -> None:
    receiver.statuses = [404]
    alerting = Alerting(empty_store, receivers=[webhook], page_url=page_url, unix_ns=clock)
    tracker = tracked()
    alerting.evaluate(steady(), tracker.findings)
    wait_until(lambda: alerting.num_in_flight == 0)
    receiver.bodies.get(timeout=TIMEOUT_S)

    assert alerting.acknowledge(alerting.alerts[0].name, by="me") is not None
    assert alerting.acknowledge("nothing", by="me") is None
    alerting = Alerting(empty_store, receivers=[webhook], page_url=page_url, unix_ns=clock)
    clock.now_ns += 2 * MINUTE_NS
    alerting.turn()
    is_quiet = receiver.bodies.empty()
    tracker.update(healthy_with(last=20), at_ns=2)
    alerting.evaluate(steady(), tracker.findings)
    end = receiver.next()

    assert is_quiet
    assert alerting.alerts[0].acknowledged_by == "me"
    assert end["state"] == "resolved"


def test_a_state_that_flaps_is_one_alert_and_one_that_comes_back_is_another(
    clock: Clock, alerting: Alerting
) -> None:
    behind = RunSignals(run="job", collector_lag_s=90.0)

    for signals in (behind, RunSignals(run="job"), behind):  # gone for half a minute
        alerting.evaluate_signals(signals)
        clock.now_ns += MINUTE_NS // 2
    flapped = len(alerting.alerts)
    alerting.evaluate_signals(RunSignals(run="job"))
    clock.now_ns += MINUTE_NS
    alerting.evaluate_signals(RunSignals(run="job"))
    is_over = alerting.alerts[0].resolved_ns is not None
    alerting.evaluate_signals(behind)

    assert (flapped, is_over) == (1, True)
    assert [alert.key for alert in alerting.alerts] == ["0#2", "0"]


def test_a_heartbeat_is_sent_at_its_interval(
    empty_store: Store, receiver: Receiver, clock: Clock
) -> None:
    wish = ReceiverConfig(name="watchdog", url=receiver.url, heartbeat_s=60.0)
    webhook = Webhook(receiver.url, name="watchdog", timeout_s=TIMEOUT_S)
    alerting = Alerting(
        empty_store,
        receivers=[webhook],
        config=AlertConfig(receivers=(wish,)),
        page_url=page_url,
        unix_ns=clock,
    )

    for _ in range(5):  # in two minutes
        alerting.beat()
        wait_until(lambda: alerting.num_in_flight == 0)
        clock.now_ns += MINUTE_NS // 2
    beats = [receiver.next() for _ in range(3)]
    webhook.close(timeout_s=TIMEOUT_S)

    assert {beat["rule"] for beat in beats} == {"heartbeat"}
    assert receiver.bodies.empty()


def test_a_cause_that_is_found_before_the_answer_is_sent_even_after_a_crash(
    empty_store: Store, receiver: Receiver
) -> None:
    # GIVEN a rise whose cause is found while its receiver does not answer
    receiver.hold.clear()
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S, retry_delays_s=())
    alerting = Alerting(empty_store, receivers=[webhook], page_url=page_url)
    alerting.evaluate(rise(15))
    receiver.bodies.get(timeout=TIMEOUT_S)
    receiver.statuses = [200, 503]
    alerting.evaluate(rise(18), risen(18).findings)

    # WHEN it accepts the message without the cause only
    receiver.hold.set()
    receiver.bodies.get(timeout=TIMEOUT_S)
    wait_until(lambda: alerting.num_in_flight == 0)
    alerting = Alerting(empty_store, receivers=[webhook], page_url=page_url)
    alerting.turn()

    # THEN the next server sends the cause
    assert receiver.next()["cause"] == "slow-compute"
    webhook.close(timeout_s=TIMEOUT_S)


def test_the_alerts_of_a_deleted_run_are_forgotten(
    empty_store: Store, clock: Clock, alerting: Alerting
) -> None:
    alerting.evaluate(steady(), tracked().findings)
    clock.now_ns += MINUTE_NS
    empty_store.command("ALTER TABLE events DELETE WHERE 1 SETTINGS mutations_sync = 2")

    alerting.turn()

    assert alerting.alerts == ()


def test_an_alert_that_is_raised_while_alerts_are_read_is_raised_once(
    empty_store: Store, monkeypatch: pytest.MonkeyPatch, clock: Clock, alerting: Alerting
) -> None:
    def read_then_raise(store: Store) -> tuple[StoredAlert, ...]:
        found = read_alerts(store)
        clock.now_ns -= 1  # its time was taken before the read; storing it took longer
        alerting.evaluate(report_with(DROPS_AT_10))
        clock.now_ns += 1
        return found

    monkeypatch.setattr("rankscope.server.alerting.read_alerts", read_then_raise)
    clock.now_ns += MINUTE_NS
    alerting.turn()

    assert alerting.evaluate(report_with(DROPS_AT_10)) == ()
    assert first_steps(empty_store) == [10]


def test_alerts_are_settled_of_runs_that_ended_a_day_ago_and_have_none(
    empty_store: Store, clock: Clock, alerting: Alerting
) -> None:
    alerting.evaluate(steady(), tracked().findings)  # the alert of run "job" is active
    day_ns = 24 * 60 * MINUTE_NS
    ended = {"old": day_ns + 1, "new": day_ns - 1, "imported": 0, "job": 9 * day_ns}
    rows: list[dict[str, object]] = [
        {
            "run_id": run_id,
            "epoch": 0,
            "created_ns": 1,
            "state": "ended",
            "source_format": "bytedance" if run_id == "imported" else "rankscope",
            "ended_ns": clock.now_ns - age_ns,
        }
        for run_id, age_ns in ended.items()
    ]
    rows.append({**rows[0], "run_id": "trains", "state": "running", "ended_ns": None})
    empty_store.insert_rows("runs", rows)

    assert alerting.unsettled_runs() == {"job", "new", "trains"}
