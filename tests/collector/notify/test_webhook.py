from __future__ import annotations

import hashlib
import hmac
import json
import ssl
import threading
from datetime import UTC, datetime, timedelta
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.notify.receiver import CAPACITY
from rankscope.collector.notify.webhook import (
    Webhook,
    WebhookUrlError,
    alertmanager_alerts,
    is_alertmanager,
)
from rankscope.collector.read.alerts import Delivery
from tests.support.collector.authority import Authority
from tests.support.collector.talking_server import speaking, trickle
from tests.support.receiver import TIMEOUT_S, Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.notify.webhook_address import Resolve


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


def test_an_alert_is_posted_as_json_to_the_url(receiver: Receiver) -> None:
    assert deliver(f"{receiver.url}/hook?room=7") is Delivery.DELIVERED

    assert receiver.paths.get_nowait() == "/hook?room=7"
    assert json.loads(receiver.bodies.get_nowait()) == {"run": "AR"}


def test_a_temporary_failure_is_retried_and_delivered_once(receiver: Receiver) -> None:
    receiver.statuses = [503, 429]

    assert deliver(receiver.url, retries=3) is Delivery.DELIVERED
    assert receiver.bodies.qsize() == 3


def test_retries_end_if_a_receiver_keeps_failing(receiver: Receiver) -> None:
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


def test_a_missing_receiver_is_an_outcome_not_an_exception(receiver: Receiver) -> None:
    url = receiver.url
    receiver.close()

    assert deliver(url, retries=1) is Delivery.UNDELIVERED


def test_a_receiver_that_answers_byte_by_byte_holds_its_thread_for_the_timeout_only() -> None:
    outcomes: Queue[Delivery] = Queue()
    with speaking(trickle(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1000)) as port:
        webhook = Webhook(f"http://127.0.0.1:{port}", timeout_s=0.5, retry_delays_s=())
        webhook.post({"run": "AR"}, on_done=outcomes.put)
        outcome = outcomes.get(timeout=30)  # the headers alone would take 50 s
        webhook.close()

    assert outcome is Delivery.UNDELIVERED


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
    "url", ["ftp://host/x", "file:///etc/passwd", "http://", "http://host:port/", "host/path", ""]
)
def test_an_invalid_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(WebhookUrlError, match="alert webhook"):
        Webhook(url)


def test_the_refusal_does_not_repeat_the_secret_in_the_path() -> None:
    with pytest.raises(WebhookUrlError) as caught:
        Webhook("ftp://chat.example/services/T0-SECRET")

    assert "SECRET" not in str(caught.value)


def resolves_to(addresses: list[list[str]]) -> Resolve:
    """Return a fake name server that returns the answers in turn, and then the last one."""

    def resolve(_host: str, _port: int) -> list[str]:
        return addresses.pop(0) if len(addresses) > 1 else addresses[0]

    return resolve


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[fe80::1]",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::]",
        "0.0.0.0",
        "[::]",
        "224.0.0.1",
        "255.255.255.255",
        "168.63.129.16",
        "[::ffff:168.63.129.16]",
        "100.100.100.200",
        "[64:ff9b::6464:64c8]",
        "192.0.0.192",
        "[fd00:ec2::254]",
        "[fd00:ec2:0:0::23]",
        "[fd20:ce::254]",
        "[fd00:c1::a9fe:a9fe]",
        "[fd00:42::42]",
        "[fd00:a9fe:a9fe::1]",
        "100.64.0.1",
        "198.18.0.1",
        "[fec0::1]",
        "[2001:db8::1]",
    ],
)
def test_metadata_and_unusable_addresses_are_never_allowed(host: str) -> None:
    with pytest.raises(WebhookUrlError, match="cannot be a receiver"):
        Webhook(f"http://{host}/", is_internal=True)


@pytest.mark.parametrize(
    "host", ["127.1", "2130706433", "0177.0.0.1", "0x7f.0.0.1", "0x7f000001", "127.0.0.1.", "1."]
)
def test_an_obscured_address_is_refused(host: str) -> None:
    with pytest.raises(WebhookUrlError, match="usual form"):
        Webhook(f"https://{host}/", resolve=resolves_to([["127.0.0.1"]]))


@pytest.mark.parametrize("host", ["168.63.129.16", "100.100.100.200", "fd00:ec2::254"])
def test_a_name_of_a_metadata_service_is_refused_over_tls_too(host: str) -> None:
    with pytest.raises(WebhookUrlError, match="cannot be a receiver"):
        Webhook("https://hooks.internal/", is_internal=True, resolve=resolves_to([[host]]))


@pytest.mark.parametrize(
    "host", ["10.1.2.3", "172.31.0.1", "192.168.0.1", "[fd12:3456:789a::1]", "[::1]", "127.0.0.2"]
)
def test_private_and_loopback_addresses_are_receivers(host: str) -> None:
    Webhook(f"http://{host}/").close()


@pytest.mark.parametrize("scheme", ["file", "gopher", "ftp", "dict", "ldap", "data", "unix"])
def test_another_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(WebhookUrlError, match="is not http or https"):
        Webhook(f"{scheme}://127.0.0.1/x")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "fd00::1",
     "100.64.0.1", "169.254.169.254"],
)  # fmt: skip
def test_a_public_name_with_an_internal_address_is_refused(address: str) -> None:
    both = [["93.184.215.14", address]]
    with pytest.raises(WebhookUrlError, match=r"internal address|cannot be a receiver"):
        Webhook("https://hooks.example.com/", resolve=resolves_to(both))


def test_a_public_name_that_becomes_internal_later_is_refused(receiver: Receiver) -> None:
    # GIVEN a name that was public when the server started, and leads to this machine now
    port = int(receiver.url.rpartition(":")[2])
    answers = resolves_to([["93.184.215.14"], ["127.0.0.1"]])
    outcomes: Queue[Delivery] = Queue()
    webhook = Webhook(f"https://hooks.example.com:{port}/", resolve=answers)

    webhook.post({"run": "AR"}, on_done=outcomes.put)

    assert outcomes.get(timeout=TIMEOUT_S) is Delivery.UNDELIVERED
    assert receiver.bodies.empty()
    webhook.close()


def test_a_name_is_resolved_once_per_post_and_the_result_is_used(
    receiver: Receiver,
) -> None:
    # GIVEN a name server whose third answer is another address
    port = int(receiver.url.rpartition(":")[2])
    answers = resolves_to([["127.0.0.1"], ["127.0.0.1"], ["169.254.169.254"]])
    outcomes: Queue[Delivery] = Queue()
    webhook = Webhook(f"http://alertmanager:{port}/", timeout_s=TIMEOUT_S, resolve=answers)

    webhook.post({"run": "AR"}, on_done=outcomes.put)

    assert outcomes.get(timeout=TIMEOUT_S) is Delivery.DELIVERED
    webhook.close()


def test_plain_http_is_for_internal_addresses_only() -> None:
    with pytest.raises(WebhookUrlError, match="needs https"):
        Webhook("http://hooks.example.com/", resolve=resolves_to([["93.184.215.14"]]))


def test_an_operator_may_declare_a_name_internal(receiver: Receiver) -> None:
    port = int(receiver.url.rpartition(":")[2])
    url = f"http://alerts.corp.example:{port}/"
    outcomes: Queue[Delivery] = Queue()
    addresses = resolves_to([["127.0.0.1"]])
    webhook = Webhook(url, is_internal=True, timeout_s=TIMEOUT_S, resolve=addresses)

    webhook.post({"run": "AR"}, on_done=outcomes.put)

    assert outcomes.get(timeout=TIMEOUT_S) is Delivery.DELIVERED
    webhook.close()


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


def test_an_alert_becomes_a_list_of_one_labelled_alert() -> None:
    assert alertmanager_alerts(DOCUMENT) == ALERTS


def test_an_active_alert_ends_some_minutes_after_it_was_sent() -> None:
    (alert,) = alertmanager_alerts({**DOCUMENT, "resolved_ns": None, "finding": None})

    ends = datetime.fromisoformat(alert["endsAt"])
    assert timedelta(minutes=3) < ends - datetime.now(tz=UTC) <= timedelta(minutes=4)
    assert alert["annotations"] == {"summary": "MFU of job-7 fell by 20 %", "steps": "10-12"}


def test_an_alert_says_where_what_it_costs_and_what_to_do() -> None:
    more = {"hosts": ["a", "b"], "cost": "1.20 s per step (20 %)", "action": "reboot"}

    (alert,) = alertmanager_alerts({**DOCUMENT, **more})

    assert alert["annotations"].items() >= {**more, "hosts": "a, b"}.items()


def test_neighbouring_ranks_are_written_as_a_range() -> None:
    finding = {**DOCUMENT["finding"], "ranks": [1, *range(6_144, 8_192)]}

    (alert,) = alertmanager_alerts({**DOCUMENT, "finding": finding})

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


@pytest.mark.parametrize(("path", "expected"), [("/api/v2/alerts", ALERTS), ("/hook", DOCUMENT)])
def test_a_webhook_posts_in_the_form_of_its_receiver(
    receiver: Receiver, path: str, expected: object
) -> None:
    webhook = Webhook(f"{receiver.url}{path}", timeout_s=TIMEOUT_S)

    webhook.post(DOCUMENT, on_done=lambda _delivery: None)

    assert json.loads(receiver.bodies.get(timeout=TIMEOUT_S)) == expected
    webhook.close()


def test_a_signed_post_can_be_verified(receiver: Receiver) -> None:
    webhook = Webhook(receiver.url, timeout_s=TIMEOUT_S, secret=b"key")

    answer = webhook.send({"run": "AR"})
    webhook.close()
    sent = receiver.sent_headers.get(timeout=TIMEOUT_S)
    body = receiver.bodies.get(timeout=TIMEOUT_S)

    assert answer.text == "status 200"
    signed = f"{sent['x-rankscope-timestamp']}.".encode() + body
    expected = hmac.new(b"key", signed, hashlib.sha256).hexdigest()
    assert sent["x-rankscope-signature"] == f"sha256={expected}"
