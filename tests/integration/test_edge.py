"""`rankscope serve` for other hosts: TLS, and no secrets in its output."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankscope.collector.http.tokens import Role, make_token, write_tokens
from tests.integration.programs import COMMAND, TIMEOUT_S, environment, rankscope, serving
from tests.support.collector.authority import Authority

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiproc

NAME = "localhost"
CANARY = "canary-" + "z" * 40


def test_over_tls_it_serves_clients_that_trust_it_and_its_own_host(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue(NAME)
    token = kept_token(tmp_path / "tokens.json", Role.READ)
    with serving(
        *("--host", "0.0.0.0", "--tls-cert", str(files.cert), "--tls-key", str(files.key)),
        store=tmp_path / "store",
        RANKSCOPE_TOKENS=str(tmp_path / "tokens.json"),
    ) as server:
        port = server.url.rpartition(":")[2]
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        bearer = {"authorization": f"Bearer {token}"}
        with httpx.Client(
            base_url=f"https://{NAME}:{port}", verify=trusting, timeout=TIMEOUT_S
        ) as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/", headers=bearer).status_code == 200
            figures = client.get("/metrics", headers=bearer).text
            cookie = client.get("/", params={"token": server.token}).headers["set-cookie"]
        assert "; Secure" in cookie
        names = {family.name for family in text_string_to_metric_families(figures)}
        assert {
            "rankscope_build_info",
            "rankscope_certificate_expiry_timestamp_seconds",
            "rankscope_connections",
            "rankscope_http_requests",
            "rankscope_ingest_cuts",
            "rankscope_loop_up",
            "rankscope_store_rows",
            "rankscope_store_up",
        } <= names
        check_conventions(figures)
        # A command on this host reaches the store through the server, without a certificate.
        listed = rankscope("runs", "--json", store=tmp_path / "store")
        assert listed.returncode == 0, listed.stderr


def check_conventions(figures: str) -> None:
    """Check the names of metrics with Prometheus' own tool, where it is installed."""
    found = shutil.which("promtool")
    if found is not None:
        done = subprocess.run(
            [found, "check", "metrics"], input=figures, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_secret_is_in_any_output(tmp_path: Path) -> None:
    # GIVEN a server whose log goes to a journal
    tokens = tmp_path / "tokens.json"
    token = kept_token(tokens, Role.INGEST)
    more = {"RANKSCOPE_TOKENS": str(tokens), "RANKSCOPE_STORE": f"chdb://{tmp_path / 'store'}"}
    with (
        subprocess.Popen(
            [*COMMAND, "serve", "--log-json"],
            env=environment(tmp_path / "store", **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.terminate)
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        while json.loads(lines[-1])["event"] != "serving":
            lines.append(process.stderr.readline())
        url = json.loads(lines[-1])["url"]
        own = json.loads((tmp_path / "store" / "server.json").read_text())["token"]
        # WHEN valid and invalid secrets are sent in every possible way
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            bearer = {"authorization": f"Bearer {own}"}
            for secret in (CANARY, token):
                client.get("/", headers={"authorization": f"Bearer {secret}"})
                client.get("/", headers={"cookie": f"rankscope_session_8050={secret}"})
                client.get("/", params={"token": secret})
                client.get(f"/{secret}" if secret is token else "/x%0d%0a%1b[31m")
                client.post("/login", data={"token": secret})
                client.post("/v1/spans", content=secret.encode(), headers=bearer)
                client.post("/_dash-update-component", json={"output": secret}, headers=bearer)
            figures = client.get("/metrics", headers=bearer).text
            asked = client.post("/", content=b"SELECT 1", headers=bearer)
        command_line = f"/proc/{process.pid}/cmdline"
        with open(command_line, encoding="utf-8") as file:  # noqa: PTH123  # not a real file
            shown = file.read()
        process.terminate()
        out, err = process.communicate(timeout=TIMEOUT_S)

    # THEN each line is one event, and none holds a secret; nor do figures and process list
    assert asked.status_code == 200
    events = [json.loads(line) for line in [*lines, *err.splitlines()]]
    reasons = {event.get("reason") for event in events if event["event"] == "refused"}
    assert {"no-token", "wrong-role", "wrong-login"} <= reasons
    everything = "".join(lines) + out + err + figures + shown
    for secret in (own, token, CANARY):
        assert secret not in everything
    assert out == ""


def kept_token(path: Path, role: Role) -> str:
    """Return a token whose hash is in the file at ``path``."""
    token, record = make_token(
        [], role=role, run_prefix="", holder="test", days=1, now_ns=time.time_ns()
    )
    write_tokens(path, [record])
    return token
