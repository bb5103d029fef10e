from __future__ import annotations

import getpass
import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from rankscope.collector.read.alerts import StoredAlert, read_alerts, write_alert
from rankscope.collector.read.incidents import read_notes
from rankscope.collector.store.store import open_store
from rankscope.commands.app import app
from tests.support.receiver import TIMEOUT_S, MailServer, Receiver

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["alerts", *arguments])
    assert result.exception is None, result.exception
    return result.output


def test_a_test_alert_goes_to_each_receiver_and_prints_each_answer(tmp_path: Path) -> None:
    web, mail = Receiver(), MailServer()
    config = tmp_path / "alerts.toml"
    config.write_text(
        f'[[receivers]]\nname = "bot"\nurl = "{web.url}"\n'
        f'[[receivers]]\nname = "mail"\nkind = "apprise"\nurl = "{mail.url}"\n'
    )

    lines = run("test", "--config", str(config)).splitlines()
    posted = json.loads(web.bodies.get(timeout=TIMEOUT_S))
    mailed = mail.mails.get(timeout=TIMEOUT_S)
    web.close()
    mail.close()

    assert [line.split() for line in lines[-2:]] == [
        ["bot", "delivered", "status", "200"],
        ["mail", "delivered", "accepted"],
    ]
    assert posted["rule"] == "test"
    assert "nothing is wrong" in mailed


def test_a_receiver_that_is_down_fails_the_test(tmp_path: Path) -> None:
    web = Receiver()
    web.close()
    result = CliRunner().invoke(app, ["alerts", "test", "--alert-webhook", web.url])

    assert "not delivered" in result.output
    assert result.exit_code == 1


def test_silence_acknowledgement_and_end_are_stored_and_listed(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/store"
    alert = StoredAlert(
        run_id="job",
        at_ns=1,
        rule="finding",
        key="0",
        severity="warning",
        first_step=3,
        last_step=9,
        text="job: slow-compute",
        cause="slow-compute",
        ranks=(5,),
    )
    with open_store(url) as store:
        write_alert(store, alert)

    silenced = run("silence", "--run", "job", "--rank", "5", "--for", "1h", "--store", url)
    during = run("--store", url)
    name = silenced.split()[1]
    run("silence", "--end", name, "--store", url)
    run("ack", alert.name, "--store", url)
    after = run("--store", url)
    run("resolve", alert.name, "--store", url)

    assert f"silence {name}: run job, rank 5 until" in during
    assert "silenced" in during
    assert "acknowledged" in after
    assert name not in after
    with open_store(url) as store:
        (ended,) = read_alerts(store)
    assert ended.acknowledged_ns is not None
    assert ended.resolved_ns is not None


def test_a_note_is_stored_with_the_user_and_an_unknown_incident_is_refused(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/store"
    with open_store(url) as store:
        finding = {"run_id": "job", "analysed_ns": 1, "position": 2, "cause": "gc-pause"}
        store.insert_rows("findings", [finding])

    done = run("note", "job", "2", "set gc.freeze()", "--store", url)
    unknown = CliRunner().invoke(app, ["alerts", "note", "job", "0", "x", "--store", url])

    assert done == "noted about incident 2 of run job\n"
    assert "run 'job' has no incident 0" in str(unknown.exception)
    with open_store(url) as store:
        (note,) = read_notes(store, "job", 2)
    assert (note.text, note.by) == ("set gc.freeze()", getpass.getuser())
