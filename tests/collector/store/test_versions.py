"""Stores of the first version and the last before ours, and of one that is to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreVersionError
from rankscope.collector.read.runs import read_run
from rankscope.collector.read.spans import read_spans
from rankscope.collector.store import store as store_module
from rankscope.collector.store.migrations import known_migrations
from rankscope.collector.store.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

NEWEST = known_migrations()[-1].version
SPAN = {
    "run_id": "old", "epoch": 0, "rank": 3, "step": 4, "kind": "forward", "name": "op",
    "start_ns": 10, "duration_ns": 5, "segment": 7, "row": 1,
}  # fmt: skip
RUN = {"run_id": "old", "created_ns": 10, "revision": 1}


@pytest.mark.parametrize("version", [1, NEWEST - 1])
def test_a_store_of_an_earlier_version_is_brought_up_with_its_rows(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a store as the release of that version left it
    url = f"chdb://{tmp_path / 'store'}"
    with monkeypatch.context() as earlier:
        earlier.setattr(store_module, "known_migrations", lambda: known_migrations()[:version])
        with open_store(url) as store:
            assert store.schema_version() == version
            store.insert_rows("spans", [SPAN])
            store.insert_rows("runs", [RUN])

    # WHEN today's opens it
    with open_store(url) as store:
        # THEN the rows are there and readable as today's are
        assert store.schema_version() == NEWEST
        (span,) = read_spans(store, "old").to_pylist()
        assert (span["rank"], span["step"], span["name"], span["duration_ns"]) == (3, 4, "op", 5)
        assert read_run(store, "old") is not None


def test_a_store_of_a_newer_version_is_refused_with_both_versions_and_left(tmp_path: Path) -> None:
    # GIVEN a store that a newer rankscope brought up
    url = f"chdb://{tmp_path / 'store'}"
    with open_store(url) as store:
        store.insert_rows("spans", [SPAN])
        newer = {"version": NEWEST + 1, "name": "from the future"}
        store.insert_rows("schema_version", [newer])

    # WHEN we were rolled back
    words = f"has schema version {NEWEST + 1}, this rankscope knows {NEWEST}: upgrade rankscope"
    for _ in range(2):
        with pytest.raises(StoreVersionError, match=words):
            open_store(url)

    # THEN nothing was changed, and the newer one finds all of it
    with Store(url, read_only=True) as store:
        assert store.schema_version() == NEWEST + 1
        assert read_spans(store, "old").num_rows == 1
