"""Rollups of steps that are read in portions, and of those that cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.rollups import read_open_steps
from rankscope.collector.read.spans import SELECT_SELECTED_SPANS
from tests.support.rankscope.rollup_runs import (
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


class _ComesBetween:
    """A store that is written to after the first portion of a step was read."""

    def __init__(self, store: Store, write: Callable[[], None]) -> None:
        self._store = store
        self._write = write
        self.rows = store.rows
        self.insert_arrow, self.insert_rows = store.insert_arrow, store.insert_rows
        self._is_written = False

    def arrow(self, sql: str, parameters: dict[str, Any]) -> pa.Table:
        found = self._store.arrow(sql, parameters)
        if sql is SELECT_SELECTED_SPANS and not self._is_written:
            self._is_written = True
            self._write()
        return found


@pytest.mark.slow
def test_a_step_that_is_larger_than_a_batch_is_read_in_portions(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))

    while not untimed_rollups(store, batch_spans=2).turn():  # two of a step's four spans at once
        pass

    assert read_rolled_up(store, run_id) == computed_anew(store, run_id)
    assert read_open_steps(store, run_id, state="ended") == ()


@pytest.mark.slow
def test_a_row_that_arrives_between_two_portions_leaves_the_step_open(
    store: Store, run_id: str
) -> None:
    # GIVEN a step that is read rank by rank, and a span of rank 0 that arrives after its read
    describe(store, run_id)
    rows = span_rows(run_id, num_steps=1)
    put(store, run_id, rows[1:])
    late = _ComesBetween(store, lambda: put(store, run_id, rows[:1]))

    untimed_rollups(late, batch_spans=1).turn()  # type: ignore[arg-type]

    # THEN the next turn closes the step, with all of its rows
    while not untimed_rollups(store, batch_spans=1).turn():
        pass
    assert read_rolled_up(store, run_id) == computed_anew(store, run_id)


def test_a_step_too_large_to_be_read_whole_is_skipped_and_logged_once(
    store: Store, run_id: str
) -> None:
    describe(store, run_id)
    store.insert_rows(
        "runs",
        [
            {
                "run_id": run_id, "state": "ended", "source_format": "bytedance", "world_size": 2,
                "layout": {"dp": 2}, "created_ns": 1, "revision": 9,
            }
        ],
    )  # fmt: skip
    rows = span_rows(run_id)
    put(store, run_id, rows)
    lines: list[str] = []
    rollups = untimed_rollups(store, max_whole_spans=1, say=lines.append)

    assert rollups.turn()
    put(store, run_id, rows[4:5])  # a duplicate span, so the run is scanned again
    assert rollups.turn()

    assert read_rolled_up(store, run_id) == []
    assert lines == [
        (
            f"{run_id}: steps of more than 1 spans are not rolled up,"
            " because their format does not record groups"
        )
    ]
