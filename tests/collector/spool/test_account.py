"""The account of records: produced = stored + dropped by reason + still buffered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.trace.account import RecordAccount
from rankscope.collector.read.runs import read_run
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.spool import DropReason
from tests.support.collector.spool_builder import SpoolBuilder, this_host

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store
    from tests.collector.conftest import FakeClock


def test_produced_is_stored_plus_torn_plus_dropped(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("a")
    spool.claim()
    spool.span("negative", duration_ns=-1)
    spool.step(0, start_ns=0, duration_ns=1)
    spool.microbatch(0, step=0, num_tokens=1, sum_squared_lengths=1)
    spool.drop(DropReason.SPOOL_FULL, 3)
    spool.drop(DropReason.BAD_ARGUMENT, 2)
    spool.publish(produced=8, written=5)
    spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    rows = read_run(store, run_id)
    (account,) = rows.account
    assert account == {
        "epoch": 0, "rank": 0, "num_spans": 1, "num_steps": 1, "num_microbatches": 1,
        "num_torn": 1, "num_bad": 1,
    }  # fmt: skip
    assert rows.ranks[0]["dropped"] == {"spool-full": 3, "bad-argument": 2}
    info = StoreSource(store).run_info(run_id)
    # A bad argument loses no record: it is stored under a replacement name.
    assert (
        info.accounts[0, 0]
        == info.account
        == RecordAccount(
            produced=8, stored=3, dropped={"invalid": 1, "spool-full": 3, "torn": 1}, buffered=0
        )
    )
    assert info.warnings == (
        "1 invalid records were stored in table bad_rows: ends before it begins",
    )


def test_rows_that_are_claimed_and_not_yet_written_are_buffered(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)
    spool.span("a")
    spool.claim()
    spool.publish(produced=2, written=2)
    tail.poll()
    clock.advance_s(0.1)
    tail.poll()

    found = StoreSource(store).run_info(run_id).account
    assert found == RecordAccount(produced=2, stored=1, buffered=1)


def test_a_rank_that_runs_reports_its_count_once_a_minute(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)

    def published() -> int:
        tail.poll()
        (row,) = read_run(store, run_id).ranks
        return int(row["produced"])

    spool.span("a")
    spool.publish(produced=1, written=1)
    assert published() == 1
    spool.span("b")
    spool.publish(produced=2, written=2)
    clock.advance_s(58)
    assert published() == 1
    clock.advance_s(1)
    assert published() == 1
    # What is stored was produced, whatever the last report says.
    assert StoreSource(store).run_info(run_id).account.produced == 2
    clock.advance_s(1)
    assert published() == 2


def test_the_number_produced_is_unknown_if_a_process_did_not_count(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    counting = SpoolBuilder(tmp_path, run_id=run_id, rank=0, world_size=2)
    counting.span("a")
    counting.publish(produced=1, written=1)
    counting.end()
    other = SpoolBuilder(tmp_path, run_id=run_id, rank=1, world_size=2)
    other.span("b")
    other.drop(DropReason.NO_SEGMENT, 4)
    other.end()
    SpoolTail(tmp_path, StoreWriter(store)).poll()

    info = StoreSource(store).run_info(run_id)
    assert info.accounts[0, 0].produced == 1
    assert info.accounts[0, 1] == RecordAccount(stored=1, dropped={"no-segment": 4})
    assert info.account == RecordAccount(stored=2, dropped={"no-segment": 4})
