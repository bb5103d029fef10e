from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import StoreQueryError
from rankscope.collector.retention.removal import wait_for_removals

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

ENDLESS = "DELETE FROM clock WHERE sleepEachRow(0.1) = 0 SETTINGS lightweight_deletes_sync = 0"


def test_it_does_not_wait_if_nothing_is_removed(store: Store) -> None:
    wait_for_removals(store, ["spans", "steps"], timeout_s=0)


def test_a_removal_that_takes_too_long_is_an_error_and_continues(store: Store) -> None:
    store.insert_rows("clock", [{"host": "a"}, {"host": "b"}])
    store.command(ENDLESS)

    with pytest.raises(StoreQueryError, match="table clock are still being removed after 0 s"):
        wait_for_removals(store, ["clock"], timeout_s=0)

    wait_for_removals(store, ["clock"])
    assert store.rows("SELECT count() AS n FROM clock") == [{"n": 0}]
