"""Processes that only start the ranks of a job, beside attempts that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.goodput import read_run_times
from rankscope.collector.read.runs import read_exits, read_run, read_starters

if TYPE_CHECKING:
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store

PARENT = {"epoch": 0, "rank": 0, "process": "p", "host": "a", "pid": 7, "started_ns": 10}
RANKS = [
    {"epoch": 1, "rank": rank, "process": f"{rank}", "host": "a", "pid": 8 + rank, "started_ns": 20}
    for rank in (0, 1)
]


def insert(store: Store, run: str, parents: list[Row], *, steps: tuple[int, ...] = ()) -> None:
    store.insert_rows(
        "runs", [{"run_id": run, "epoch": e, "world_size": 1 + e, "created_ns": 1} for e in (0, 1)]
    )
    store.insert_rows("ranks", [{"run_id": run, **row} for row in (*parents, *RANKS)])
    rows = [{"run_id": run, "epoch": 0, "step": step, "start_ns": 1, "end_ns": 2} for step in steps]
    store.insert_rows("steps", rows)


@pytest.mark.parametrize(
    ("end", "num_parents", "steps", "starters"),
    [
        ({"exit_state": "failed", "exit_ns": 99}, 1, (), {0}),
        ({"exit_state": "running"}, 1, (), {0}),
        ({"exit_state": "ended", "exit_ns": 20, "pid": 9}, 1, (), {0}),  # it became rank 1
        ({"exit_state": "failed", "exit_ns": 19}, 1, (), set()),  # an attempt before a restart
        ({"exit_state": "lost", "exit_ns": 99}, 1, (3,), set()),
        ({"exit_state": "failed", "exit_ns": 99}, 2, (), set()),
    ],
)
def test_a_lone_process_without_steps_that_lives_on_started_the_ranks(
    store: Store,
    request: pytest.FixtureRequest,
    end: Row,
    num_parents: int,
    steps: tuple[int, ...],
    starters: set[int],
) -> None:
    run = request.node.name
    parents = [
        {**PARENT, **end, "rank": rank, "process": f"p{rank}"} for rank in range(num_parents)
    ]
    insert(store, run, parents, steps=steps)

    assert read_starters(store, run) == starters
    rows = read_run(store, run)
    expected = {0, 1} - starters
    assert {row["epoch"] for row in rows.epochs} == {row["epoch"] for row in rows.ranks} == expected
    has_exit = end["exit_state"] != "" and not starters
    assert {row["epoch"] for row in read_exits(store, run)} == ({0} if has_exit else set())


def test_the_time_of_the_start_begins_with_the_starter(store: Store) -> None:
    insert(store, "started", [{**PARENT, "exit_state": "ended", "exit_ns": 99}])

    (epoch,) = read_run_times(store, "started").epochs

    assert (epoch["epoch"], epoch["first_ns"], epoch["last_exit_ns"]) == (1, 10, None)
