from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collector.errors import StoreQueryError
from rankscope.collector.read.rollups import OpenStep, batch_steps, read_open_steps
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import DAY_NS, Retention
from rankscope.collector.store.store import Store, open_store
from rankscope.server.rollups import TURN_NS, Rolling
from rankscope.sources.store_source import StoreSource
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.interrupted_store import Interrupted, interrupted_writer
from tests.support.rankscope.rolling_rig import (
    MS,
    describe,
    from_scratch,
    new_number,
    patient,
    put,
    rolled,
    span_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path_factory.mktemp('store')}") as opened:
        yield opened


@pytest.fixture
def run_id() -> str:
    return f"run-{new_number()}"


def test_a_closed_run_is_rolled_up_step_by_step(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))

    assert patient(store).turn()

    found = rolled(store, run_id)
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
    assert found == from_scratch(store, run_id)
    assert read_open_steps(store, run_id, state="ended") == ()


def test_the_newest_steps_of_a_run_that_goes_on_stay_open(store: Store, run_id: str) -> None:
    describe(store, run_id, state="running")
    put(store, run_id, span_rows(run_id, num_steps=6))
    rolling = patient(store)

    rolling.turn()
    assert {row["step"] for row in rolled(store, run_id)} == {0, 1, 2, 3}

    describe(store, run_id)
    rolling.turn()
    assert {row["step"] for row in rolled(store, run_id)} == {0, 1, 2, 3, 4, 5}


def test_late_rows_change_what_others_waited(store: Store, run_id: str) -> None:
    describe(store, run_id)
    rows = span_rows(run_id, num_steps=1)
    late = [row for row in rows if row["rank"] == 1]
    put(store, run_id, [row for row in rows if row["rank"] == 0])
    rolling = patient(store)
    rolling.turn()
    assert [row["num_unsplit"] for row in rolled(store, run_id)] == [1, 0]

    put(store, run_id, late)
    rolling.turn()

    assert [row["wait_ns"] for row in rolled(store, run_id)] == [30 * MS, 0, 0, 0]


def test_a_group_that_is_told_late_splits_what_was_rolled_up_before(
    store: Store, run_id: str
) -> None:
    put(store, run_id, span_rows(run_id, num_steps=1))
    store.insert_rows("runs", [{"run_id": run_id, "state": "running", "world_size": 2}])
    store.insert_rows("runs", [{"run_id": run_id, "state": "lost", "revision": 1}])
    rolling = patient(store)
    rolling.turn()
    assert sum(row["num_unsplit"] for row in rolled(store, run_id)) == 2

    describe(store, run_id)
    rolling.turn()

    assert sum(row["num_unsplit"] for row in rolled(store, run_id)) == 0


def test_a_computation_that_saw_less_never_replaces_one_that_saw_more(
    store: Store, run_id: str
) -> None:
    # GIVEN a server that read before the late rows and writes after one that read all
    describe(store, run_id)
    rows = span_rows(run_id, num_steps=1)
    put(store, run_id, rows[:3])
    later = _WritesLater(store)
    patient(later).turn()  # type: ignore[arg-type]
    put(store, run_id, rows[3:])
    patient(store).turn()
    whole = rolled(store, run_id)

    # WHEN the slow one writes
    later.write()

    assert rolled(store, run_id) == whole == from_scratch(store, run_id)


def turn_of(roller: Rolling) -> Callable[[], None]:
    """Return what takes a turn."""

    def turn() -> None:
        roller.turn()

    return turn


def test_rows_of_a_run_that_has_ended_are_rolled_up_whenever_a_turn_falls_into_their_storing(
    store: Store,
) -> None:
    # GIVEN a run that has ended and was rolled up, and the last cut of a host that is behind
    for place in itertools.count():
        run_id = f"run-{new_number()}"
        describe(store, run_id)
        put(store, run_id, span_rows(run_id))
        roller = patient(store)
        assert roller.turn()

        # WHEN a turn comes between any two statements that store it
        interrupted = Interrupted(store, turn_of(roller), at=place)
        writer = interrupted_writer(interrupted, is_shared=False)
        writer.ingest([span_cut(run_id, 0, 3, segment=99, step=np.ones(3, np.int32))])
        assert roller.turn()

        # THEN the next one finds its rows
        assert rolled(store, run_id) == from_scratch(store, run_id)
        assert patient(store).turn()
        assert rolled(store, run_id) == from_scratch(store, run_id)
        if interrupted.is_complete:
            break


def test_what_expired_keeps_its_rollups_when_a_late_row_comes(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    rolling = patient(store)
    rolling.turn()
    whole = rolled(store, run_id)
    later = time.time_ns() + 49 * DAY_NS
    Retention(store, Deletions(store), unix_ns=lambda: later).expire()
    assert not len(StoreSource(store).spans(run_id))

    put(store, run_id, span_rows(run_id)[:1])
    rolling.turn()

    assert rolled(store, run_id) == whole


def test_another_process_leaves_alone_what_is_done(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    patient(store).turn()
    asked = _Asked(store)

    assert patient(asked).turn()  # type: ignore[arg-type]

    assert not [sql for sql in asked.sql if "FROM spans" in sql]


def test_a_turn_ends_in_time_and_the_next_one_goes_on(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    ticks = itertools.count(step=TURN_NS)  # each look at the clock is a turn later
    slow = Rolling(store, monotonic_ns=lambda: next(ticks), batch_spans=4)  # a step's

    assert not slow.turn()
    assert {row["step"] for row in rolled(store, run_id)} == {0}
    assert not slow.turn()
    assert {row["step"] for row in rolled(store, run_id)} == {0, 1}
    assert slow.turn()
    assert rolled(store, run_id) == from_scratch(store, run_id)


def test_a_table_that_is_away_is_told_and_work_goes_on_when_it_is_back(
    store: Store, run_id: str
) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))
    rolling = patient(store)
    store.command("RENAME TABLE rollups TO rollups_away")
    with pytest.raises(StoreQueryError, match="rollups"):
        rolling.turn()

    store.command("RENAME TABLE rollups_away TO rollups")

    assert rolling.turn()
    assert rolled(store, run_id) == from_scratch(store, run_id)


def test_neighbouring_steps_are_read_together_up_to_a_size() -> None:
    def steps(*places: tuple[int, int]) -> list[OpenStep]:
        return [OpenStep(epoch=e, step=s, num_spans=10, num_described=0) for e, s in places]

    found = batch_steps(steps((0, 0), (0, 1), (0, 2), (0, 4), (1, 5), (1, 6)), max_spans=20)

    assert [[(one.epoch, one.step) for one in batch] for batch in found] == [
        [(0, 0), (0, 1)], [(0, 2)], [(0, 4)], [(1, 5), (1, 6)],
    ]  # fmt: skip
    (huge,) = batch_steps([replace(steps((0, 0))[0], num_spans=10**9)], max_spans=20)
    assert len(huge) == 1


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_order_with_duplicates_and_late_rows_gives_what_from_scratch_does(
    store: Store, data: st.DataObject
) -> None:
    # GIVEN the rows of a run in any order, some of them twice, rolled up at any moment between
    run_id = f"any-{new_number()}"
    describe(store, run_id)
    rows = span_rows(run_id)
    arrivals = data.draw(st.permutations([*range(len(rows)), *range(0, len(rows), 3)]))
    cuts = data.draw(st.lists(st.integers(1, len(arrivals) - 1), max_size=3, unique=True))
    rolling = patient(store)
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(arrivals)]):
        put(store, run_id, [rows[place] for place in arrivals[begin:end]])
        if data.draw(st.booleans()):
            rolling.turn()
    rolling.turn()

    assert rolled(store, run_id) == from_scratch(store, run_id)


class _WritesLater:
    """A store that keeps back what is rolled up, until it is told to write."""

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


class _Asked:
    """A store that remembers what it was asked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sql: list[str] = []

    def rows(self, sql: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        self.sql.append(sql)
        return self._store.rows(sql, parameters)
