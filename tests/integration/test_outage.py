"""An outage of the store during a job, and secrets in the output of all processes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.folder import used_bytes
from rankscope.collector.store.location import read_server_file
from tests.faults.cycles import NUM_RANKS, ROWS_A_BURST, WholePath

if TYPE_CHECKING:
    from tests.faults.checker import Verdict

pytestmark = pytest.mark.multiproc

NUM_BURSTS = 38
"""Bursts of 100 rows per rank: a minute of 64 rows/s. A higher rate does not change the result."""

NUM_LATE = 3
"""Bursts after the collector is back."""

CAPACITY = 64
SEGMENT_BYTES = 4096 + CAPACITY * 128
AGENT_BYTES = 256 << 10
"""Bytes of the agent besides the spool: journal and lock."""


@dataclass(frozen=True, kw_only=True)
class Outage:
    """Sizes, results and files of an outage of the collector, and after it."""

    waiting_bytes: int
    """In segments of the spool, before the collector was back."""

    agent_bytes: int
    """In the state of the agent, at the same moment."""

    verdict: Verdict
    logs: str
    ingest_token: str
    server_token: str
    figures: str
    command_lines: list[str]
    files: dict[str, bytes]
    """Content of all files of the agent and the collector, but that of the agent's token."""


@pytest.fixture(scope="module")
def outage(tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """Kill a collector with its store while ranks write; start it, and kill the agent too."""
    folder = tmp_path_factory.mktemp("outage") / "path"
    with WholePath(folder=folder, chooser=random.Random(7)) as path:
        path.kill_only("collector")
        for _ in range(NUM_BURSTS):
            path.write()
        waiting_bytes = sum(file.stat().st_size for file in path.spool.glob("run/*/seg-*"))
        agent_bytes = used_bytes(path.state)
        path.start("collector")
        for _ in range(NUM_LATE):
            path.write()
        path.kill("agent")
        path.drain()
        server = read_server_file(path.store)
        assert server is not None
        assert server.token is not None
        figures = path.ask("/metrics", Authorization=f"Bearer {server.token}") or ""
        command_lines = [
            Path(f"/proc/{path.pid_of(name)}/cmdline").read_text()
            for name in ("agent", "collector")
        ]
        own = path.folder / "agent.token"
        return Outage(
            waiting_bytes=waiting_bytes,
            agent_bytes=agent_bytes,
            verdict=path.verdict(),
            logs=path.logs(),
            ingest_token=own.read_text().strip(),
            server_token=server.token,
            figures=figures,
            command_lines=command_lines,
            files={
                str(file.relative_to(folder)): file.read_bytes()
                for file in folder.rglob("*")
                if file.is_file() and file != own
            },
        )


@pytest.mark.timeout(600)
def test_an_outage_takes_only_the_bytes_of_the_spool_and_no_row(outage: Outage) -> None:
    # The rows waited in the spool without a copy ...
    num_segments = -(-NUM_BURSTS * ROWS_A_BURST // CAPACITY)
    assert outage.waiting_bytes == NUM_RANKS * num_segments * SEGMENT_BYTES
    assert outage.agent_bytes < AGENT_BYTES
    # ... and all of them arrived once, beside those that were written later.
    assert outage.verdict.is_clean, (outage.verdict, outage.logs)
    assert outage.verdict.num_stored == (NUM_BURSTS + NUM_LATE) * NUM_RANKS * ROWS_A_BURST


@pytest.mark.timeout(600)
def test_no_token_is_in_any_file_or_output_of_agent_and_collector(outage: Outage) -> None:
    # The agent's token is in its own file only, not in the store, the log or a list of processes.
    secret = outage.ingest_token.encode()
    assert len(outage.files) > 10
    assert not [name for name, content in outage.files.items() if secret in content]
    assert outage.figures
    assert outage.ingest_token not in outage.figures
    assert not [line for line in outage.command_lines if outage.ingest_token in line]
    # The server's token is only in what it prints to the terminal.
    secret = outage.server_token.encode()
    found = {Path(name).name for name, content in outage.files.items() if secret in content}
    assert found <= {"collector.log", "server.json"}
