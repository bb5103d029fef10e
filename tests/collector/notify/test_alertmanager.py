from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.notify.webhook import Webhook, alertmanager_alerts, is_alertmanager
from tests.support.receiver import TIMEOUT_S, Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT: dict[str, Any] = {
    "rule": "mfu-drop",
    "run": "job-7",
    "steps": [10, 12],
    "finding": {
        "cause": "slow-compute",
        "ranks": [5, 6],
        "steps": [9, 12],
        "confidence": 0.9,
        "evidence": "rank 5 computes 1.5 x as long",
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
            "first_step": "10",
            "cause": "slow-compute",
            "severity": "warning",
        },
        "annotations": {
            "summary": "MFU of job-7 fell by 20 %",
            "steps": "10-12",
            "ranks": "5, 6",
            "evidence": "rank 5 computes 1.5 x as long",
        },
        "generatorURL": "https://here/run/job-7",
    }
]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


def test_an_alert_becomes_a_list_of_one_labelled_alert() -> None:
    assert alertmanager_alerts(DOCUMENT) == ALERTS


def test_neighbouring_ranks_are_told_as_a_range() -> None:
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
def test_an_alertmanager_is_known_by_its_path(url: str, *, expected: bool) -> None:
    assert is_alertmanager(url) is expected


@pytest.mark.parametrize(("path", "expected"), [("/api/v2/alerts", ALERTS), ("/hook", DOCUMENT)])
def test_a_webhook_posts_in_the_form_that_its_receiver_takes(
    receiver: Receiver, path: str, expected: object
) -> None:
    webhook = Webhook(f"{receiver.url}{path}", timeout_s=TIMEOUT_S)

    webhook.post(DOCUMENT, on_done=lambda _delivery: None)

    assert json.loads(receiver.bodies.get(timeout=TIMEOUT_S)) == expected
    webhook.close()
