from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rankscope.collector.read.heartbeats import read_oldest_heartbeats

if TYPE_CHECKING:
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS


def beat(run_id: str, rank: int, at_ns: int, step: int, **changes: Any) -> Row:  # noqa: ANN401
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


def test_of_more_than_an_hour_ago_only_the_newest_of_each_rank_is_kept(
    store: Store, run_id: str
) -> None:
    # GIVEN rank 0 that was heard of for ten seconds two hours ago, and rank 1 that still is
    now_ns = time.time_ns()
    old_ns = now_ns - 2 * HOUR_NS
    store.insert_rows(
        "heartbeats",
        [beat(run_id, 0, old_ns + i * SECOND_NS, i, rdma_sent_bytes=i) for i in range(9)],
    )
    ended = beat(run_id, 0, old_ns + 9 * SECOND_NS, 9, state="failed")
    old, new = beat(run_id, 1, old_ns, 3), [beat(run_id, 1, now_ns - i, 4) for i in range(2)]
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


def test_a_rank_that_was_restarted_at_once_is_told_of_twice(store: Store, run_id: str) -> None:
    at_ns = time.time_ns()
    died = beat(run_id, 0, at_ns, 3, state="failed", pid=7)
    store.insert_rows("heartbeats", [died, beat(run_id, 0, at_ns, -1, state="starting", pid=8)])

    rows = store.rows(
        "SELECT state FROM heartbeats FINAL WHERE run_id = {r:String} ORDER BY pid", {"r": run_id}
    )
    assert [row["state"] for row in rows] == ["failed", "starting"]
    (newest,) = read_oldest_heartbeats(store, run_id, recent_ns=0, silent_ns=0, most=9)
    assert newest["state"] == "starting"
