"""Alerts of a server that is killed, to receivers that are killed: each gets each alert once."""

from __future__ import annotations

import json
from collections import defaultdict
from email import message_from_string, policy
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.commands.alerts import list_alerts
from tests.integration.programs import TIMEOUT_S, serving
from tests.integration.test_serve import Job
from tests.support.receiver import MailServer, Receiver
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path
    from queue import Queue

pytestmark = [pytest.mark.multiproc, pytest.mark.nightly]


def stored(store: Path) -> list[dict[str, Any]]:
    text = list_alerts(as_json=True, store_url=f"chdb://{store}")
    found: list[dict[str, Any]] = json.loads(text)["alerts"]
    return found


def drain(bodies: Queue[bytes]) -> list[dict[str, Any]]:
    return [json.loads(bodies.get_nowait()) for _ in range(bodies.qsize())]


def test_each_alert_reaches_receivers_that_were_killed_from_servers_that_were_killed(
    tmp_path: Path,
) -> None:
    store, spool, config = tmp_path / "store", tmp_path / "spool", tmp_path / "alerts.toml"
    web, mail = Receiver(), MailServer()
    config.write_text(
        "group_interval_s = 1.0\n"
        f'[[receivers]]\nname = "bot"\nurl = "{web.url}"\n'
        f'[[receivers]]\nname = "mail"\nkind = "apprise"\nurl = "{mail.url}"\n'
    )
    arguments = ("--spool", str(spool), "--config", str(config))

    # GIVEN a server that is killed while one receiver has the message and has not answered, and the
    # other is down
    mail.close()
    web.hold.clear()
    job = Job(spool)
    job.record_steps(8)
    job.record_steps(4, slow_ms=180)
    with serving(*arguments, store=store) as server:
        unanswered = json.loads(web.bodies.get(timeout=TIMEOUT_S))
        server.process.kill()
        server.process.wait(TIMEOUT_S)
    web.close()

    # WHEN the next one starts beside receivers that are down, they come back, and it is killed too
    with serving(*arguments, store=store) as server:
        web, mail = Receiver(port=web.port), MailServer(port=mail.port)
        wait_until(
            lambda: {alert["delivery"] for alert in stored(store)} == {"delivered"},
            timeout_s=TIMEOUT_S,
        )
        server.process.kill()
        server.process.wait(TIMEOUT_S)
    fired = drain(web.bodies)
    mails = [mail.mails.get_nowait() for _ in range(mail.mails.qsize())]

    # AND a third one sees the end of the job
    with serving(*arguments, store=store):
        job.end()
        wait_until(
            lambda: (
                all(alert["resolved_ns"] is not None for alert in stored(store))
                and {alert["delivery"] for alert in stored(store)} == {"delivered"}
            ),
            timeout_s=TIMEOUT_S,
        )
    ended = drain(web.bodies)
    web.close()
    mail.close()

    # THEN what had no answer was sent again unchanged, and nothing else twice
    names = {alert["name"] for alert in stored(store)}
    assert fired[0] == unanswered
    messages = defaultdict(list)
    for message in fired[1:]:
        for alert in message["alerts"]:
            messages[alert["name"]].append(message["id"])
    assert {alert["name"] for message in fired for alert in message["alerts"]} == names
    assert all(len(ids) == 1 for ids in messages.values())
    assert not messages.keys() & {alert["name"] for alert in unanswered["alerts"]}
    bodies = [message_from_string(text, policy=policy.default).get_body() for text in mails]
    texts = [body.get_content() for body in bodies if body is not None]
    for alert in stored(store):
        assert sum(alert["text"] in text for text in texts) == 1
    assert {message["state"] for message in ended} == {"resolved"}
    assert sorted(alert["name"] for message in ended for alert in message["alerts"]) == sorted(
        names
    )
