"""Alerts in a real Alertmanager, from `rankscope serve` and from a real Prometheus beside it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from rankscope.analysis.report.report import Mfu
from rankscope.collector.notify.webhook import Webhook
from rankscope.server.alerting import REPEAT_NS, Alerting
from tests.deploy.files import DEPLOY
from tests.integration.programs import TIMEOUT_S, rankscope, serving
from tests.integration.test_serve import Job
from tests.support.dashboard.builders import report
from tests.support.missing_tools import skip_for_missing
from tests.support.receiver import Receiver
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.multiproc

NS_PER_S = 1_000_000_000


@contextmanager
def running(program: str, *arguments: str, url: str) -> Iterator[httpx.Client]:
    """Run a server of Prometheus until the block ends; give a client of it."""
    found = shutil.which(program)
    if found is None:
        skip_for_missing(f"there is no {program}: run tests/deploy/install_servers.sh")
    process = subprocess.Popen([found, *arguments], stderr=subprocess.PIPE, text=True)
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        try:
            wait_until(lambda: process.poll() is not None or is_ready(client))
            if process.poll() is not None:
                raise AssertionError(process.communicate()[1])
            yield client
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").is_success
    except httpx.TransportError:
        return False


def address_of(client: httpx.Client) -> str:
    return client.base_url.netloc.decode()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def alertmanager(folder: Path, hook: Receiver) -> Iterator[httpx.Client]:
    """Run an Alertmanager with our configuration, at once and with a receiver."""
    config = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())
    config["route"] |= {"group_wait": "0s", "group_interval": "1s"}
    config["receivers"][0]["webhook_configs"] = [{"url": hook.url, "send_resolved": True}]
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    address = free_address()
    with running(
        "prometheus-alertmanager",
        f"--config.file={path}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
        url=f"http://{address}",
    ) as client:
        yield client


@contextmanager
def prometheus(folder: Path, target: str, token: Path, manager: str) -> Iterator[httpx.Client]:
    """Run a Prometheus with our rules, whose durations are seconds instead of minutes."""
    rules = (DEPLOY / "prometheus" / "rankscope.rules.yml").read_text()
    (folder / "rules.yml").write_text(re.sub(r"for: \d+m", "for: 1s", rules))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "rankscope",
                "authorization": {"credentials_file": str(token)},
                "static_configs": [{"targets": [target]}],
            }
        ],
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = free_address()
    with running(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
        url=f"http://{address}",
    ) as client:
        yield client


def active(manager: httpx.Client) -> dict[str, dict[str, Any]]:
    """Return the alerts that an Alertmanager takes for active, by name."""
    return {alert["labels"]["alertname"]: alert for alert in manager.get("/api/v2/alerts").json()}


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.fixture
def hook() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_an_alert_stays_active_while_it_is_repeated_and_ends_when_it_is_resolved(
    tmp_path: Path, empty_store: Store, hook: Receiver
) -> None:
    # GIVEN a drop of the MFU, an hour ago by the clock of the alerts
    clock = [time.time_ns() - 3600 * NS_PER_S]
    drop = replace(
        report(run="job", slow_rank=5),
        mfu=Mfu(convention="", mean=0.4, by_step=dict(enumerate([0.5] * 10 + [0.4] * 5))),
        startup_s_by_step={},
    )
    with alertmanager(tmp_path, hook) as manager:
        webhook = Webhook(f"http://{address_of(manager)}/api/v2/alerts")
        alerting = Alerting(
            empty_store,
            receivers=[webhook],
            page_url=lambda run, step, _: f"http://rankscope/run/{run}?step={step}",
            unix_ns=lambda: clock[0],
        )
        (raised,) = alerting.evaluate(drop)
        wait_until(lambda: "mfu-drop" in active(manager))
        first = active(manager)["mfu-drop"]
        noticed = json.loads(hook.bodies.get(timeout=TIMEOUT_S))

        # WHEN a minute passes
        wait_until(lambda: alerting.num_in_flight == 0)
        clock[0] += REPEAT_NS
        alerting.deliver()
        wait_until(lambda: active(manager)["mfu-drop"]["updatedAt"] != first["updatedAt"])
        repeated = active(manager)["mfu-drop"]

        # AND the drop ends
        clock[0] += NS_PER_S
        alerting.evaluate(drop, is_over=True)
        ended = json.loads(hook.bodies.get(timeout=TIMEOUT_S))
        webhook.close()

        # THEN it was active for four minutes after each message, and is over at its own time
        assert first["generatorURL"] == "http://rankscope/run/job?step=10"
        assert moment(first["endsAt"]) - moment(first["updatedAt"]) == pytest.approx(240, abs=30)
        assert moment(repeated["endsAt"]) > moment(first["endsAt"])
        assert repeated["startsAt"] == first["startsAt"]
        assert moment(first["startsAt"]) == pytest.approx(raised.at_ns / NS_PER_S, abs=0.01)
        assert noticed["status"] == "firing"
        assert (ended["status"], active(manager)) == ("resolved", {})
        (alert,) = ended["alerts"]
        assert moment(alert["endsAt"]) == pytest.approx(clock[0] / NS_PER_S, abs=0.01)


@pytest.mark.nightly
def test_prometheus_scrapes_a_served_run_and_fires_beside_rankscope(
    tmp_path: Path, hook: Receiver
) -> None:
    store, spool, config = tmp_path / "store", tmp_path / "spool", tmp_path / "alerts.toml"
    token = tmp_path / "token"
    done = rankscope("token", "create", "--role", "read", "--out", str(token), store=store)
    assert done.returncode == 0, done.stderr
    job = Job(spool)
    job.record_steps(8)
    job.record_steps(8, slow_ms=180)

    with alertmanager(tmp_path, hook) as manager:
        config.write_text(
            f'[[receivers]]\nname = "am"\nkind = "alertmanager"\nurl = "{manager.base_url}"\n'
        )
        with serving("--spool", str(spool), "--config", str(config), store=store) as server:
            address = server.url.removeprefix("http://")
            with prometheus(tmp_path, address, token, address_of(manager)) as scraper:
                # A slow rank: rankscope's own alerts, and Prometheus' by the gauges of the run.
                # The finding and the drop of the MFU that it explains are one alert of rankscope.
                own = {"finding", "mfu-drop"}
                wait_until(lambda: bool(own & active(manager).keys()))
                wait_until(lambda: "TrainingFinding" in active(manager))
                (name,) = own & active(manager).keys()
                ours, by_gauge = active(manager)[name], active(manager)["TrainingFinding"]
                groups = scraper.get("/api/v1/rules").json()["data"]["groups"]
                step = scraper.get("/api/v1/query", params={"query": "rankscope_run_step"}).json()

                # rankscope ends: only Prometheus can say so.
                server.process.terminate()
                wait_until(lambda: "RankscopeDown" in active(manager))

    assert (ours["labels"]["run"], ours["annotations"]["cause"]) == ("job", "slow-compute")
    assert "?" in ours["generatorURL"]
    assert by_gauge["labels"]["run"] == "job"
    assert by_gauge["labels"]["severity"] == "critical"
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    assert step["data"]["result"][0]["value"][1] == "15"
