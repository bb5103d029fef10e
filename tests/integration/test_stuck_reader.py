"""A statement that the engine cannot cancel blocks neither its client nor the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.integration.programs import TIMEOUT_S, serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiproc

# One block of 65,536 expensive rows, which would take some ten minutes.
STUCK = (
    "SELECT sum(damerauLevenshteinDistance(repeat('a', 4000 + number % 2), repeat('b', 4000)))"
    " FROM numbers(65536)"
)


@pytest.mark.nightly
def test_a_server_with_a_statement_that_cannot_be_cancelled_answers_and_ends(
    tmp_path: Path,
) -> None:
    with serving(store=tmp_path / "store") as server:
        # WHEN a statement with a limit of one second cannot be cancelled
        answer = httpx.post(
            server.url,
            params={"max_execution_time": "1"},
            content=STUCK,
            headers=server.bearer,
            timeout=TIMEOUT_S,
        )

        # THEN its client gets an error, others are answered, and the server ends when terminated
        assert (answer.status_code, answer.headers["x-clickhouse-exception-code"]) == (408, "159")
        other = httpx.post(server.url, content="SELECT 1", headers=server.bearer, timeout=TIMEOUT_S)
        assert other.text == "1\n"
        server.process.terminate()
        assert server.process.wait(TIMEOUT_S) == 0
        assert server.process.stderr is not None
        assert "exiting although a statement still runs" in server.process.stderr.read()
