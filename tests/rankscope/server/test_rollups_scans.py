"""Steps of a running job that the scans for open steps cover."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.rollups import SELECT_OPEN, SELECT_OPEN_FINAL
from rankscope.server.rollups import Rollups
from tests.support.rankscope.rollup_runs import (
    computed_anew,
    describe,
    put,
    read_rolled_up,
    span_rows,
)

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

RUN = "job"
S = 1_000_000_000


class RecordingStore:
    """A store that records the first step of each scan for open steps."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.firsts: list[int] = []
        self.arrow, self.insert_arrow = store.arrow, store.insert_arrow
        self.insert_rows = store.insert_rows

    def rows(self, sql: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        if sql in (SELECT_OPEN, SELECT_OPEN_FINAL) and parameters is not None:
            self.firsts.append(parameters["first"])
        return self._store.rows(sql, parameters)


def num_spans(store: Store, step: int) -> int:
    return sum(row["num_spans"] for row in read_rolled_up(store, RUN) if row["step"] == step)


@pytest.mark.slow
def test_a_running_job_is_scanned_fully_once_a_minute(empty_store: Store) -> None:
    # GIVEN a run that grows by five steps at a time, the first of which lacks a row
    describe(empty_store, RUN, state="running")
    late, *others = span_rows(RUN, num_steps=20)
    now_ns = [0]
    recording = RecordingStore(empty_store)
    rollups = Rollups(recording, monotonic_ns=lambda: now_ns[0])  # type: ignore[arg-type]
    for at_s, first in ((0, 0), (20, 5), (40, 10), (50, 15)):
        now_ns[0] = at_s * S
        put(empty_store, RUN, [row for row in others if first <= row["step"] < first + 5])
        assert rollups.turn()

    # THEN the scan at 50 s begins with the steps that were open at 20 s, then the newest two
    assert recording.firsts == [0, 0, 0, 3]

    # WHEN the row arrives, THEN it is found a minute after the last full scan
    put(empty_store, RUN, [late])
    rollups.turn()
    assert num_spans(empty_store, 0) == 3
    now_ns[0] = 100 * S
    rollups.turn()
    assert recording.firsts[-1] == 0
    assert num_spans(empty_store, 0) == 4

    # THEN all rows are rolled up when the run ends
    describe(empty_store, RUN)
    assert rollups.turn()
    assert read_rolled_up(empty_store, RUN) == computed_anew(empty_store, RUN)


@pytest.mark.slow
def test_a_run_without_new_rows_is_not_scanned_after_a_full_scan(empty_store: Store) -> None:
    describe(empty_store, RUN, state="running")
    rows = span_rows(RUN, num_steps=6)
    now_ns = [0]
    recording = RecordingStore(empty_store)
    rollups = Rollups(recording, monotonic_ns=lambda: now_ns[0])  # type: ignore[arg-type]
    put(empty_store, RUN, rows)
    for at_s in (0, 1, 500):
        now_ns[0] = at_s * S
        assert rollups.turn()

    assert recording.firsts == [0]


@pytest.mark.slow
def test_steps_of_an_earlier_epoch_are_not_scanned_again(empty_store: Store) -> None:
    # GIVEN a run whose steps begin again in a second epoch
    describe(empty_store, RUN, state="running")
    rows = span_rows(RUN, num_steps=6)
    again = [{**row, "epoch": 1} for row in rows]
    now_ns = [0]
    recording = RecordingStore(empty_store)
    rollups = Rollups(recording, monotonic_ns=lambda: now_ns[0])  # type: ignore[arg-type]
    halves = (rows, again[:8], again[8:16], again[16:])
    for at_s, part in zip((0, 20, 40, 50), halves, strict=True):
        now_ns[0] = at_s * S
        put(empty_store, RUN, part)
        assert rollups.turn()

    # THEN all steps are rolled up except the newest two of the second epoch
    closed = {(row["epoch"], row["step"]) for row in read_rolled_up(empty_store, RUN)}
    assert closed == {(0, step) for step in range(6)} | {(1, step) for step in range(4)}
    assert recording.firsts == [0, 0, 0, 4]
