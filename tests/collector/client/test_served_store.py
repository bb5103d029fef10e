"""A store that is read through the server that holds it."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from rankscope import open_run
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.client.served_store import ServedStore, find_server, open_for_reading
from rankscope.collector.errors import StoreError, StoreHeldError, StoreQueryError
from rankscope.collector.store.location import SERVER_FILE, write_server_file
from rankscope.commands.alerts import list_alerts
from rankscope.commands.analyze import AnalyzeOptions, analyze_stored
from rankscope.commands.runs import list_findings, list_runs
from rankscope.commands.simulate import simulate_run
from rankscope.server.served_report import fetch_report
from rankscope.simulation import SimulateOptions
from tests.integration.programs import rankscope, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from tests.integration.programs import Server

pytestmark = pytest.mark.multiproc


@dataclass(frozen=True)
class Held:
    """A store with one simulated run that a server holds, and what was read before it did."""

    folder: Path
    server: Server
    printed: list[str]
    spans: pa.Table
    verdict: str

    @property
    def url(self) -> str:
        return f"chdb://{self.folder}"


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("served") / "store"
    url = f"chdb://{folder}"
    options = SimulateOptions(scenario="slow-compute", run_id="sim", num_ranks=8, num_steps=8)
    simulate_run(replace(options, store_url=url))
    printed = command_outputs(url)
    with open_run("sim", store=url) as run:
        spans, verdict = run.spans(), run.verdict
    with serving(store=folder) as server:
        yield Held(folder, server, printed, spans, verdict)


def command_outputs(url: str) -> list[str]:
    """Return the outputs of the reading commands; the analysis stores the verdict of `runs`."""
    return [
        analyze_stored(AnalyzeOptions(run_id="sim", as_json=False, store_url=url)),
        analyze_stored(AnalyzeOptions(run_id="sim", as_json=True, store_url=url)),
        list_runs(as_json=False, store_url=url),
        list_alerts(as_json=True, store_url=url),
        list_findings("sim", as_json=True, store_url=url),
    ]


def test_commands_print_the_same_while_a_server_holds_the_store(held: Held) -> None:
    alone, served = held.printed, command_outputs(held.url)
    server = find_server(held.url)
    assert server is not None
    shown = fetch_report(server, "sim")
    as_process = rankscope("runs", store=held.folder)
    with pytest.raises(UnknownRunError, match="sim"):
        analyze_stored(AnalyzeOptions(run_id="unknown", as_json=True, store_url=held.url))

    # Where the proof is shown differs: at the server's address, or once one runs.
    proofs = re.compile(r"proof: .*?\n\n", re.DOTALL)
    assert [proofs.sub("", text) for text in served] == [proofs.sub("", text) for text in alone]
    assert shown is not None
    assert shown.findings[0].cause == "slow-compute"
    assert json.loads(alone[1])["findings"][0]["cause"] == "slow-compute"
    assert (as_process.stdout, as_process.stderr) == (alone[2] + "\n", "")


def test_alerts_are_silenced_through_the_server_that_holds_the_store(held: Held) -> None:
    silenced = rankscope("alerts", "silence", "--run", "sim", "--for", "1h", store=held.folder)
    listed = rankscope("alerts", store=held.folder)
    wrong = rankscope("alerts", "ack", "unknown", store=held.folder)

    assert silenced.returncode == 0, silenced.stderr
    assert f"silence {silenced.stdout.split()[1]}: run sim until" in listed.stdout
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_a_notebook_reads_through_the_server_and_can_change_nothing(held: Held) -> None:
    with open_run("sim", store=held.url) as run:
        assert run.verdict == held.verdict
        assert run.spans().to_pylist() == held.spans.to_pylist()
    with open_for_reading(held.url) as store:
        assert isinstance(store, ServedStore)
        with pytest.raises(StoreError, match="accepts no changes"):
            store.insert_rows("clock", [{"host": "h"}])
        with pytest.raises(StoreError, match="accepts no changes"):
            store.command("TRUNCATE TABLE runs")
        with pytest.raises(StoreQueryError, match="code: 497"):
            store.rows("SELECT * FROM system.users")


def test_a_server_that_does_not_answer_raises_the_usual_error(held: Held) -> None:
    server_file = held.folder / SERVER_FILE
    written = server_file.read_text()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        silent = f"http://127.0.0.1:{bound.getsockname()[1]}"
    wrongs = (
        {"url": silent},
        {"token": "another"},
        {"token": None},
        {"url": "http://127.0.0.1:notaport"},
    )
    try:
        for wrong in wrongs:
            server_file.write_text(json.dumps({**json.loads(written), **wrong}))
            with pytest.raises(StoreHeldError) as caught:
                open_for_reading(held.url)
            assert caught.value.holder_pid == held.server.process.pid
            assert "stop it, or pass another --store" in str(caught.value)
    finally:
        server_file.write_text(written)


def test_a_store_without_a_server_is_opened_directly(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_for_reading(f"chdb://{path}") as store:
        assert not isinstance(store, ServedStore)
        write_server_file(path, url="http://127.0.0.1:1", token="left behind")
    assert find_server(f"chdb://{path}") is not None  # this process is alive
    with open_for_reading(f"chdb://{path}") as store:
        assert not isinstance(store, ServedStore)
    assert find_server("clickhouse://user@host/db") is None
