from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreQueryError
from rankscope.collector.retention.removal import await_removals

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

ENDLESS = "DELETE FROM clock WHERE sleepEachRow(0.1) = 0 SETTINGS lightweight_deletes_sync = 0"


def test_it_waits_for_nothing_where_nothing_is_removed(store: Store) -> None:
    await_removals(store, ["spans", "steps"], patience_s=0)


def test_a_removal_that_takes_too_long_is_told_and_goes_on(store: Store) -> None:
    store.insert_rows("clock", [{"host": "a"}, {"host": "b"}])
    store.command(ENDLESS)

    with pytest.raises(StoreQueryError, match="table clock are still being removed after 0 s"):
        await_removals(store, ["clock"], patience_s=0)

    await_removals(store, ["clock"])
    assert store.rows("SELECT count() AS n FROM clock") == [{"n": 0}]
