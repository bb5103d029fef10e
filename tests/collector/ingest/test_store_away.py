"""Answers of ingest while the store, or its disk, cannot take rows."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.collector.errors import StoreQueryError
from rankscope.collector.store.store import Store
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.serving import serving
from tests.support.collector.stored import shown


class FailingStore(Store):
    """The same store; its next inserts of spans fail with the errors in ``failures``."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.url)
        self.failures: list[StoreQueryError] = []
        self.is_after = False

    def insert_arrow(self, table: str, rows: Any) -> None:  # noqa: ANN401 -- an Arrow table
        if table == "spans" and self.failures:
            error = self.failures.pop(0)
            if self.is_after:
                super().insert_arrow(table, rows)
            raise error
        super().insert_arrow(table, rows)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


PASSING = {
    "too many parts": 252,
    "memory": 241,
    "read-only table": 242,
    "disk full": 243,
    "fsync failed": 76,
    "table is gone": 60,
    "column is gone": 16,
    "took too long": 159,
    "too many statements": 202,
    "network too slow": 209,
    "no answer": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after the rows were in"])
def test_a_passing_failure_of_the_store_is_503_and_a_retry_is_stored_once(
    store: Store, run_id: str, *, is_after: bool
) -> None:
    clock = Clock()
    with FailingStore(store) as failing, serving(failing, monotonic_s=clock) as served:
        failing.is_after = is_after
        for name, code in PASSING.items():
            of_case = f"{run_id}-{name.replace(' ', '-')}"
            cut = span_cut(of_case, 0, 3)
            failing.failures = [StoreQueryError("no", code=code)]

            refused = served.ship(cut)
            too_soon = served.ship(cut)
            assert served.service.why_not_ready() == "no"
            clock.now_s += 3
            later = served.ship(cut)
            assert served.service.why_not_ready() is None

            assert (refused.status_code, too_soon.status_code) == (503, 503), name
            assert int(refused.headers["retry-after"]) == 2
            assert int(too_soon.headers["retry-after"]) == 2
            assert later.status_code == 200, name
            assert shown(store, of_case) == ["s0", "s1", "s2"], name


def test_a_body_that_the_store_rejects_stops_no_other(store: Store, run_id: str) -> None:
    """Rows that pass our checks and that the engine rejects."""
    with FailingStore(store) as failing, serving(failing) as served:
        failing.failures = [StoreQueryError("bad data", code=117)]

        alone = served.ship(span_cut(run_id, 0, 3))
        other = served.ship(span_cut(run_id, 3, 5))

    assert alone.status_code == 422
    assert "bad data" in alone.text
    assert other.status_code == 200
    assert shown(store, run_id) == ["s3", "s4"]


@pytest.mark.slow
def test_a_nearly_full_disk_pauses_ingest_until_there_is_room(store: Store, run_id: str) -> None:
    if store.path is None:
        pytest.skip("a server keeps its own disk")
    clock, room, said = Clock(), [10 << 20], list[str]()
    with serving(store, monotonic_s=clock, free=lambda _: room[0], say=said.append) as served:
        refused = served.ship(span_cut(run_id, 0, 3))
        assert served.resume(run_id=run_id).status_code == 200  # reading still works
        room[0] = 10 << 30
        clock.now_s += 5
        taken = served.ship(span_cut(run_id, 0, 3))

    assert (refused.status_code, taken.status_code) == (503, 200)
    assert "10 MiB free" in said[0]
    assert said[-1] == "ingest has resumed"
    assert len(said) == 2
    assert "MiB" not in refused.text  # no detail of the machine is sent


RENAMED = (
    ["RENAME TABLE steps TO steps_away", "RENAME TABLE spans TO spans_away"],
    ["RENAME TABLE spans_away TO spans", "RENAME TABLE steps_away TO steps"],
)
"""Any statement on the tables fails."""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["tables", "column"])
def test_what_was_dropped_pauses_ingest_until_it_is_back(
    run_id: str, store: Store, what: str
) -> None:
    """As while another version migrates the tables: the rows are good, and must not be parked."""
    asked = "SELECT type FROM system.columns WHERE table = 'spans' AND name = 'depth'"
    (column,) = store.rows(f"{asked} AND database = currentDatabase() LIMIT 1")
    added = f"ALTER TABLE spans ADD COLUMN depth {column['type']}"
    drops, returns = (
        RENAMED if what == "tables" else (["ALTER TABLE spans DROP COLUMN depth"], [added])
    )
    clock, cut = Clock(), span_cut(run_id, 0, 3)
    with serving(store, monotonic_s=clock) as served:
        for statement in drops:
            store.command(statement)
        try:
            refused = served.ship(cut)
        finally:
            for statement in returns:
                store.command(statement)
        clock.now_s += 5
        taken = served.ship(cut)

    assert (refused.status_code, taken.status_code) == (503, 200)
    assert shown(store, run_id) == ["s0", "s1", "s2"]
