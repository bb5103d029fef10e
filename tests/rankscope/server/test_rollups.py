from __future__ import annotations

import itertools
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collector.errors import StoreQueryError
from rankscope.collector.read.rollups import OpenStep, batch_steps, read_open_steps
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import Retention
from rankscope.collector.retention.span_days import DAY_NS
from rankscope.server.rollups import TURN_NS, Rollups
from rankscope.sources.store_source import StoreSource
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.interrupted_store import Interrupted, interrupted_writer
from tests.support.rankscope.rollup_runs import (
    MS,
    computed_anew,
    describe,
    new_number,
    put,
    read_rolled_up,
    span_rows,
    untimed_rollups,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from rankscope.collector.store.store import Store


@pytest.fixture
def run_id() -> str:
    return f"run-{new_number()}"


@pytest.mark.slow
def test_a_closed_run_is_rolled_up_step_by_step(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))

    assert untimed_rollups(store).turn()

    found = read_rolled_up(store, run_id)
    assert found[:4] == [
        {"epoch": 0, "step": 0, "rank": rank, "kind": kind, "num_spans": 1, "num_unsplit": 0,
         "busy_ns": busy * MS, "wait_ns": wait * MS, "transfer_ns": transfer * MS,
         "exposed_ns": exposed * MS}
        for rank, kind, busy, wait, transfer, exposed in (
            (0, "dp-comm", 50, 30, 20, 50),
            (0, "forward", 40, 0, 0, 0),
            (1, "dp-comm", 20, 0, 20, 20),
            (1, "forward", 70, 0, 0, 0),
        )
    ]  # fmt: skip
    assert found == computed_anew(store, run_id)
    assert read_open_steps(store, run_id, state="ended") == ()


def test_the_newest_steps_of_a_running_job_stay_open(store: Store, run_id: str) -> None:
    describe(store, run_id, state="running")
    put(store, run_id, span_rows(run_id, num_steps=6))
    rollups = untimed_rollups(store)

    rollups.turn()
    assert {row["step"] for row in read_rolled_up(store, run_id)} == {0, 1, 2, 3}

    describe(store, run_id)
    rollups.turn()
    assert {row["step"] for row in read_rolled_up(store, run_id)} == {0, 1, 2, 3, 4, 5}


def test_late_rows_of_one_rank_change_the_waits_of_others(store: Store, run_id: str) -> None:
    describe(store, run_id)
    rows = span_rows(run_id, num_steps=1)
    late = [row for row in rows if row["rank"] == 1]
    put(store, run_id, [row for row in rows if row["rank"] == 0])
    rollups = untimed_rollups(store)
    rollups.turn()
    assert [row["num_unsplit"] for row in read_rolled_up(store, run_id)] == [1, 0]

    put(store, run_id, late)
    rollups.turn()

    assert [row["wait_ns"] for row in read_rolled_up(store, run_id)] == [30 * MS, 0, 0, 0]


def test_a_group_that_is_described_late_splits_earlier_rollups(store: Store, run_id: str) -> None:
    put(store, run_id, span_rows(run_id, num_steps=1))
    store.insert_rows("runs", [{"run_id": run_id, "state": "running", "world_size": 2}])
    store.insert_rows("runs", [{"run_id": run_id, "state": "lost", "revision": 1}])
    rollups = untimed_rollups(store)
    rollups.turn()
    assert sum(row["num_unsplit"] for row in read_rolled_up(store, run_id)) == 2

    describe(store, run_id)
    rollups.turn()

    assert sum(row["num_unsplit"] for row in read_rolled_up(store, run_id)) == 0


def test_rollups_of_fewer_rows_never_replace_those_of_more(store: Store, run_id: str) -> None:
    # GIVEN a server that read before the late rows, and writes after one that read all rows
    describe(store, run_id)
    rows = span_rows(run_id, num_steps=1)
    put(store, run_id, rows[:3])
    later = _DelayedWrites(store)
    untimed_rollups(later).turn()  # type: ignore[arg-type]
    put(store, run_id, rows[3:])
    untimed_rollups(store).turn()
    whole = read_rolled_up(store, run_id)

    # WHEN the slow server writes
    later.write()

    assert read_rolled_up(store, run_id) == whole == computed_anew(store, run_id)


def turn_of(rollups: Rollups) -> Callable[[], None]:
    """Return a function that takes a turn."""

    def turn() -> None:
        rollups.turn()

    return turn


@pytest.mark.slow
def test_late_rows_are_rolled_up_whenever_a_turn_interrupts_their_insert(
    store: Store,
) -> None:
    # GIVEN an ended run that was rolled up, and the last cut of a slow host
    for place in itertools.count():
        run_id = f"run-{new_number()}"
        describe(store, run_id)
        put(store, run_id, span_rows(run_id))
        rollups = untimed_rollups(store)
        assert rollups.turn()

        # WHEN a turn runs between any two statements that store the cut
        interrupted = Interrupted(store, turn_of(rollups), at=place)
        writer = interrupted_writer(interrupted, is_shared=False)
        writer.ingest([span_cut(run_id, 0, 3, segment=99, step=np.ones(3, np.int32))])
        assert rollups.turn()

        # THEN the next turn finds its rows
        assert read_rolled_up(store, run_id) == computed_anew(store, run_id)
        assert untimed_rollups(store).turn()
        assert read_rolled_up(store, run_id) == computed_anew(store, run_id)
        if interrupted.is_complete:
            break


@pytest.mark.slow
def test_expired_steps_keep_their_rollups_after_a_late_row(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    rollups = untimed_rollups(store)
    rollups.turn()
    whole = read_rolled_up(store, run_id)
    later = time.time_ns() + 49 * DAY_NS
    Retention(store, Deletions(store), unix_ns=lambda: later).expire()
    assert not len(StoreSource(store).spans(run_id))

    put(store, run_id, span_rows(run_id)[:1])
    rollups.turn()

    assert read_rolled_up(store, run_id) == whole


def test_another_process_does_not_roll_up_again(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    untimed_rollups(store).turn()
    recording = _RecordingStore(store)

    assert untimed_rollups(recording).turn()  # type: ignore[arg-type]

    assert not [sql for sql in recording.sql if "FROM spans" in sql]


@pytest.mark.slow
def test_a_turn_ends_at_its_deadline_and_the_next_one_continues(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    ticks = itertools.count(step=TURN_NS)  # each read of the clock is a turn later
    slow = Rollups(store, monotonic_ns=lambda: next(ticks), batch_spans=4)  # one step

    assert not slow.turn()
    assert {row["step"] for row in read_rolled_up(store, run_id)} == {0}
    assert not slow.turn()
    assert {row["step"] for row in read_rolled_up(store, run_id)} == {0, 1}
    assert slow.turn()
    assert read_rolled_up(store, run_id) == computed_anew(store, run_id)


@pytest.mark.slow
def test_work_continues_after_an_error_of_the_store(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    rollups = untimed_rollups(store)
    store.command("RENAME TABLE rollups TO rollups_renamed")
    with suppress(StoreQueryError):  # raised only if it is the same for several runs
        rollups.turn()

    store.command("RENAME TABLE rollups_renamed TO rollups")

    assert rollups.turn()
    assert read_rolled_up(store, run_id) == computed_anew(store, run_id)


def test_consecutive_steps_are_read_together_up_to_a_size() -> None:
    def steps(*places: tuple[int, int]) -> list[OpenStep]:
        return [OpenStep(epoch=e, step=s, num_spans=10, num_described=0) for e, s in places]

    found = batch_steps(steps((0, 0), (0, 1), (0, 2), (0, 4), (1, 5), (1, 6)), max_spans=20)

    assert [[(one.epoch, one.step) for one in batch] for batch in found] == [
        [(0, 0), (0, 1)], [(0, 2)], [(0, 4)], [(1, 5), (1, 6)],
    ]  # fmt: skip
    (huge,) = batch_steps([replace(steps((0, 0))[0], num_spans=10**9)], max_spans=20)
    assert len(huge) == 1


@pytest.mark.slow
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_result_does_not_depend_on_the_order_of_rows_nor_on_duplicates(
    store: Store, data: st.DataObject
) -> None:
    # GIVEN the rows of a run in any order, some of them twice, with turns in between
    run_id = f"any-{new_number()}"
    describe(store, run_id)
    rows = span_rows(run_id)
    arrivals = data.draw(st.permutations([*range(len(rows)), *range(0, len(rows), 3)]))
    cuts = data.draw(st.lists(st.integers(1, len(arrivals) - 1), max_size=3, unique=True))
    rollups = untimed_rollups(store)
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(arrivals)]):
        put(store, run_id, [rows[place] for place in arrivals[begin:end]])
        if data.draw(st.booleans()):
            rollups.turn()
    rollups.turn()

    assert read_rolled_up(store, run_id) == computed_anew(store, run_id)


class _DelayedWrites:
    """A store that holds back rollups until `write` is called."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: list[pa.Table] = []
        self._rows: list[dict[str, Any]] = []
        self.rows, self.arrow = store.rows, store.arrow

    def insert_arrow(self, table: str, rows: pa.Table) -> None:
        assert table == "rollups"
        self._tables.append(rows)

    def insert_rows(self, table: str, rows: list[dict[str, Any]]) -> None:
        assert table == "closed_steps"
        self._rows += rows

    def write(self) -> None:
        for rows in self._tables:
            self._store.insert_arrow("rollups", rows)
        self._store.insert_rows("closed_steps", self._rows)


class _RecordingStore:
    """A store that records the statements it gets."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sql: list[str] = []

    def rows(self, sql: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        self.sql.append(sql)
        return self._store.rows(sql, parameters)
