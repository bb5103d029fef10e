from __future__ import annotations

import json
from dataclasses import replace
from queue import Queue
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import Mfu
from rankscope.collector.notify.webhook import Webhook
from rankscope.collector.read.alerts import Delivery, read_alerts
from rankscope.collector.store.store import open_store
from rankscope.server.alerting import Alerting
from tests.support.dashboard.builders import report
from tests.support.receiver import TIMEOUT_S, Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport
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
    return replace(base, mfu=Mfu(convention="", mean=0.4, by_step=by_step), warmup_steps=())


def page_url(run_id: str) -> str:
    return f"http://127.0.0.1:8050/run/{run_id}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


def first_steps(store: Store) -> list[int]:
    return [alert.first_step for alert in read_alerts(store)]


def test_each_drop_raises_one_alert(empty_store: Store) -> None:
    alerting = Alerting(empty_store, webhook=None, page_url=page_url)

    for seen in range(1, len(DROPS_TWICE) + 1):
        alerting.evaluate(report_with(DROPS_TWICE[:seen]))

    assert first_steps(empty_store) == [19, 10]  # the newest first


def test_an_alert_is_not_raised_again_after_a_restart(empty_store: Store) -> None:
    Alerting(empty_store, webhook=None, page_url=page_url).evaluate(report_with(DROPS_AT_10))

    again = Alerting(empty_store, webhook=None, page_url=page_url).evaluate(
        report_with(DROPS_AT_10)
    )

    assert again == ()
    assert first_steps(empty_store) == [10]


def test_without_a_drop_of_the_mfu_there_is_no_alert(empty_store: Store) -> None:
    alerting = Alerting(empty_store, webhook=None, page_url=page_url)

    assert alerting.evaluate(report_with(None)) == ()
    assert alerting.evaluate(report_with([0.5] * 30)) == ()
    assert first_steps(empty_store) == []


def test_the_webhook_gets_run_steps_finding_and_page(
    empty_store: Store, receiver: Receiver
) -> None:
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    Alerting(empty_store, webhook=webhook, page_url=page_url).evaluate(report_with(DROPS_AT_10))
    posted = json.loads(receiver.bodies.get(timeout=TIMEOUT_S))
    webhook.close(timeout_s=TIMEOUT_S)

    assert posted["run"] == "job"
    assert posted["steps"] == [10, 14]
    assert posted["finding"]["cause"] == "slow-compute"
    assert posted["finding"]["ranks"] == [5]
    assert (posted["mfu"], posted["median"]) == (0.40, 0.50)
    assert posted["url"] == "http://127.0.0.1:8050/run/job"
    assert posted["text"].startswith(
        "MFU of job dropped by 20 % in step 10, from 50.0 % to 40.0 %;"
    )
    (alert,) = read_alerts(empty_store)
    assert alert.delivery is Delivery.DELIVERED


def test_an_undelivered_alert_is_stored_and_counted(empty_store: Store, receiver: Receiver) -> None:
    receiver.statuses = [404]
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    alerting = Alerting(empty_store, webhook=webhook, page_url=page_url)

    alerting.evaluate(report_with(DROPS_AT_10))
    receiver.bodies.get(timeout=TIMEOUT_S)
    webhook.close(timeout_s=TIMEOUT_S)

    (alert,) = read_alerts(empty_store)
    assert alert.delivery is Delivery.UNDELIVERED
    assert alerting.num_undelivered == 1


def test_an_alert_is_stored_before_it_is_sent(empty_store: Store, receiver: Receiver) -> None:
    receiver.hold.clear()
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    seen: Queue[Delivery] = Queue()

    Alerting(empty_store, webhook=webhook, page_url=page_url).evaluate(report_with(DROPS_AT_10))
    receiver.bodies.get(timeout=TIMEOUT_S)
    (alert,) = read_alerts(empty_store)
    seen.put(alert.delivery)
    receiver.hold.set()
    webhook.close(timeout_s=TIMEOUT_S)

    assert seen.get_nowait() is Delivery.PENDING


def test_an_alert_that_one_server_could_not_send_is_sent_by_the_next(
    empty_store: Store, receiver: Receiver
) -> None:
    # GIVEN an unavailable receiver, and a server that ends before the next attempt
    receiver.statuses = [503]
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S, retry_delays_s=[TIMEOUT_S])
    Alerting(empty_store, webhook=webhook, page_url=page_url).evaluate(report_with(DROPS_AT_10))
    first = receiver.bodies.get(timeout=TIMEOUT_S)
    webhook.close(timeout_s=TIMEOUT_S)
    (left,) = read_alerts(empty_store)

    # WHEN the server is started twice more
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    Alerting(empty_store, webhook=webhook, page_url=page_url).evaluate(report_with(DROPS_AT_10))
    second = receiver.bodies.get(timeout=TIMEOUT_S)
    webhook.close(timeout_s=TIMEOUT_S)
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S)
    Alerting(empty_store, webhook=webhook, page_url=page_url).evaluate(report_with(DROPS_AT_10))
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
    Alerting(store, webhook=webhook, page_url=page_url).evaluate(report_with(DROPS_AT_10))
    receiver.bodies.get(timeout=TIMEOUT_S)
    store.close()
    receiver.hold.set()

    # WHEN there is another alert to send
    webhook.post({"rule": "next"}, on_done=lambda _outcome: None)

    # THEN it is sent
    assert json.loads(receiver.bodies.get(timeout=TIMEOUT_S)) == {"rule": "next"}
    webhook.close(timeout_s=TIMEOUT_S)
