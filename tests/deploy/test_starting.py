"""Start of two collectors on one server, and of one on a server that is not ready."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.errors import StoreQueryError, StoreUnreachableError
from rankscope.collector.store.location import parse_store_url
from rankscope.collector.store.migrations import known_migrations
from rankscope.collector.store.store import RETRY_DELAYS_S, migrate, open_store
from tests.integration.programs import COMMAND, TIMEOUT_S, environment
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

NEWEST = known_migrations()[-1].version


class FakeServer:
    """Fake server that records statements, and refuses some, as a lagging replica does."""

    url = "clickhouse://fake"

    def __init__(self, *, num_refusals: int = 0, location: str = "clickhouse://fake/db") -> None:
        self.location = parse_store_url(location)
        self.statements: list[str] = []
        self.versions: list[int] = []
        self._num_refusals = num_refusals

    def schema_version(self) -> int:
        return max(self.versions, default=0)

    def command(self, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
        if self._num_refusals and sql.startswith("ALTER"):
            self._num_refusals -= 1
            raise StoreQueryError("Code: 517. DB::Exception: CANNOT_ASSIGN_ALTER", code=517)
        self.statements.append(sql)

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self.versions += [row["version"] for row in rows]


def test_a_change_that_another_collector_is_making_is_retried() -> None:
    server, pauses = FakeServer(num_refusals=2), list[float]()

    assert migrate(server, sleep=pauses.append) == NEWEST  # type: ignore[arg-type]  # fake store

    assert pauses == [0.5, 1.0]
    assert sorted(set(server.versions)) == list(range(1, NEWEST + 1))


def test_a_change_that_the_other_collector_finished_is_not_sent_again() -> None:
    # GIVEN a server that refuses once, and another collector that finishes during the pause
    server = FakeServer(num_refusals=1)
    said = list[int]()

    def finish(_delay_s: float) -> None:
        server.versions.append(NEWEST)
        said.append(len(server.statements))

    # WHEN the tables are migrated
    assert migrate(server, sleep=finish) == NEWEST  # type: ignore[arg-type]  # fake store

    # THEN no statement was sent after that
    assert [len(server.statements)] == said


def test_a_server_that_keeps_refusing_is_an_error_after_the_last_pause() -> None:
    pauses = list[float]()

    with pytest.raises(StoreQueryError, match="517"):
        migrate(FakeServer(num_refusals=9), sleep=pauses.append)  # type: ignore[arg-type]

    assert pauses == list(RETRY_DELAYS_S)


def test_an_embedded_store_has_one_owner_and_is_not_tried_again() -> None:
    store = FakeServer(num_refusals=1, location="chdb:///a")

    with pytest.raises(StoreQueryError):
        migrate(store, sleep=pytest.fail)  # type: ignore[arg-type]  # fake store


def test_a_server_that_does_not_answer_is_an_error_of_its_own() -> None:
    with pytest.raises(StoreUnreachableError, match="Connection refused"):
        open_store(f"clickhouse://ann:secret@127.0.0.1:{fixed_port()}/default")


@pytest.mark.multiproc
@pytest.mark.slow  # three programs start
def test_a_collector_waits_for_a_store_that_starts_after_it(tmp_path: Path) -> None:
    # GIVEN a collector whose store does not answer
    port = fixed_port()
    url = f"clickhouse://ann:secret@127.0.0.1:{port}/default"
    command = [*COMMAND, "serve", "--only", "collector", "--port", str(fixed_port())]
    with subprocess.Popen(
        command,
        env=environment(tmp_path / "unused", RANKSCOPE_STORE=url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as collector:
        assert collector.stderr is not None
        assert collector.stdout is not None
        waiting = collector.stderr.readline()

        # WHEN the store starts
        engine = [sys.executable, "-m", "tests.deploy.http_engine", str(tmp_path / "engine")]
        with subprocess.Popen(
            [*engine, "ann", "secret", str(port)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        ) as store:
            serving = collector.stdout.readline()
            collector.terminate()
            said = [waiting, *collector.stderr]
            collector.wait(TIMEOUT_S)
            assert store.stdin is not None
            store.stdin.close()

    # THEN the collector has said so once, and serves
    (line,) = (line for line in said if "trying again for 5 minutes" in line)
    assert "the store's server does not answer (Connection refused)" in line
    assert not any("secret" in line for line in said)
    assert serving.startswith("collector: http://127.0.0.1:")
