"""An outage of the store during a job, and secrets in the output of all processes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rankscope.collector.spool.folder import used_bytes
from rankscope.collector.store.location import read_server_file
from tests.faults.cycles import NUM_RANKS, ROWS_A_BURST, WholePath

pytestmark = pytest.mark.multiproc

NUM_BURSTS = 38
"""Bursts of 100 rows per rank: a minute of 64 rows/s. A higher rate does not change the result."""

CAPACITY = 64
SEGMENT_BYTES = 4096 + CAPACITY * 128
AGENT_BYTES = 256 << 10
"""Bytes of the agent besides the spool: journal and lock."""


@pytest.mark.timeout(600)
def test_an_outage_takes_only_the_bytes_of_the_spool_and_no_row(tmp_path: Path) -> None:
    with WholePath(folder=tmp_path / "path", chooser=random.Random(7)) as path:
        # GIVEN a collector that is down, with its store
        path.kill_only("collector")

        # WHEN the ranks continue to write
        for _ in range(NUM_BURSTS):
            path.write()

        # THEN the rows wait in the spool without a copy
        num_segments = -(-NUM_BURSTS * ROWS_A_BURST // CAPACITY)
        waiting = sum(file.stat().st_size for file in path.spool.glob("run/*/seg-*"))
        assert waiting == NUM_RANKS * num_segments * SEGMENT_BYTES
        assert used_bytes(path.state) < AGENT_BYTES

        # AND all of them arrive once when it is back, while more are written
        path.start("collector")
        for _ in range(3):
            path.write()
        path.drain()
        verdict = path.verdict()
        assert verdict.is_clean, (verdict, path.logs())
        assert verdict.num_stored == (NUM_BURSTS + 3) * NUM_RANKS * ROWS_A_BURST


@pytest.mark.timeout(600)
def test_no_token_is_in_any_file_or_output_of_agent_and_collector(tmp_path: Path) -> None:
    # GIVEN both, after a kill and a stop
    with WholePath(folder=tmp_path / "path", chooser=random.Random(8)) as path:
        ingest = (path.folder / "agent.token").read_text().strip()
        path.write()
        path.kill("agent")
        path.kill("collector")
        path.write()
        path.drain()
        server = read_server_file(path.store)
        assert server is not None
        assert server.token is not None
        figures = path.ask("/metrics", Authorization=f"Bearer {server.token}")
        shown = [
            (Path(f"/proc/{path.pid_of(name)}/cmdline")).read_text()
            for name in ("agent", "collector")
        ]
        assert path.verdict().is_clean

        # WHEN all their files and output are searched
        own_files = {path.folder / "agent.token"}
        files = [
            file for file in path.folder.rglob("*") if file.is_file() and file not in own_files
        ]
        texts = {file: file.read_bytes() for file in files}

    # THEN the agent's token is in its own file only, not in the store, the log or a list
    secret = ingest.encode()
    assert len(texts) > 10
    assert not [file for file, text in texts.items() if secret in text]
    assert figures
    assert ingest not in figures
    assert not [line for line in shown if ingest in line]
    # AND the server's token is only in what it prints to the terminal
    found = {file.name for file, text in texts.items() if server.token.encode() in text}
    assert found <= {"collector.log", "server.json"}
