from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankscope.collector.read.heartbeats import SILENCE_NS, SilenceWatch
from rankscope.collector.read.runs import list_runs
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import DAY_NS, HOUR_NS, Retention
from tests.collector.retention.test_retention import (
    NOW_NS,
    NUM_STEPS,
    SECOND_NS,
    steps_with_spans,
    store_run,
)

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

LATE_NS = SILENCE_NS + SECOND_NS


def state_of(store: Store, run_id: str, *, now_ns: int) -> str:
    states: dict[str, str] = {
        row["run_id"]: row["state"] for row in list_runs(store, unix_ns=lambda: now_ns)
    }
    return states[run_id]


def beat(store: Store, run_id: str, at_ns: int) -> None:
    row: dict[str, Any] = {"run_id": run_id, "host": "node-1", "rank": 0, "at_ns": at_ns}
    store.insert_rows("heartbeats", [row])


def test_a_running_run_is_lost_after_a_quarter_of_an_hour_without_a_word(store: Store) -> None:
    store_run(store, "silent", state="running")

    assert state_of(store, "silent", now_ns=NOW_NS + SILENCE_NS - SECOND_NS) == "running"
    assert state_of(store, "silent", now_ns=NOW_NS + LATE_NS) == "lost"


def test_heartbeats_without_spans_are_a_word(store: Store) -> None:
    store_run(store, "evaluates", state="running")
    beat(store, "evaluates", NOW_NS + 10 * SILENCE_NS)

    assert state_of(store, "evaluates", now_ns=NOW_NS + 10 * SILENCE_NS + SECOND_NS) == "running"
    assert state_of(store, "evaluates", now_ns=NOW_NS + 12 * SILENCE_NS) == "lost"


def test_it_runs_again_when_rows_come_again(store: Store) -> None:
    store_run(store, "back", state="running")
    assert state_of(store, "back", now_ns=NOW_NS + HOUR_NS) == "lost"

    cut = {"run_id": "back", "segment": 7, "at_ns": NOW_NS + HOUR_NS, "num_spans": 1}
    store.insert_rows("ledger", [cut])

    assert state_of(store, "back", now_ns=NOW_NS + HOUR_NS + SECOND_NS) == "running"


def test_a_run_that_said_goodbye_keeps_its_word_and_an_import_is_never_lost(store: Store) -> None:
    store_run(store, "failed", state="failed")
    store.insert_rows(
        "runs", [{"run_id": "trace", "state": "running", "source_format": "bytedance"}]
    )

    assert state_of(store, "failed", now_ns=NOW_NS + DAY_NS) == "failed"
    assert state_of(store, "trace", now_ns=NOW_NS + DAY_NS) == "running"


def test_silence_is_measured_from_the_last_word_by_the_own_clock() -> None:
    now = [0]
    watch = SilenceWatch(monotonic_ns=lambda: now[0])

    assert not watch.is_silent("r", 5)
    now[0] = SILENCE_NS - 1
    assert not watch.is_silent("r", 5)
    now[0] = SILENCE_NS
    assert watch.is_silent("r", 5)
    assert not watch.is_silent("r", 6)
    now[0] = 2 * SILENCE_NS - 1
    assert not watch.is_silent("r", 6)


def test_spans_of_a_lost_run_expire_when_it_was_silent_here_too(store: Store) -> None:
    store_run(store, "gone", state="running")
    now = [0]
    retention = Retention(
        store,
        Deletions(store),
        unix_ns=lambda: NOW_NS + 3 * DAY_NS,
        monotonic_ns=lambda: now[0],
    )

    assert "gone" not in retention.expire().num_spans
    now[0] = SILENCE_NS
    assert "gone" in retention.expire().num_spans

    assert steps_with_spans(store, "gone") == []


def test_a_live_run_stays_when_the_wall_clock_jumps_forty_days(store: Store) -> None:
    # GIVEN a run that goes on, on hosts whose clocks did not jump with the server's (C9)
    store_run(store, "live", state="running")
    now = [0]
    retention = Retention(
        store,
        Deletions(store),
        unix_ns=lambda: NOW_NS + 40 * DAY_NS + now[0],
        monotonic_ns=lambda: now[0],
    )

    # WHEN expiry runs for hours while cuts of it keep coming
    for hour in range(4):
        now[0] = hour * HOUR_NS
        cut = {"run_id": "live", "segment": hour + 1, "at_ns": NOW_NS + now[0], "num_spans": 1}
        store.insert_rows("ledger", [cut])
        assert "live" not in retention.expire().num_spans

    assert len(steps_with_spans(store, "live")) == NUM_STEPS + 1  # one span lies outside steps
