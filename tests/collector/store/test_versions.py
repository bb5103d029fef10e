"""Stores of the first version, the one before the current, and a future one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreVersionError
from rankscope.collector.read.runs import read_run
from rankscope.collector.read.spans import read_spans
from rankscope.collector.store import store as store_module
from rankscope.collector.store.migrations import known_migrations
from rankscope.collector.store.store import Store, open_store
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

NEWEST = known_migrations()[-1].version
SPAN = {
    "run_id": "old", "epoch": 0, "rank": 3, "step": 4, "kind": "forward", "name": "op",
    "start_ns": 10, "duration_ns": 5, "segment": 7, "row": 1,
}  # fmt: skip
RUN = {"run_id": "old", "created_ns": 10, "revision": 1}
STEPS = [
    {"run_id": "old", "step": step, "start_ns": 10, "end_ns": 30, "loss": loss}
    for step, loss in ((4, 2.5), (5, float("nan")))
]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, NEWEST - 1])
def test_a_store_of_an_earlier_version_is_migrated_with_its_rows(
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
            store.insert_rows("steps", STEPS)

    # WHEN this release opens it
    with open_store(url) as store:
        # THEN its rows can be read
        assert store.schema_version() == NEWEST
        (span,) = read_spans(store, "old").to_pylist()
        assert (span["rank"], span["step"], span["name"], span["duration_ns"]) == (3, 4, "op", 5)
        assert read_run(store, "old") is not None
        # AND an unknown loss, which was NaN, is NULL
        losses = "SELECT loss, duration_ns FROM steps WHERE run_id = 'old' ORDER BY step"
        expected = [{"loss": 2.5, "duration_ns": 20}, {"loss": None, "duration_ns": 20}]
        wait_until(lambda: store.rows(losses) == expected)


@pytest.mark.slow
def test_a_store_of_a_newer_version_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    # GIVEN a store that a newer rankscope migrated
    url = f"chdb://{tmp_path / 'store'}"
    with open_store(url) as store:
        store.insert_rows("spans", [SPAN])
        newer = {"version": NEWEST + 1, "name": "from the future"}
        store.insert_rows("schema_version", [newer])

    # WHEN this release opens it after a rollback
    words = f"has schema version {NEWEST + 1}, this rankscope knows {NEWEST}: upgrade rankscope"
    for _ in range(2):
        with pytest.raises(StoreVersionError, match=words):
            open_store(url)

    # THEN nothing in it has changed
    with Store(url, read_only=True) as store:
        assert store.schema_version() == NEWEST + 1
        assert read_spans(store, "old").num_rows == 1
