from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.heartbeats import SILENCE_NS, SilenceWatch, read_oldest_heartbeats
from rankscope.collector.read.runs import list_runs
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import HOUR_NS, Retention
from rankscope.collector.retention.span_days import DAY_NS
from tests.collector.retention.test_retention import (
    NOW_NS,
    NUM_STEPS,
    SECOND_NS,
    steps_with_spans,
    store_run,
)

if TYPE_CHECKING:
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store


LATE_NS = SILENCE_NS + SECOND_NS


def heartbeat(run_id: str, rank: int, at_ns: int, step: int, **changes: Any) -> Row:  # noqa: ANN401
    row = {
        "run_id": run_id, "rank": rank, "host": f"node-{rank // 8}", "at_ns": at_ns, "pid": 7,
        "step": step, "state": "training", "address": "10.0.0.7",
    }  # fmt: skip
    return row | changes


def times_and_steps(store: Store, run_id: str) -> list[tuple[int, int, int]]:
    rows = store.rows(
        "SELECT rank, at_ns, step FROM heartbeats FINAL WHERE run_id = {r:String}"
        " ORDER BY rank, at_ns",
        {"r": run_id},
    )
    return [(row["rank"], row["at_ns"], row["step"]) for row in rows]


@pytest.mark.slow
def test_merges_keep_only_the_newest_heartbeat_of_each_rank_after_an_hour(
    store: Store, run_id: str
) -> None:
    # GIVEN rank 0 with heartbeats for ten seconds two hours ago, and rank 1 with one now
    now_ns = time.time_ns()
    old_ns = now_ns - 2 * HOUR_NS
    store.insert_rows(
        "heartbeats",
        [heartbeat(run_id, 0, old_ns + i * SECOND_NS, i, rdma_sent_bytes=i) for i in range(9)],
    )
    ended = heartbeat(run_id, 0, old_ns + 9 * SECOND_NS, 9, state="failed")
    old, new = (
        heartbeat(run_id, 1, old_ns, 3),
        [heartbeat(run_id, 1, now_ns - i, 4) for i in range(2)],
    )
    store.insert_rows("heartbeats", [ended, old, *new, new[0]])

    # WHEN the engine merges
    store.command("OPTIMIZE TABLE heartbeats FINAL")

    # THEN
    assert times_and_steps(store, run_id) == [
        (0, old_ns + 9 * SECOND_NS, 9),
        (1, old_ns, 3),
        (1, now_ns - 1, 4),
        (1, now_ns, 4),
    ]
    newest = read_oldest_heartbeats(
        store, run_id, recent_ns=now_ns, silent_ns=now_ns - HOUR_NS, most=9
    )
    assert [(row["rank"], row["state"], row["step"], row["newest_ns"]) for row in newest] == [
        (0, "failed", 9, old_ns + 9 * SECOND_NS),
        (1, "training", 4, now_ns),
    ]
    assert [(row["num_ranks"], row["num_recent"], row["num_silent"]) for row in newest] == [
        (2, 1, 1)
    ] * 2


def test_both_heartbeats_of_a_restarted_rank_are_kept(store: Store, run_id: str) -> None:
    at_ns = time.time_ns()
    died = heartbeat(run_id, 0, at_ns, 3, state="failed", pid=7)
    store.insert_rows(
        "heartbeats", [died, heartbeat(run_id, 0, at_ns, -1, state="starting", pid=8)]
    )

    rows = store.rows(
        "SELECT state FROM heartbeats FINAL WHERE run_id = {r:String} ORDER BY pid", {"r": run_id}
    )
    assert [row["state"] for row in rows] == ["failed", "starting"]
    (newest,) = read_oldest_heartbeats(store, run_id, recent_ns=0, silent_ns=0, most=9)
    assert newest["state"] == "starting"


def state_of(store: Store, run_id: str, *, now_ns: int) -> str:
    states: dict[str, str] = {
        row["run_id"]: row["state"] for row in list_runs(store, unix_ns=lambda: now_ns)
    }
    return states[run_id]


def test_a_running_run_is_lost_after_15_silent_minutes(store: Store) -> None:
    store_run(store, "silent", state="running")

    assert state_of(store, "silent", now_ns=NOW_NS + SILENCE_NS - SECOND_NS) == "running"
    assert state_of(store, "silent", now_ns=NOW_NS + LATE_NS) == "lost"


def test_heartbeats_without_spans_keep_a_run_alive(store: Store) -> None:
    store_run(store, "evaluates", state="running")
    store.insert_rows("heartbeats", [heartbeat("evaluates", 0, NOW_NS + 10 * SILENCE_NS, 3)])

    assert state_of(store, "evaluates", now_ns=NOW_NS + 10 * SILENCE_NS + SECOND_NS) == "running"
    assert state_of(store, "evaluates", now_ns=NOW_NS + 12 * SILENCE_NS) == "lost"


def test_a_lost_run_is_running_again_when_rows_come(store: Store) -> None:
    store_run(store, "back", state="running")
    assert state_of(store, "back", now_ns=NOW_NS + HOUR_NS) == "lost"

    cut = {"run_id": "back", "segment": 7, "at_ns": NOW_NS + HOUR_NS, "num_spans": 1}
    store.insert_rows("ledger", [cut])

    assert state_of(store, "back", now_ns=NOW_NS + HOUR_NS + SECOND_NS) == "running"


def test_ended_and_imported_runs_are_never_lost(store: Store) -> None:
    store_run(store, "failed", state="failed")
    store.insert_rows(
        "runs", [{"run_id": "trace", "state": "running", "source_format": "bytedance"}]
    )

    assert state_of(store, "failed", now_ns=NOW_NS + DAY_NS) == "failed"
    assert state_of(store, "trace", now_ns=NOW_NS + DAY_NS) == "running"


def test_silence_is_measured_by_the_monotonic_clock() -> None:
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


@pytest.mark.slow
def test_a_live_run_stays_when_the_wall_clock_jumps_forty_days(store: Store) -> None:
    # GIVEN a running run whose hosts' clocks did not jump with the server's (fault C9)
    store_run(store, "live", state="running")
    now, jump = [0], [0]
    retention = Retention(
        store,
        Deletions(store),
        unix_ns=lambda: NOW_NS + jump[0] + now[0],
        monotonic_ns=lambda: now[0],
    )
    jump[0] = 40 * DAY_NS

    # WHEN retention runs for hours while its cuts keep coming
    for hour in range(4):
        now[0] = hour * HOUR_NS
        cut = {"run_id": "live", "segment": hour + 1, "at_ns": NOW_NS + now[0], "num_spans": 1}
        store.insert_rows("ledger", [cut])
        assert "live" not in retention.expire().num_spans

    assert len(steps_with_spans(store, "live")) == NUM_STEPS + 1  # one span is outside any step
