"""`rankscope serve` as a process: access, storage, notifications, end."""

from __future__ import annotations

import json
import re
import signal
import stat
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rankscope.commands.alerts import list_alerts
from rankscope.commands.runs import list_findings
from rankscope.tracer.span import NONE, SpanKind
from tests.integration.programs import TIMEOUT_S, Server, serving
from tests.support.collector.spool_builder import ANCHOR_UNIX_NS, SpoolBuilder
from tests.support.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.multiproc

MS = 1_000_000
RANKS = (0, 1)
GROUP = 0xFEED
DEBUGGING = ("FLASK_DEBUG", "DASH_DEBUG", "DASH_UI", "WERKZEUG_DEBUG_PIN")


class Job:
    """Two data-parallel ranks that write a spool; the test sets the compute time of one of them.

    Args:
        spool: The spool.
        run_id: Name of the run.
        capacity: Most records of a rank, three for each step.
        anchor_unix_ns: Unix time of its begin.
    """

    def __init__(
        self,
        spool: Path,
        *,
        run_id: str = "job",
        capacity: int = 512,
        anchor_unix_ns: int = ANCHOR_UNIX_NS,
    ) -> None:
        self.ranks = [
            SpoolBuilder(
                spool, run_id=run_id, rank=rank, capacity=capacity, anchor_unix_ns=anchor_unix_ns
            )
            for rank in RANKS
        ]
        for rank in self.ranks:
            rank.group(GROUP, kind="dp-comm", name="dp", members=list(RANKS))
        self.num_steps = 0
        self.now_ns = 0

    def record_steps(self, num_steps: int, *, slow_ms: int = 100, slow_rank: int = 1) -> None:
        for _ in range(num_steps):
            self._step(slow_ms=slow_ms, slow_rank=slow_rank)

    def _step(self, *, slow_ms: int, slow_rank: int) -> None:
        step = self.num_steps
        begin = self.now_ns  # No pause between steps, which would be a data stall.
        done = begin + max(100, slow_ms) * MS + 10 * MS
        for rank, builder in enumerate(self.ranks):
            own_ns = (slow_ms if rank == slow_rank else 100) * MS
            builder.span("forward", start_ns=begin, duration_ns=own_ns, step=step, microbatch=0)
            comm = (GROUP, step, NONE, NONE, 4096, 0)
            builder.span(
                "all_reduce",
                kind=SpanKind.DP_COMM,
                start_ns=begin + own_ns,
                duration_ns=done - begin - own_ns,
                step=step,
                track="comm",
                comm=comm,
            )
            builder.step(step, start_ns=begin, duration_ns=done - begin, num_tokens=64, loss=1.0)
        self.num_steps += 1
        self.now_ns = done

    def end(self) -> None:
        for builder in self.ranks:
            builder.end()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an empty store, and with all variables that could enable a debugger."""
    store = tmp_path_factory.mktemp("served") / "store"
    with serving(store=store, **dict.fromkeys(DEBUGGING, "1")) as running:
        yield running


def test_only_the_open_paths_answer_without_the_token(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        for path in ("/healthz", "/readyz", "/login", "/_favicon.ico"):
            assert client.get(path).status_code == 200, path
        for path in ("/", "/run/x", "/timeline", "/_dash-layout", "/_dash-dependencies", "/docs"):
            assert client.get(path).status_code == 401, path
        assert client.post("/_dash-update-component", json={}).status_code == 401
        assert client.get("/_dash-layout", headers=server.bearer).status_code == 200

        page = client.get("/", params={"token": server.token}, follow_redirects=True)
        assert page.status_code == 200
        assert "token" not in str(page.url)
        assert client.get("/_dash-layout").status_code == 200


def test_no_environment_variable_enables_a_debugger(server: Server) -> None:
    with httpx.Client(base_url=server.url, headers=server.bearer, timeout=TIMEOUT_S) as client:
        # Every path of the pages returns the same frame; a console would be another document.
        frame = client.get("/").text
        console = client.get("/console")
        broken = client.post("/_dash-update-component", content=b"{")
        debugged = client.get("/", params={"__debugger__": "yes", "cmd": "resource"})

    assert console.status_code == 404 or without_end(console.text) == without_end(frame)
    for answer in (console, broken, debugged):
        assert "Traceback" not in answer.text
        assert "EVALEX" not in answer.text
    assert '"ui":true' not in frame.replace(" ", "")


def without_end(frame: str) -> str:
    """Return the frame without the random name of each visit."""
    return re.sub(r'"end_id":"[^"]*"', "", frame)


def test_a_collector_only_server_has_no_pages_and_describes_itself(tmp_path: Path) -> None:
    described = tmp_path / "store" / "server.json"
    with serving("--only", "collector", store=tmp_path / "store") as server:
        page = httpx.get(f"{server.url}/", headers=server.bearer, timeout=TIMEOUT_S)
        assert stat.S_IMODE(described.stat().st_mode) == 0o600
        assert json.loads(described.read_text())["url"] == server.url

    assert not described.exists()
    assert server.part == "collector"
    assert page.status_code == 404


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    with serving("--spool", str(spool), store=tmp_path / "store") as server:
        server.process.send_signal(number)
        _, err = server.process.communicate(timeout=TIMEOUT_S)

    assert server.part == "dashboard"
    assert server.process.returncode == 0
    # Another server of this machine may hold the first port, and a busy machine may delay a source
    # of samples; nothing else may be logged.
    chance = ("is in use", "timeout: no samples")
    logged = [line for line in err.splitlines() if not any(text in line for text in chance)]
    assert logged == ["rankscope: stopping"]


def next_alert(receiver: Receiver) -> dict[str, Any]:
    """Return the next alert that fires: a drop of the MFU, or its finding if that is first."""
    while True:
        posted: dict[str, Any] = json.loads(receiver.bodies.get(timeout=TIMEOUT_S))
        if posted["state"] == "firing":
            return posted


def test_each_fault_is_posted_once_even_after_a_restart(tmp_path: Path, receiver: Receiver) -> None:
    store, spool = tmp_path / "store", tmp_path / "spool"
    webhook = tmp_path / "webhook"
    webhook.touch(mode=0o600)
    webhook.write_text(f"{receiver.url}\n")
    arguments = ("--spool", str(spool), "--alert-webhook-file", str(webhook))
    with serving(*arguments, store=store):
        job = Job(spool)
        job.record_steps(8)
        job.record_steps(4, slow_ms=180)
        posted = next_alert(receiver)

    job.record_steps(2, slow_ms=180)  # The same drop continues while no server runs.
    job.record_steps(4, slow_ms=100)
    with serving(*arguments, store=store):
        job.record_steps(30, slow_ms=180, slow_rank=0)  # Another fault: an alert of its own.
        again = next_alert(receiver)

    assert posted["run"] == "job"
    assert posted["steps"][0] == 8
    assert posted["finding"]["ranks"] == [1]
    assert posted["cost"] == "80.0 ms per step since step 8 (42 %)"
    if posted["rule"] == "mfu-drop":
        # 64 tokens x 2 positions x 6e3 FLOPs over 2 x 5e9 FLOP/s: 0.11 s before, 0.19 s after.
        assert posted["median"] == pytest.approx(128 * 6e3 / 1e10 / 0.11)
        assert posted["mfu"] == pytest.approx(128 * 6e3 / 1e10 / 0.19)
    assert posted["url"].endswith("/timeline?run=job&step=8&rank=1&order=excess")
    assert "token" not in posted["url"]
    assert (again["steps"][0], again["ranks"]) == (18, [0])
    url = f"chdb://{store}"
    alerts = json.loads(list_alerts(as_json=True, store_url=url))["alerts"]
    assert [(alert["first_step"], alert["delivery"]) for alert in alerts] == [
        (18, "delivered"),
        (8, "delivered"),
    ]
    findings = json.loads(list_findings("job", as_json=True, store_url=url))["findings"]
    first = next(found for found in findings if found["ranks"] == [1])
    assert (first["cause"], first["onset_step"]) == ("slow-compute", 8)
    assert first["saved_s"] == pytest.approx(0.08)
