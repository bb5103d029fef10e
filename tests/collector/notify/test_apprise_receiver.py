from __future__ import annotations

import pytest

from rankscope.collector.notify.apprise_receiver import (
    AppriseReceiver,
    ReceiverUrlError,
    format_message,
)
from tests.support.receiver import TIMEOUT_S, MailServer, Receiver

pytestmark = pytest.mark.slow

DOCUMENT = {
    "rule": "finding",
    "run": "job",
    "severity": "critical",
    "state": "firing",
    "cause": "slow-compute",
    "text": "job: slow-compute: rank 5 takes 1.5 x",
    "hosts": ["host-b"],
    "cost": "1.20 s per step (20 %)",
    "action": "docs/findings.md#slow-compute",
    "url": "http://127.0.0.1:8050/timeline?run=job&step=3&rank=5",
}


def test_a_mail_says_what_where_at_what_cost_and_what_to_do() -> None:
    server = MailServer()
    receiver = AppriseReceiver("mail", server.url)

    answer = receiver.send(DOCUMENT)
    receiver.close()
    mail = server.mails.get(timeout=TIMEOUT_S)
    server.close()

    assert (answer.is_delivered, answer.text) == (True, "accepted")
    assert "Subject: [critical] job: slow-compute" in mail
    title, body = format_message({**DOCUMENT, "state": "resolved", "alerts": [DOCUMENT, DOCUMENT]})
    assert title == "[critical resolved] job: slow-compute (+1)"
    assert body.splitlines()[:5] == [
        "job: slow-compute: rank 5 takes 1.5 x",
        "hosts: host-b",
        "cost: 1.20 s per step (20 %)",
        "action: docs/findings.md#slow-compute",
        "http://127.0.0.1:8050/timeline?run=job&step=3&rank=5",
    ]


@pytest.mark.parametrize(
    ("options", "shown"), [("", "<img src=3Dx>"), ("&format=html", "&lt;img&nbsp;src=3Dx&gt;")]
)
def test_a_name_in_a_mail_is_no_html(options: str, shown: str) -> None:
    server = MailServer()
    receiver = AppriseReceiver("mail", server.url + options)

    receiver.send({**DOCUMENT, "text": "<img src=x>"})
    receiver.close()
    mail = server.mails.get(timeout=TIMEOUT_S)
    server.close()

    assert shown in mail
    assert "<img" not in mail.partition("text/html")[2]


def test_a_mail_server_that_is_down_is_tried_again() -> None:
    first = MailServer()
    first.close()
    receiver = AppriseReceiver("mail", first.url)

    down = receiver.send(DOCUMENT)
    again = MailServer(port=first.port)
    up = receiver.send(DOCUMENT)
    receiver.close()
    again.close()

    assert (down.is_delivered, down.is_final) == (False, False)
    assert up.is_delivered


def test_a_redirect_is_not_followed() -> None:
    server = Receiver()
    server.statuses = [307]
    server.headers = {"location": f"{server.url}/elsewhere"}
    receiver = AppriseReceiver("hook", f"json://127.0.0.1:{server.port}/")

    answer = receiver.send(DOCUMENT)
    receiver.close()
    server.close()

    assert not answer.is_delivered
    assert server.bodies.qsize() == 1


def test_an_unknown_url_is_refused_without_its_secret() -> None:
    with pytest.raises(ReceiverUrlError) as caught:
        AppriseReceiver("chat", "nonsense://secret")

    assert "secret" not in str(caught.value)
