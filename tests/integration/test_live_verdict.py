"""A job watched while it trains: one alert, and one answer wherever a person looks."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rankscope.analysis.report.exchange import read_report
from rankscope.commands.alerts import list_alerts
from rankscope.commands.analyze import AnalyzeOptions, analyze_stored
from rankscope.commands.runs import list_findings
from tests.integration.programs import TIMEOUT_S, Server, serving
from tests.integration.test_serve import Job
from tests.support.receiver import Receiver
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiproc

ONSET = 30
PRICE = "40.0 ms per step since step 30 (27 %)"
"""Rank 1 computes 140 ms where it computed 100; with the transfer of 10 ms a step takes 150 ms."""


def last_step(server: Server) -> int:
    """Return the last step of the report that the pages show; -1 before the first one."""
    answer = httpx.get(
        f"{server.url}/v1/report",
        params={"run_id": "job", "version": version("rankscope")},
        headers=server.bearer,
        timeout=TIMEOUT_S,
    )
    return read_report(answer.text).steps[-1] if answer.status_code == 200 else -1


def verdict(store: Path) -> str:
    text = analyze_stored(AnalyzeOptions(run_id="job", store_url=f"chdb://{store}"))
    return " ".join(text.partition("\n\n")[0].split())


def test_a_constant_fault_is_one_alert_with_one_onset_and_one_price(tmp_path: Path) -> None:
    store, spool, receiver = tmp_path / "store", tmp_path / "spool", Receiver()
    webhook = tmp_path / "webhook"
    webhook.touch(mode=0o600)
    webhook.write_text(f"{receiver.url}\n")
    with serving(
        "--spool", str(spool), "--alert-webhook-file", str(webhook), store=store
    ) as server:
        job = Job(spool)
        job.record_steps(ONSET)
        job.record_steps(20, slow_ms=140)
        fired: dict[str, Any] = json.loads(receiver.bodies.get(timeout=TIMEOUT_S))
        job.record_steps(40, slow_ms=140)
        wait_until(lambda: last_step(server) >= 80, timeout_s=TIMEOUT_S)
        live = verdict(store)
        job.record_steps(30, slow_ms=140)
        job.end()
        resolved: dict[str, Any] = json.loads(receiver.bodies.get(timeout=TIMEOUT_S))
        ended = verdict(store)
    url = f"chdb://{store}"
    alerts = json.loads(list_alerts(as_json=True, store_url=url))["alerts"]
    findings = json.loads(list_findings("job", as_json=True, store_url=url))["findings"]
    receiver.close()

    assert (fired["state"], fired["cause"], fired["ranks"]) == ("firing", "slow-compute", [1])
    assert (fired["steps"][0], fired["cost"]) == (ONSET, PRICE)
    assert (resolved["state"], resolved["name"]) == ("resolved", fired["name"])
    assert receiver.bodies.empty()
    assert [alert["name"] for alert in alerts] == [fired["name"]]
    for text in (live, ended):
        assert text.startswith("Rank 1 ")
        assert f"in steps {ONSET} to " in text
        assert f"would save {PRICE}" in text
    (found,) = findings
    assert (found["cause"], found["onset_step"], found["last_step"]) == ("slow-compute", ONSET, 119)
    assert found["saved_s"] == pytest.approx(0.04)
