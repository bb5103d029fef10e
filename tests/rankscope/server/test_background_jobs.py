from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from rankscope.server.background_jobs import RETRY_NS, Aside
from tests.support.receiver import PATIENCE_S


class Maker:
    """Makes a result once it may, and counts how often it was told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.may = threading.Event()
        self.begun = threading.Semaphore(0)
        self.num_calls = 0
        self.fails = fails

    def __call__(self) -> str:
        self.num_calls += 1
        self.begun.release()
        assert self.may.wait(PATIENCE_S)
        if self.fails:
            raise ValueError("no such step")
        return "made"


def test_what_two_visitors_ask_for_at_once_is_made_once() -> None:
    # GIVEN a result that takes long
    aside, make = Aside(), Maker()

    # WHEN two visitors wait for it
    with ThreadPoolExecutor(2) as visitors:
        waiting = [visitors.submit(aside.ask, "run", make, patience_s=PATIENCE_S) for _ in range(2)]
        assert make.begun.acquire(timeout=PATIENCE_S)
        make.may.set()
        found = [one.result(PATIENCE_S) for one in waiting]

    # THEN both have it, from one call
    assert [one.result() for one in found if one is not None] == ["made", "made"]
    assert make.num_calls == 1


def test_who_has_no_patience_is_told_that_it_is_under_way() -> None:
    now = [5_000]
    aside, make = Aside(monotonic_ns=lambda: now[0]), Maker()

    assert aside.ask("run", make, patience_s=0) is None
    assert make.begun.acquire(timeout=PATIENCE_S)
    now[0] += 700

    assert aside.has_begun("run")
    assert aside.age_ns("run") == 700
    make.may.set()
    done = aside.ask("run", make, patience_s=PATIENCE_S)
    assert done is not None
    assert done.result() == "made"


def test_beyond_the_limit_a_result_waits_for_its_turn() -> None:
    aside, first, second = Aside(num_at_once=1), Maker(), Maker()

    assert aside.ask("first", first, patience_s=0) is None
    assert first.begun.acquire(timeout=PATIENCE_S)
    assert aside.ask("second", second, patience_s=0) is None
    assert not aside.has_begun("second")

    first.may.set()
    second.may.set()
    done = aside.ask("second", second, patience_s=PATIENCE_S)
    assert done is not None
    assert done.result() == "made"


def test_a_failure_stands_for_half_a_minute_and_is_tried_again_then() -> None:
    # GIVEN a result that can't be made
    now = [0]
    aside, make = Aside(monotonic_ns=lambda: now[0]), Maker(fails=True)
    make.may.set()

    # WHEN it is asked for, at once again, and later
    for at_ns in (0, RETRY_NS - 1, RETRY_NS):
        now[0] = at_ns
        done = aside.ask("run", make, patience_s=PATIENCE_S)

        # THEN each asker hears of the failure
        assert done is not None
        assert str(done.exception()) == "no such step"

    # THEN it was tried twice
    assert make.num_calls == 2
