"""Processes that only start the ranks of a job, beside attempts that failed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.goodput import read_run_times
from rankscope.collector.read.runs import list_runs, read_exits, read_run, read_starters

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


def test_the_time_of_the_start_begins_with_the_starter(store: Store) -> None:
    insert(store, "started", [{**PARENT, "exit_state": "ended", "exit_ns": 99}])

    (epoch,) = read_run_times(store, "started").epochs

    assert (epoch["epoch"], epoch["first_ns"], epoch["last_exit_ns"]) == (1, 10, None)


def failed_starter(store: Store, run: str, *ranks: Row, of_ranks: Any = ()) -> list[Row]:  # noqa: ANN401
    """Insert a driver that failed, and the ends of its ranks; return the ends that are read."""
    insert(store, run, [{**PARENT, "exit_state": "failed", "exit_ns": 99}])
    own = [
        {"run_id": run, **row, **end, "revision": 1} for row, end in zip(RANKS, ranks, strict=True)
    ]
    store.insert_rows("ranks", own)
    data = {"exception": {"type": "X", "message": "y", "of_ranks": of_ranks}}
    event = {"run_id": run, "epoch": 0, "rank": 0, "process": "p", "kind": "exit", "at_ns": 99}
    store.insert_rows("events", [{**event, "data": json.dumps(data)}])
    return read_exits(store, run)


ENDED, LOST = ({"exit_state": state, "exit_ns": ns} for state, ns in (("ended", 90), ("lost", 80)))
BAD = {"rank": 1, "type": "ValueError", "message": "bad"}


@pytest.mark.parametrize("of_ranks", [(), "x", [{"rank": "1"}], [{"rank": -1}], [{"rank": 0.5}]])
def test_a_failure_of_the_starter_that_no_rank_recorded_is_kept(
    store: Store, request: pytest.FixtureRequest, of_ranks: object
) -> None:
    *ended, own = failed_starter(store, request.node.name, ENDED, ENDED, of_ranks=of_ranks)

    assert [(row["epoch"], row["exit_state"]) for row in ended] == [(1, "ended")] * 2
    assert (own["epoch"], own["rank"], own["exit_state"], own["exit_ns"]) == (1, -1, "failed", 99)


def test_a_rank_of_which_the_starter_knows_why_it_failed_is_named(store: Store) -> None:
    other, named = failed_starter(store, "reported", LOST, ENDED, of_ranks=[BAD])

    assert (other["rank"], other["exit_state"]) == (0, "lost")
    assert (named["rank"], named["exit_state"], named["exit_ns"]) == (1, "failed", 80)
    assert json.loads(named["data"]) == {"exception": BAD}


def test_what_a_rank_recorded_itself_counts(store: Store) -> None:
    failed = {"exit_state": "failed", "exit_ns": 70}

    assert [row["rank"] for row in failed_starter(store, "own", failed, LOST, of_ranks=[BAD])] == [
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"exit_state": "failed", "exit_ns": 99}, "failed"),
        ({"exit_state": "running"}, "running"),
        ({"exit_state": "ended", "exit_ns": 99}, "ended"),
        ({"exit_state": "failed", "exit_ns": 19}, "ended"),  # an attempt before a restart
    ],
)
def test_a_run_lasts_as_long_as_what_started_its_ranks(
    store: Store, request: pytest.FixtureRequest, end: Row, state: str
) -> None:
    run = request.node.name
    insert(store, run, [{**PARENT, **end}])
    states = [(0, end["exit_state"]), (1, "ended")]
    store.insert_rows(
        "runs",
        [
            {"run_id": run, "epoch": e, "state": s, "world_size": 1 + e, "revision": 1}
            for e, s in states
        ],
    )

    (listed,) = (row["state"] for row in list_runs(store) if row["run_id"] == run)
    assert listed == state
