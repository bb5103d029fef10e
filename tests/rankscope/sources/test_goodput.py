"""Goodput of stored runs: every row that it is read from, and a crash with a restart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rankscope.sources.goodput import read_goodput
from tests.support.rankscope.incident_runs import analysed, restart_as, store_run

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

RUN = "goodput-of-two-epochs"
S = 1_000_000_000


def insert_epoch(
    store: Store, epoch: int, *, started_s: int, steps: range, exits: dict[int, tuple[str, int]]
) -> None:
    """Insert an epoch of two ranks with steps of 10 s, which begin 10 s after its process."""
    of_epoch = {"run_id": RUN, "epoch": epoch}
    manifest = {"process_started_ns": started_s * S, "config": {"max_steps": 9}}
    store.insert_rows("runs", [{**of_epoch, "world_size": 2, "manifest": json.dumps(manifest)}])
    ranks = [
        {
            **of_epoch,
            "rank": rank,
            "process": f"{epoch}-{rank}",
            "started_ns": (started_s + 6) * S,  # of the tracer
            "exit_state": exits[rank][0],
            "exit_ns": exits[rank][1] * S,
        }
        for rank in (0, 1)
    ]
    store.insert_rows("ranks", ranks)
    rows, spans = [], []
    for rank in (0, 1):
        for number, step in enumerate(steps):
            begin_ns = (started_s + 10 + 10 * number) * S
            place = {**of_epoch, "step": step, "rank": rank, "segment": 10 * epoch + rank}
            end_ns = begin_ns + 10 * S
            rows.append({**place, "row": step, "start_ns": begin_ns, "end_ns": end_ns, "loss": 1.0})
            spans.append(
                {
                    **place, "row": step, "start_ns": begin_ns, "duration_ns": 10 * S,
                    "kind": "forward", "track": "main",
                }
            )  # fmt: skip
    store.insert_rows("steps", rows)
    store.insert_rows("spans", spans)


def test_each_part_is_read_from_its_rows(empty_store: Store) -> None:
    store = empty_store
    # GIVEN steps 0 to 3, a failure 4 s into step 4, and a restart with step 2
    insert_epoch(
        store, 0, started_s=1000, steps=range(4), exits={0: ("failed", 1056), 1: ("lost", 1054)}
    )
    begun = {"run_id": RUN, "epoch": 0, "step": 4, "rank": 0, "segment": 0, "row": 9}
    open_span = {"start_ns": 1052 * S, "duration_ns": S, "kind": "forward", "track": "main"}
    store.insert_rows("spans", [begun | open_span])
    insert_epoch(
        store, 1, started_s=1070, steps=range(2, 5), exits={0: ("ended", 1113), 1: ("ended", 1115)}
    )
    # AND saves: of 2 s on both ranks, one begins 1 s later; an upload beside them; a final one
    save = {"run_id": RUN, "epoch": 1, "step": 3, "kind": "checkpoint", "track": "main"}
    store.insert_rows(
        "spans",
        [
            {
                **save, "rank": 0, "segment": 10, "row": 90,
                "start_ns": 1091 * S, "duration_ns": 2 * S,
            },
            {
                **save, "rank": 1, "segment": 11, "row": 91,
                "start_ns": 1092 * S, "duration_ns": 2 * S,
            },
            {
                **save, "rank": 1, "segment": 11, "row": 92, "track": "AsyncCheckpointExecutor_0",
                "start_ns": 1094 * S, "duration_ns": 6 * S,
            },
            {
                **save, "rank": 0, "segment": 10, "row": 93, "step": -1,
                "start_ns": 1110 * S, "duration_ns": 2 * S,
            },
        ],
    )  # fmt: skip

    goodput = read_goodput(store, RUN, None, state="ended")

    assert goodput is not None
    assert {part: rank_s / 2 for part, rank_s in goodput.rank_s.items() if rank_s} == {
        "startup": 20,
        "repeated": 20 + 4,
        "detection": 2,
        "restart": 14,
        "checkpoint": 3 + 2,
        "productive": 20 + 30 - 3,
        "unknown": 3,
    }
    assert goodput.days_left == 4 * 115 / 5 / 86_400
    document = goodput.to_document()
    assert document["gpu_hours"] == 2 * 115 / 3_600
    assert document["parts_gpu_hours"]["restart"] == 2 * 14 / 3_600  # type: ignore[index]


def test_counted_steps_of_a_restart_are_unknown(empty_store: Store) -> None:
    ended = {0: ("ended", 1031), 1: ("ended", 1031)}
    insert_epoch(empty_store, 0, started_s=1000, steps=range(2), exits=ended)
    insert_epoch(empty_store, 1, started_s=1040, steps=range(2), exits=ended)
    event = {"run_id": RUN, "epoch": 1, "rank": 0, "at_ns": 1, "kind": "steps-counted"}
    empty_store.insert_rows("events", [event])

    goodput = read_goodput(empty_store, RUN, None, state="ended")

    assert goodput is not None
    assert goodput.rank_s["unknown"] == 2 * 20
    assert goodput.rank_s["repeated"] == 0


def test_a_simulated_crash_and_its_restart_lose_the_steps_since_the_checkpoint(
    store: Store,
) -> None:
    store_run(store, "crashed", "crash:rank=3,step=20")
    store_run(store, "went-on", "slow-compute:rank=5,factor=1.8", num_steps=12)
    restart_as(store, "crashed", "went-on", first_step=16)
    report = analysed(store, "crashed")

    goodput = read_goodput(store, "crashed", report, state="ended")

    assert goodput is not None
    assert [epoch.num_repeated for epoch in goodput.epochs] == [4, 0]
    assert goodput.num_kept_steps == 16 + 12
    whole_s = sum(goodput.rank_s.values())
    assert abs(whole_s - 8 * goodput.wall_s) < 1e-6
    assert goodput.finding_rank_s.keys() == {"slow-compute"}
    (slow,) = (each for each in report.findings if each.cause == "slow-compute")
    assert slow.shown_saved_s is not None
    assert slow.steps is not None
    price = 8 * slow.shown_saved_s * (slow.steps[1] - slow.steps[0] + 1)
    assert abs(goodput.finding_rank_s["slow-compute"] - price) < 1e-6
