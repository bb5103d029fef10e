"""Backup and restore as docs/backup.md describes them, with the embedded engine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import chdb
import pytest

from rankscope.collector.read.runs import list_runs
from rankscope.collector.read.spans import read_spans
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store import store as stores
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from tests.deploy.files import SERVER_XML, texts, xml
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "backup.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## Backup and restore\n")[1].split("\n## ")[0]
STATEMENTS = re.findall(r"^(?:BACKUP|RESTORE|SELECT|DROP)[^;]*;", SECTION, re.MULTILINE)


def record(spool: Path, run_id: str) -> None:
    builder = SpoolBuilder(spool, run_id=run_id)
    builder.span("forward", start_ns=5)
    builder.step(0, start_ns=0, duration_ns=100)
    builder.end()


@pytest.mark.slow
def test_a_restored_backup_has_what_the_store_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a store with a run, and the statements of the documents with a folder of this test
    (allowed,) = texts(xml(SERVER_XML), "backups/allowed_path")
    folder = tmp_path / "backups"
    options = stores.ENGINE_OPTIONS | {"backups.allowed_path": str(folder)}
    monkeypatch.setattr(stores, "ENGINE_OPTIONS", options)
    full, more, drill, counts, drop = (
        re.sub(r"\brankscope\b(?!_)", "default", text.replace(allowed, f"{folder}/"))
        for text in STATEMENTS
    )
    # The database of the embedded engine has no engine of its own.
    drill = drill.replace(";", " SETTINGS allow_different_database_def = true;")
    assert all(allowed in text for text in (STATEMENTS[0], STATEMENTS[1], STATEMENTS[2]))
    spool = tmp_path / "spool"
    record(spool, "first")
    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        SpoolTail(spool, StoreWriter(store)).poll()

        # WHEN it is backed up, grows, is backed up again, and that is restored beside it
        store.command(full)
        record(spool, "second")
        SpoolTail(spool, StoreWriter(store)).poll()
        store.command(more)
        store.command(drill)
        compared = store.rows(counts.rstrip(";"))
        store.command(drop)

    # THEN the drill shows the same numbers of rows; merges lower those of rows that were replaced
    by_table = {row["table"]: (row["stored"], row["restored"]) for row in compared}
    assert by_table["spans"] == (2, 2)
    assert by_table.keys() >= {"runs", "ranks", "ledger"}
    assert [table for table, num in by_table.items() if bool(num[0]) != bool(num[1])] == []

    # AND an empty store that is restored from the backup is opened as the first one was
    restore = drill.replace(" AS rankscope_drill", "")
    place = f"{tmp_path / 'restored'}?backups.allowed_path={folder}"
    with chdb.connect(place) as connection:  # type: ignore[no-untyped-call]
        connection.query(restore)
    (tmp_path / "restored").chmod(0o700)
    with open_store(f"chdb://{tmp_path / 'restored'}") as store:
        assert {row["run_id"] for row in list_runs(store)} == {"first", "second"}
        assert read_spans(store, "second")["name"].to_pylist() == ["forward"]
