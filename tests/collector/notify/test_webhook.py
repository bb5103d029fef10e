from __future__ import annotations

import json
import ssl
import threading
from datetime import UTC, datetime, timedelta
from queue import Queue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from rankscope.collector.notify.receiver import CAPACITY
from rankscope.collector.notify.webhook import (
    Webhook,
    WebhookUrlError,
    alertmanager_alert,
    is_alertmanager,
)
from rankscope.collector.read.alerts import Delivery
from tests.support.collector.authority import Authority
from tests.support.receiver import TIMEOUT_S, Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


def deliver(url: str, *, retries: int = 0) -> Delivery:
    """Post one document and return the outcome."""
    outcomes: Queue[Delivery] = Queue()
    webhook = Webhook(url, timeout_s=TIMEOUT_S, retry_delays_s=(0.0,) * retries)
    webhook.post({"run": "AR"}, on_done=outcomes.put)
    outcome = outcomes.get(timeout=TIMEOUT_S)
    webhook.close()
    return outcome


@pytest.mark.parametrize(
    ("statuses", "retries", "expected", "num_posts"),
    [
        ([503, 429], 3, Delivery.DELIVERED, 3),
        ([500] * 9, 2, Delivery.UNDELIVERED, 3),  # retries end
        ([404], 2, Delivery.UNDELIVERED, 1),  # a refusal is final
        ([307], 2, Delivery.UNDELIVERED, 1),  # a redirect is not followed
    ],
)
def test_only_a_temporary_failure_is_retried(
    receiver: Receiver, statuses: list[int], retries: int, expected: Delivery, num_posts: int
) -> None:
    receiver.statuses = statuses
    receiver.headers = {"location": f"{receiver.url}/elsewhere"}

    assert deliver(receiver.url, retries=retries) is expected
    assert receiver.bodies.qsize() == num_posts


def test_a_missing_receiver_is_an_outcome_not_an_exception(receiver: Receiver) -> None:
    url = receiver.url
    receiver.close()

    assert deliver(url, retries=1) is Delivery.UNDELIVERED


def test_posting_never_blocks_and_drops_alerts_beyond_the_queue(receiver: Receiver) -> None:
    receiver.hold.clear()
    outcomes: Queue[Delivery] = Queue()
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S, retry_delays_s=())
    webhook.post({}, on_done=outcomes.put)
    receiver.bodies.get(timeout=TIMEOUT_S)  # the first is being posted

    for _ in range(CAPACITY + 3):
        webhook.post({}, on_done=outcomes.put)

    assert [outcomes.get_nowait() for _ in range(3)] == [Delivery.UNDELIVERED] * 3
    assert outcomes.empty()
    receiver.hold.set()
    assert outcomes.get(timeout=TIMEOUT_S) is Delivery.DELIVERED
    webhook.close()


def test_closing_does_not_wait_for_retries(receiver: Receiver) -> None:
    receiver.statuses = [503]
    outcomes: Queue[Delivery] = Queue()
    before = set(threading.enumerate())
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S, retry_delays_s=(3600.0,))
    webhook.post({}, on_done=outcomes.put)
    receiver.bodies.get(timeout=TIMEOUT_S)

    webhook.close(timeout_s=TIMEOUT_S)

    after = set(threading.enumerate()) - before
    assert not any(thread.name == "webhook" for thread in after)
    assert outcomes.empty()  # neither delivered nor dropped: it stays pending


@pytest.mark.parametrize(
    "url",
    [
        "ftp://chat.example/services/SECRET",
        "file:///etc/SECRET",
        "http://",
        "http://host:port/SECRET",
        "host/SECRET",
        "",
    ],
)
def test_an_invalid_url_is_refused_at_once_without_its_secret(url: str) -> None:
    with pytest.raises(WebhookUrlError, match="alert webhook") as caught:
        Webhook(url)

    assert urlsplit(url).netloc in str(caught.value)
    assert not urlsplit(url).netloc or "SECRET" not in str(caught.value)


@pytest.mark.parametrize(("name", "expected"), [("localhost", True), ("elsewhere.example", False)])
def test_over_tls_the_certificate_must_be_valid_for_the_name(
    name: str, *, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a receiver with a certificate for a name, from a trusted authority
    files = Authority(tmp_path).issue(name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    receiver = Receiver(context=context)
    port = int(receiver.url.rpartition(":")[2])

    outcome = deliver(f"https://localhost:{port}/")

    assert (outcome is Delivery.DELIVERED) is expected
    assert receiver.bodies.empty() is not expected
    receiver.close()


DOCUMENT: dict[str, Any] = {
    "rule": "mfu-drop",
    "key": "10",
    "severity": "critical",
    "run": "job-7",
    "at_ns": 1_790_000_000_000_000_000,
    "resolved_ns": 1_790_000_060_000_000_000,
    "steps": [10, 12],
    "finding": {
        "cause": "slow-compute",
        "ranks": [5, 6],
        "steps": [9, 12],
        "confidence": 0.9,
        "evidence": "rank 5 computes 1.5 x as long",
        "help": "docs/findings.md#slow-compute",
    },
    "mfu": 0.4,
    "median": 0.5,
    "text": "MFU of job-7 fell by 20 %",
    "url": "https://here/run/job-7",
}

ALERTS = [
    {
        "labels": {
            "alertname": "mfu-drop",
            "run": "job-7",
            "key": "10",
            "severity": "critical",
        },
        "annotations": {
            "cause": "slow-compute",
            "summary": "MFU of job-7 fell by 20 %",
            "steps": "10-12",
            "ranks": "5, 6",
            "evidence": "rank 5 computes 1.5 x as long",
            "help": "docs/findings.md#slow-compute",
        },
        "startsAt": "2026-09-21T14:13:20+00:00",
        "endsAt": "2026-09-21T14:14:20+00:00",
        "generatorURL": "https://here/run/job-7",
    }
]


def test_an_alert_becomes_a_labelled_alert() -> None:
    assert [alertmanager_alert(DOCUMENT)] == ALERTS


def test_an_active_alert_ends_some_minutes_after_it_was_sent() -> None:
    alert = alertmanager_alert({**DOCUMENT, "resolved_ns": None, "finding": None})

    ends = datetime.fromisoformat(alert["endsAt"])
    assert timedelta(minutes=3) < ends - datetime.now(tz=UTC) <= timedelta(minutes=4)
    assert alert["annotations"] == {"summary": "MFU of job-7 fell by 20 %", "steps": "10-12"}


def test_an_alert_says_where_what_it_costs_and_what_to_do() -> None:
    more = {"hosts": ["a", "b"], "cost": "1.20 s per step (20 %)", "action": "reboot"}

    alert = alertmanager_alert({**DOCUMENT, **more})

    assert alert["annotations"].items() >= {**more, "hosts": "a, b"}.items()


def test_neighbouring_ranks_are_written_as_a_range() -> None:
    finding = {**DOCUMENT["finding"], "ranks": [1, *range(6_144, 8_192)]}

    alert = alertmanager_alert({**DOCUMENT, "finding": finding})

    assert alert["annotations"]["ranks"] == "1, 6144-8191"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://alertmanager:9093/api/v2/alerts", True),
        ("https://host/behind/a/proxy/api/v2/alerts/", True),
        ("https://chat.example/hooks/T0/api/v2/alerts-not", False),
        ("https://chat.example/hooks?then=/api/v2/alerts", False),
    ],
)
def test_an_alertmanager_is_recognized_by_its_path(url: str, *, expected: bool) -> None:
    assert is_alertmanager(url) is expected


@pytest.mark.parametrize(
    ("path", "expected"), [("/api/v2/alerts", ALERTS), ("/hook?room=7", DOCUMENT)]
)
def test_a_webhook_posts_in_the_form_of_its_receiver(
    receiver: Receiver, path: str, expected: object
) -> None:
    webhook = Webhook(f"{receiver.url}{path}", timeout_s=TIMEOUT_S)

    webhook.post(DOCUMENT, on_done=lambda _delivery: None)

    assert json.loads(receiver.bodies.get(timeout=TIMEOUT_S)) == expected
    assert receiver.paths.get_nowait() == path
    webhook.close()


def test_a_post_carries_the_bearer_token_of_its_receiver(receiver: Receiver) -> None:
    answers = [Webhook(receiver.url, bearer=token).send({"run": "AR"}) for token in ("key", "")]

    assert [answer.text for answer in answers] == ["status 200"] * 2
    sent = [receiver.sent_headers.get(timeout=TIMEOUT_S) for _ in answers]
    assert [headers.get("authorization") for headers in sent] == ["Bearer key", None]
