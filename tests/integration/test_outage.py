"""An outage of the store while the job goes on, as processes, and what anybody hears of secrets."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rankscope.collector.agent.quota import used_bytes
from rankscope.collector.store.location import read_server_file
from tests.faults.cycles import NUM_RANKS, ROWS_A_BURST, WholePath

pytestmark = pytest.mark.multiproc

NUM_BURSTS = 38
"""Of 100 rows a rank: a minute of 64 rows/s; 64,000 a second only make the same longer."""

CAPACITY = 64
SEGMENT_BYTES = 4096 + CAPACITY * 128
AGENT_BYTES = 256 << 10
"""What the agent may keep beside the spool: its journal and lock."""


@pytest.mark.timeout(600)
def test_an_outage_costs_the_spools_own_bytes_and_no_row(tmp_path: Path) -> None:
    with WholePath(folder=tmp_path / "path", chooser=random.Random(7)) as path:
        # GIVEN a collector that is gone, with its store
        path.kill_only("collector")

        # WHEN the ranks write on
        for _ in range(NUM_BURSTS):
            path.write()

        # THEN the rows wait as they were written and no copy of them is made
        num_segments = -(-NUM_BURSTS * ROWS_A_BURST // CAPACITY)
        waiting = sum(file.stat().st_size for file in path.spool.glob("run/*/seg-*"))
        assert waiting == NUM_RANKS * num_segments * SEGMENT_BYTES
        state = path.spool / ".agent"
        assert used_bytes(state) < AGENT_BYTES

        # AND all of them arrive, once, when it is back, while more are written
        path.start("collector")
        for _ in range(3):
            path.write()
        path.drain()
        verdict = path.verdict()
        assert verdict.is_clean, (verdict, path.told())
        assert verdict.num_stored == (NUM_BURSTS + 3) * NUM_RANKS * ROWS_A_BURST


@pytest.mark.timeout(600)
def test_no_token_is_in_anything_that_a_run_of_agent_and_collector_leaves(tmp_path: Path) -> None:
    # GIVEN both, which come through a kill and a stop
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

        # WHEN all that they wrote is looked through
        apart = {path.folder / "agent.token"}
        files = [file for file in path.folder.rglob("*") if file.is_file() and file not in apart]
        texts = {file: file.read_bytes() for file in files}

    # THEN the agent's token is nowhere but in its own file, not in the store, the log or a list
    secret = ingest.encode()
    assert len(texts) > 10
    assert not [file for file, text in texts.items() if secret in text]
    assert figures
    assert ingest not in figures
    assert not [line for line in shown if ingest in line]
    # and the server's own stands in what it prints for the terminal alone
    told = {file.name for file, text in texts.items() if server.token.encode() in text}
    assert told <= {"collector.log", "server.json"}
