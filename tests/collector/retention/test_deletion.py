from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.errors import RunDeletedError, RunNameError
from rankscope.collector.read.runs import list_runs, read_run, read_run_names
from rankscope.collector.retention.deletion import REFRESH_NS, DeletedRunFilter, Deletions
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store
    from tests.collector.conftest import FakeClock

pytestmark = pytest.mark.slow

RUN_TABLES = (
    "runs", "ranks", "groups", "spans", "steps", "microbatches", "events", "findings", "ledger",
    "bad_rows", "samples", "manifests", "attempts", "owners", "expired", "rollups", "closed_steps",
    "pictures", "heartbeats", "reports", "kernels", "annotations", "host_checks", "kept_spans",
    "step_spans", "merged_ledger", "segment_totals", "run_totals",
)  # fmt: skip
"""All tables whose rows belong to a run. A new table must be added here."""


def fill(store: Store, run_id: str, tables: tuple[str, ...] = ("runs", "spans")) -> None:
    """Put one row of the run into these tables."""
    for table in tables:
        at = {"at_ns": time.time_ns()} if table == "attempts" else {}  # older ones are removed
        store.insert_rows(table, [{"run_id": run_id, **at}])


def num_rows(store: Store, run_id: str) -> dict[str, int]:
    """Return the number of a run's rows by table; tables without any are left out."""
    found = store.rows(
        "SELECT _table AS table, count() AS n FROM merge(currentDatabase(), '^[a-z_]*$')"
        " WHERE run_id = {run_id:String} AND table != 'deletions' AND NOT match(table, '_to_')"
        " GROUP BY table",
        {"run_id": run_id},
    )
    return {row["table"]: row["n"] for row in found}


def test_the_list_of_tables_with_runs_is_complete(store: Store) -> None:
    found = store.rows(
        "SELECT table FROM system.columns"
        " WHERE database = currentDatabase() AND name = 'run_id' AND table NOT LIKE '%\\_to\\_%'"
        " ORDER BY table"
    )

    assert [row["table"] for row in found] == sorted((*RUN_TABLES, "deletions"))


def test_deleting_a_run_removes_its_rows_from_every_table(store: Store, run_id: str) -> None:
    neighbour = f"{run_id}-neighbour"
    fill(store, run_id, RUN_TABLES)
    fill(store, neighbour, RUN_TABLES)

    deletion = Deletions(store).delete(run_id)

    # The views have added the inserted rows to the totals.
    assert deletion.num_rows.keys() == set(RUN_TABLES)
    assert num_rows(store, run_id) == {}
    assert num_rows(store, neighbour).keys() == set(RUN_TABLES)


def test_deleting_a_run_frees_its_bytes(store: Store, run_id: str) -> None:
    def num_stored() -> int:
        found = store.rows(
            "SELECT sum(rows) AS n FROM system.parts WHERE table = 'spans' AND active"
        )
        return int(found[0]["n"])

    # Rows that other tests deleted may be freed at any moment, so this run has many more.
    store.insert_rows("spans", [{"run_id": run_id, "row": row} for row in range(5000)])
    assert num_stored() >= 5000

    Deletions(store).delete(run_id)

    wait_until(lambda: num_stored() < 5000)


def test_the_tombstone_is_written_before_the_first_row_is_removed(
    store: Store, run_id: str
) -> None:
    fill(store, run_id)
    deletions = Deletions(_DiesAtDelete(store))  # type: ignore[arg-type]

    with pytest.raises(_DiedError):
        deletions.delete(run_id)

    # GIVEN a process that died there THEN another process does not show the run ...
    assert num_rows(store, run_id)
    assert Deletions(store).is_deleted(run_id)
    assert run_id not in read_run_names(store)
    assert run_id not in [row["run_id"] for row in list_runs(store)]
    assert read_run(store, run_id).epochs == []
    # ... and the next sweep removes the rest of it, and returns late rows only.
    assert run_id in Deletions(store).sweep()
    assert num_rows(store, run_id) == {}
    assert Deletions(store).sweep() == ()


def test_a_second_deletion_keeps_the_first_time_and_removes_late_rows(
    store: Store, run_id: str
) -> None:
    fill(store, run_id)
    first = Deletions(store, unix_ns=lambda: 5).delete(run_id)
    store.insert_rows("spans", [{"run_id": run_id}])

    again = Deletions(store, unix_ns=lambda: 9).delete(run_id)

    assert (first.at_ns, again.at_ns) == (5, 5)
    assert again.num_rows == {"spans": 1}


def test_rows_that_arrive_after_the_tombstone_are_swept(store: Store, run_id: str) -> None:
    fill(store, run_id)
    deletions = Deletions(store)
    deletions.delete(run_id)
    store.insert_rows("spans", [{"run_id": run_id, "row": 1}, {"run_id": run_id, "row": 2}])
    store.insert_rows("runs", [{"run_id": run_id, "world_size": 2}])

    assert run_id not in read_run_names(store)
    assert deletions.sweep() == (run_id,)
    assert num_rows(store, run_id) == {}


def test_a_deletion_by_another_process_is_known_within_a_second(
    store: Store, run_id: str, clock: FakeClock
) -> None:
    here = Deletions(store, monotonic_ns=clock)
    assert not here.is_deleted(run_id)

    Deletions(store).delete(run_id)

    clock.now_ns += REFRESH_NS
    assert here.is_deleted(run_id)


def test_the_error_for_a_deleted_run_has_the_time_of_its_deletion(
    store: Store, run_id: str
) -> None:
    deletions = Deletions(store, unix_ns=lambda: 1_700_000_000_000_000_000)
    deletions.check(run_id)
    deletions.delete(run_id)

    with pytest.raises(RunDeletedError, match="deleted at 2023-11-14 22:13:20 UTC") as caught:
        deletions.check(run_id)
    assert caught.value.run_id == run_id


@pytest.mark.parametrize("name", ["", "a b", "x' OR 1=1 --", "../x"])
def test_an_invalid_run_name_deletes_nothing(store: Store, name: str) -> None:
    with pytest.raises(RunNameError):
        Deletions(store).delete(name)


def test_samples_of_hosts_and_clocks_are_kept(store: Store, run_id: str) -> None:
    store.insert_rows("samples", [{"run_id": "", "host": run_id, "name": "x"}])
    store.insert_rows("clock", [{"host": run_id}])
    fill(store, run_id)

    Deletions(store).delete(run_id)

    bound = {"host": run_id}
    for table in ("samples", "clock"):
        sql = "SELECT count() AS n FROM {table:Identifier} WHERE host = {host:String}"
        assert store.rows(sql, {**bound, "table": table}) == [{"n": 1}]


def test_a_run_deleted_while_it_is_written_stays_deleted(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # GIVEN a rank whose first step is stored
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    neighbour = SpoolBuilder(tmp_path, run_id=f"{run_id}-neighbour")
    deletions = Deletions(store)
    sink = DeletedRunFilter(StoreWriter(store), deletions)
    tail = SpoolTail(tmp_path, sink, grace_ns=0)
    spool.span("forward", step=0, start_ns=0)
    spool.span("forward", step=1, start_ns=50)
    tail.poll()
    tail.poll()
    assert num_rows(store, run_id)["spans"] == 2

    # WHEN the run is deleted while its rank continues
    deletions.delete(run_id)
    spool.span("forward", step=2, start_ns=90)
    neighbour.span("forward", step=0, start_ns=0)
    spool.end()
    neighbour.end()
    progress = tail.poll()

    # THEN none of its rows is stored, and those of another run in the same batch are
    assert num_rows(store, run_id) == {}
    assert num_rows(store, f"{run_id}-neighbour")["spans"] == 1
    assert progress.problems == ()


class _DiedError(Exception):
    """Simulates the death of the process."""


class _DiesAtDelete:
    """A store whose process dies at its first delete."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def rows(self, sql: str, parameters: Row | None = None) -> list[Row]:
        return self._store.rows(sql, parameters)

    def insert_rows(self, table: str, rows: list[Row]) -> None:
        self._store.insert_rows(table, rows)

    def command(self, sql: str, parameters: Row | None = None) -> None:
        raise _DiedError(sql)
