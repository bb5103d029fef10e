"""Stores at `clickhouse://`, with the embedded engine as the server."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreError, StoreQueryError
from rankscope.collector.read.runs import list_runs
from rankscope.collector.read.spans import read_spans
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.deduplicated_reads import read_stored_spans
from rankscope.collector.store.migrations import known_migrations
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from tests.deploy.servers import database_of_its_own
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("engine")
    command = [sys.executable, "-m", "tests.deploy.http_engine", str(folder), "ann", "p@ss"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"clickhouse://ann:p%40ss@127.0.0.1:{int(process.stdout.readline())}/default"
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def server_store(server: str) -> Iterator[Store]:
    with database_of_its_own(server) as url, open_store(url) as opened:
        yield opened


def test_a_run_is_written_to_a_server_and_read_back(server_store: Store, tmp_path: Path) -> None:
    builder = SpoolBuilder(tmp_path, run_id="job")
    builder.span("forward", start_ns=5)
    builder.step(0, start_ns=0, duration_ns=100)
    builder.end()

    SpoolTail(tmp_path, StoreWriter(server_store)).poll()

    assert server_store.path is None
    assert server_store.schema_version() == known_migrations()[-1].version
    assert [row["run_id"] for row in list_runs(server_store)] == ["job"]
    assert read_spans(server_store, "job")["name"].to_pylist() == ["forward"]
    assert not read_stored_spans(server_store, "job").has_repeated


def test_a_server_merges_as_configured(server_store: Store) -> None:
    tables = server_store.rows(
        "SELECT engine_full FROM system.tables"
        " WHERE database = currentDatabase() AND engine LIKE '%MergeTree'"
    )

    assert len(tables) > 20
    assert not any("concurrent_part_removal" in row["engine_full"] for row in tables)


def test_values_are_bound_and_errors_are_one_line(server_store: Store) -> None:
    hostile = "x' OR 1 = 1 -- {x:String} \\'"
    server_store.insert_rows("clock", [{"host": hostile}, {"host": "harmless"}])

    found = server_store.rows("SELECT host FROM clock WHERE host = {h:String}", {"h": hostile})
    assert found == [{"host": hostile}]
    with pytest.raises(StoreQueryError, match="nonsense") as caught:
        server_store.rows("SELECT nonsense FROM spans")
    assert "\n" not in str(caught.value)


def test_the_error_for_a_wrong_password_does_not_contain_it(server: str) -> None:
    with pytest.raises(StoreError, match="no answer from the store") as caught:
        open_store(server.replace("p%40ss", "secret-guess"))

    assert "secret-guess" not in str(caught.value)
