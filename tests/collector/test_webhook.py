from __future__ import annotations

import json
import threading
from queue import Queue
from typing import TYPE_CHECKING

import pytest

from collector.alerts import Delivery
from collector.webhook import CAPACITY, Webhook, WebhookUrlError
from tests.receiver import PATIENCE_S, Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


def deliver(url: str, *, retries: int = 0) -> Delivery:
    """Post one document and return what became of it."""
    outcomes: Queue[Delivery] = Queue()
    webhook = Webhook(url, timeout_s=PATIENCE_S, retry_delays_s=(0.0,) * retries)
    webhook.post({"run": "AR"}, on_done=outcomes.put)
    outcome = outcomes.get(timeout=PATIENCE_S)
    webhook.close()
    return outcome


def test_an_alert_arrives_as_json_at_the_address_asked_for(receiver: Receiver) -> None:
    assert deliver(f"{receiver.url}/hook?room=7") is Delivery.DELIVERED

    assert receiver.paths.get_nowait() == "/hook?room=7"
    assert json.loads(receiver.bodies.get_nowait()) == {"run": "AR"}


def test_a_passing_failure_is_tried_again_and_delivered_once(receiver: Receiver) -> None:
    receiver.statuses = [503, 429]

    assert deliver(receiver.url, retries=3) is Delivery.DELIVERED
    assert receiver.bodies.qsize() == 3


def test_a_receiver_that_keeps_failing_is_given_up(receiver: Receiver) -> None:
    receiver.statuses = [500] * 9

    assert deliver(receiver.url, retries=2) is Delivery.UNDELIVERED
    assert receiver.bodies.qsize() == 3


def test_a_refusal_is_final(receiver: Receiver) -> None:
    receiver.statuses = [404]

    assert deliver(receiver.url, retries=2) is Delivery.UNDELIVERED
    assert receiver.bodies.qsize() == 1


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.statuses = [307]
    receiver.headers = {"location": f"{receiver.url}/elsewhere"}

    assert deliver(receiver.url, retries=2) is Delivery.UNDELIVERED
    assert receiver.bodies.qsize() == 1


def test_nobody_there_is_an_outcome_and_no_exception(receiver: Receiver) -> None:
    url = receiver.url
    receiver.close()

    assert deliver(url, retries=1) is Delivery.UNDELIVERED


def test_posting_never_waits_and_what_is_too_much_is_given_up(receiver: Receiver) -> None:
    receiver.hold.clear()
    outcomes: Queue[Delivery] = Queue()
    webhook = Webhook(receiver.url, timeout_s=PATIENCE_S, retry_delays_s=())
    webhook.post({}, on_done=outcomes.put)
    receiver.bodies.get(timeout=PATIENCE_S)  # the first is under way and held

    for _ in range(CAPACITY + 3):
        webhook.post({}, on_done=outcomes.put)

    assert [outcomes.get_nowait() for _ in range(3)] == [Delivery.UNDELIVERED] * 3
    assert outcomes.empty()
    receiver.hold.set()
    assert outcomes.get(timeout=PATIENCE_S) is Delivery.DELIVERED
    webhook.close()


def test_closing_does_not_sit_out_the_pauses_between_tries(receiver: Receiver) -> None:
    receiver.statuses = [503]
    outcomes: Queue[Delivery] = Queue()
    before = set(threading.enumerate())
    webhook = Webhook(receiver.url, retry_delays_s=(3600.0,))
    webhook.post({}, on_done=outcomes.put)
    receiver.bodies.get(timeout=PATIENCE_S)

    webhook.close(timeout_s=PATIENCE_S)

    after = set(threading.enumerate()) - before
    assert not any(thread.name == "webhook" for thread in after)
    assert outcomes.empty()  # neither delivered nor given up: it stays pending


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "file:///etc/passwd", "http://", "http://host:port/", "host/path", ""]
)
def test_an_address_that_cannot_be_posted_to_is_refused_at_once(url: str) -> None:
    with pytest.raises(WebhookUrlError, match="alert webhook"):
        Webhook(url)


def test_the_refusal_does_not_repeat_the_secret_in_the_path() -> None:
    with pytest.raises(WebhookUrlError) as caught:
        Webhook("ftp://chat.example/services/T0-SECRET")

    assert "SECRET" not in str(caught.value)
