"""Deletion over a restart: a store that is closed and opened again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.retention.deletion import DeletedRunFilter, Deletions
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

COUNT = "SELECT count() AS n FROM spans WHERE run_id = 'gone'"


@pytest.mark.slow
def test_reading_the_whole_spool_again_restores_no_deleted_row(tmp_path: Path) -> None:
    spool_dir, url = tmp_path / "spool", f"chdb://{tmp_path / 'store'}"
    spool = SpoolBuilder(spool_dir, run_id="gone")
    spool.span("forward", step=0, start_ns=0)
    spool.span("backward", step=0, start_ns=20)
    spool.step(0, start_ns=0, duration_ns=40)
    spool.end()
    with open_store(url) as store:
        SpoolTail(spool_dir, StoreWriter(store)).poll()
        assert store.rows(COUNT) == [{"n": 2}]
        Deletions(store).delete("gone")

    # WHEN a new process reads the whole spool
    with open_store(url) as store:
        SpoolTail(spool_dir, DeletedRunFilter(StoreWriter(store), Deletions(store))).poll()
        assert store.rows(COUNT) == [{"n": 0}]
