"""Requests to ranks in the store: stored, passed on for a time, answered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.control import (
    READ_PAUSE_S,
    REQUEST_LIFE_NS,
    ControlRequests,
    read_answers,
)
from rankscope.collector.spool.control import ControlRequest

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow


class Clocks:
    """Monotonic and Unix time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int(self.now_s * 1e9)


def open_requests(store: Store) -> tuple[ControlRequests, Clocks]:
    clocks = Clocks()
    made = ControlRequests(store, monotonic_s=clocks.monotonic_s, unix_ns=clocks.unix_ns)
    return made, clocks


def request(run_id: str, name: str, *ranks: int) -> ControlRequest:
    return ControlRequest(run_id=run_id, name=name, level="full", steps=2, ranks=ranks, by="me")


def test_a_request_is_passed_on_to_its_ranks_for_ten_minutes(store: Store, run_id: str) -> None:
    requests, clocks = open_requests(store)
    requests.add(request(run_id, "some", 3, 5, 9))
    clocks.now_s += 1
    requests.add(request(run_id, "all"))

    at_once = requests.documents({run_id: {5, 6, 9}, "another": {3}})
    clocks.now_s += REQUEST_LIFE_NS / 1e9 + 1
    late = requests.documents({run_id: {5}})

    assert [(each["name"], each["ranks"]) for each in at_once] == [("some", (5, 9)), ("all", ())]
    assert late == []


def test_a_run_is_read_again_after_a_pause(store: Store, run_id: str) -> None:
    requests, clocks = open_requests(store)
    before = requests.of_run(run_id)
    requests.add(request(run_id, "new"))
    too_early = requests.of_run(run_id)
    clocks.now_s += READ_PAUSE_S
    after = requests.of_run(run_id)

    assert (before, too_early, [each.name for each in after]) == ((), (), ["new"])


def test_answers_are_found_among_the_events(store: Store, run_id: str) -> None:
    def event(rank: int, kind: str, **data: object) -> dict[str, object]:
        return {
            "run_id": run_id, "epoch": 0, "rank": rank, "at_ns": rank, "kind": kind, "text": "t",
            "data": json.dumps(data), "process": f"p{rank}", "line": 0,
        }  # fmt: skip

    store.insert_rows(
        "events",
        [
            event(1, "control", request="a1", state="accepted"),
            event(2, "stack", request="a1", state="done", step=4),
            event(3, "control", request="b2", state="accepted"),
            event(4, "exit", request="a1", state="done"),
        ],
    )

    answers = read_answers(store, run_id, "a1")

    assert [(answer.rank, answer.state) for answer in answers] == [(1, "accepted"), (2, "done")]
