"""An assistant asks over the protocol, as its client does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import TextContent

from rankscope.assistant.answers import MAX_CHARS, bounded
from rankscope.commands.simulate import simulate_run
from rankscope.simulation import SimulateOptions

if TYPE_CHECKING:
    from pathlib import Path

SLOW = SimulateOptions(scenario="slow-compute", run_id="r", num_steps=12, num_ranks=8)


def ask(store: str, *questions: tuple[str, dict[str, Any]]) -> list[tuple[bool, str]]:
    """Return of each answer whether it is an error, and its text."""

    async def talk() -> list[tuple[bool, str]]:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "rankscope", "mcp", "--store", store],
            env=dict(os.environ),
        )
        answers = []
        async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            for name, arguments in questions:
                answer = await session.call_tool(name, arguments)
                (content,) = answer.content
                assert isinstance(content, TextContent)
                answers.append((answer.is_error, content.text))
        return answers

    return asyncio.run(talk())


@pytest.mark.slow
def test_an_assistant_finds_the_host_to_drain_and_cannot_write(tmp_path: Path) -> None:
    # GIVEN a run with a slow rank
    store = f"chdb://{tmp_path}/store"
    simulate_run(replace(SLOW, store_url=store))

    # WHEN an assistant asks for it, and tries to change the store, and to read a file
    (_, runs), (_, verdict), (_, counts), *refused = ask(
        store,
        ("runs", {}),
        ("verdict", {"run": "r"}),
        ("query", {"sql": "SELECT uniqExact(rank) AS num FROM spans WHERE run_id = 'r'"}),
        ("query", {"sql": "INSERT INTO runs (run_id) VALUES ('mine')"}),
        ("query", {"sql": "SELECT * FROM file('/etc/hostname')"}),
        ("evidence", {"run": "r", "finding": 9}),
        ("verdict", {"run": "other"}),
    )

    # THEN it knows the host, why, and what to do
    assert [run["run"] for run in json.loads(runs)["runs"]] == ["r"]
    finding = json.loads(verdict)["findings"][0]
    (host,) = finding["hosts"]
    assert finding["cause"] == "slow-compute"
    assert any(host in command for command in finding["what_to_do"]["commands"])
    assert not finding["host_checks"][0]["is_confirmed"]
    assert json.loads(counts) == {"columns": ["num"], "rows": [[8]], "has_more_rows": False}
    # ... and the rest is refused, with the reason
    assert all(is_error for is_error, _ in refused)
    assert [
        reason in text
        for reason, (_, text) in zip(
            ("only read", "file is refused", "no 9", "no run 'other'"), refused, strict=True
        )
    ] == [True] * 4


def test_an_answer_is_bounded_and_says_what_it_leaves_out() -> None:
    answer = bounded({"ranks": [{"rank": rank, "waits_on": [*range(99)]} for rank in range(12288)]})

    assert len(json.dumps(answer)) <= MAX_CHARS
    assert answer["ranks"][-1] == f"... and {12288 - len(answer['ranks']) + 1:,} more"
    assert answer["ranks"][0]["waits_on"][-1].startswith("... and ")
