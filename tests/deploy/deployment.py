"""Trial of a deployment that docker-compose.yml has started on this host.

    AGENT=/path/to/rankscope python -m tests.deploy.deployment

An agent sends the run of docs/spool_example.py; then the pages, Prometheus and Grafana must have
it. It needs the standard library only. `.github/workflows/containers.yml` runs it; it was never run
where this was developed, since there are no containers.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

SECRETS = ROOT / "deploy" / "secrets"
TIMEOUT_S = 180


def fetch(url: str, authorization: str = "") -> bytes:
    """Return the body of an answer 200, whose certificate is of the deployment's CA."""
    trusted = ssl.create_default_context(cafile=str(SECRETS / "tls" / "ca.crt"))
    request = urllib.request.Request(url)
    if authorization:
        request.add_header("Authorization", authorization)
    context = trusted if url.startswith("https:") else None
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        body: bytes = answer.read()
    return body


def wait_for(what: str, is_true: Callable[[], bool]) -> None:
    """Wait until a function returns true; errors of the network count as false."""
    end_s = time.monotonic() + TIMEOUT_S
    reason = ""
    while time.monotonic() < end_s:
        try:
            if is_true():
                print(f"{what}: yes", flush=True)
                return
        except OSError as error:
            reason = str(error)
        time.sleep(2)
    sys.exit(f"{what}: not within {TIMEOUT_S} s {reason}")


def query(expression: str) -> list[dict[str, Any]]:
    """Return the result of a query of Prometheus."""
    answer = json.loads(fetch(f"http://127.0.0.1:9090/api/v1/query?query={expression}"))
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def has_source(uid: str, account: str) -> bool:
    """Return whether Grafana gets answers from a data source."""
    health = f"http://127.0.0.1:3000/api/datasources/uid/{uid}/health"
    return bool(json.loads(fetch(health, account))["status"] == "OK")


def main() -> None:
    """Send a run, and look for it everywhere."""
    read = f"Bearer {(SECRETS / 'tokens' / 'prometheus.token').read_text().strip()}"
    lines = (ROOT / ".env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    account = base64.b64encode(f"admin:{variables['GRAFANA_PASSWORD']}".encode()).decode()
    grafana = f"Basic {account}"

    with tempfile.TemporaryDirectory() as folder:
        spool = f"{folder}/spool"
        subprocess.run([sys.executable, str(ROOT / "docs" / "spool_example.py"), spool], check=True)
        agent = subprocess.Popen(
            [os.environ["AGENT"], "agent", "--spool", spool, "--state", f"{folder}/state",
             "--collector", "https://localhost:8443", "--ca", str(SECRETS / "tls" / "ca.crt")],
            env={**os.environ, "RANKSCOPE_TOKEN_FILE": str(SECRETS / "tokens" / "agents.token")},
        )  # fmt: skip
        try:
            wait_for(
                "the pages list the run",
                lambda: b"example" in fetch("https://localhost:8050/export/runs.csv", read),
            )
        finally:
            agent.terminate()
            agent.wait(60)
    wait_for(
        "Prometheus scrapes all servers",
        lambda: {value["value"][1] for value in query('up{job="rankscope"}')} == {"1"},
    )
    wait_for("the store answers", lambda: query("min(rankscope_store_up)")[0]["value"][1] == "1")
    search = "http://127.0.0.1:3000/api/search?type=dash-db"
    wait_for(
        "Grafana has both dashboards",
        lambda: (
            {"rankscope", "rankscope-metrics"}
            <= {found["uid"] for found in json.loads(fetch(search, grafana))}
        ),
    )
    for source in ("rankscope", "rankscope-metrics"):
        wait_for(f"the data source {source} works", partial(has_source, source, grafana))
    print("1 passed, 0 failed", flush=True)


if __name__ == "__main__":
    main()
