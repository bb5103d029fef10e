from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.errors import StoreError
from rankscope.collector.read.runs import read_events, read_run
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import Store
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from tests.deploy.servers import url_of
from tests.support.collector.spool_builder import SpoolBuilder, this_host
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tests.collector.conftest import FakeClock

pytestmark = pytest.mark.slow


def test_a_restarted_tail_continues_in_the_middle_of_a_segment(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("a", start_ns=1)
    spool.span("b", start_ns=2)
    before = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock).poll()
    spool.span("c", start_ns=3)
    spool.end()

    after = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock).poll()

    # The newest row of a live segment waits for a second poll: "b" came with the restart.
    assert (before.num_spans, after.num_spans) == (1, 2)
    assert names_of(store, run_id) == ["a", "b", "c"]


def test_the_newest_row_of_a_live_segment_is_read_at_the_second_poll(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.span("a")
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)

    assert tail.poll().num_spans == 0
    clock.advance_s(0.001)
    assert tail.poll().num_spans == 0  # too soon for the second poll
    clock.advance_s(0.1)
    assert tail.poll().num_spans == 1


def test_the_newest_row_leaves_with_the_others_if_the_poll_lasts_long_enough(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    for name in ("a", "b", "c"):
        spool.span(name)
    ticks = count(10**12, 10**7)
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=lambda: next(ticks))

    progress = tail.poll()

    assert (progress.num_cuts, progress.num_spans) == (1, 3)
    assert tail.poll().num_cuts == 0
    assert names_of(store, run_id) == ["a", "b", "c"]


class DyingStore(Store):
    """A store that fails once, after it inserted the rows and before it updates the ledger."""

    def __init__(self, store: Store) -> None:
        super().__init__(url_of(store))
        self._num_inserts = 0

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        if table == "ledger":
            self._num_inserts += 1
            if self._num_inserts == 2:
                raise StoreError("power cut")
        super().insert_rows(table, rows)


def test_rows_whose_acknowledgement_was_lost_show_once_after_a_restart(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("a")
    spool.span("b", start_ns=5)
    spool.end()
    store.command(
        "SYSTEM STOP MERGES spans"
    )  # else the copies may be merged before they are counted
    try:
        with DyingStore(store) as dying, pytest.raises(StoreError, match="power cut"):
            SpoolTail(tmp_path, StoreWriter(dying)).poll()

        SpoolTail(tmp_path, StoreWriter(store)).poll()

        copies = "SELECT count() AS n FROM spans WHERE run_id = {r:String} SETTINGS final = 0"
        raw = store.rows(copies, {"r": run_id})
    finally:
        store.command("SYSTEM START MERGES spans")
    assert raw == [{"n": 4}]  # stored twice ...
    assert names_of(store, run_id) == ["a", "b"]  # ... and shown once
    assert read_run(store, run_id).account[0]["num_spans"] == 2


def test_a_sink_that_fails_once_gets_the_same_cut_and_events_again(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span("a")
    spool.event("note", "hello", at_ns=5, data={})
    spool.end()
    with DyingStore(store) as dying:
        tail = SpoolTail(tmp_path, StoreWriter(dying))

        with pytest.raises(StoreError, match="power cut"):
            tail.poll()
        tail.poll()

    assert names_of(store, run_id) == ["a"]
    assert [event["kind"] for event in read_events(store, run_id)] == ["exit", "note"]
    assert StoreSource(store).run_info(run_id).epochs[0].ranks[0].exit_state == "ended"


def test_a_row_that_is_not_committed_counts_as_torn_after_the_grace_time(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.span("a", start_ns=1)
    torn = spool.claim()
    spool.span("c", start_ns=3)
    spool.span("d", start_ns=4)
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)

    assert tail.poll().num_spans == 1
    clock.advance_s(1.9)
    assert tail.poll().num_spans == 0
    clock.advance_s(0.2)
    progress = tail.poll()

    assert torn == 1
    assert (progress.num_spans, progress.num_torn) == (1, 1)  # "d" waits for a second poll
    clock.advance_s(0.1)
    assert tail.poll().num_spans == 1
    assert names_of(store, run_id) == ["a", "c", "d"]
    assert StoreSource(store).run_info(run_id).account.dropped == {"torn": 1}


def test_a_row_committed_within_the_grace_time_is_stored(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    late = spool.claim()
    spool.span("b", start_ns=2)
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)
    tail.poll()
    spool.span("late", row=late, start_ns=1)
    spool.end()

    progress = tail.poll()

    assert (progress.num_spans, progress.num_torn) == (2, 0)
    assert names_of(store, run_id) == ["late", "b"]
