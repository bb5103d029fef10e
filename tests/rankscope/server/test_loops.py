from __future__ import annotations

import threading
import time
from queue import Queue
from typing import TYPE_CHECKING

from rankscope.collector.host.sampler import Sampler
from rankscope.collector.store.store import open_store
from rankscope.errors import FailedError
from rankscope.server import loops
from rankscope.server.loops import Loop
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TIMEOUT_S = 60.0


class Turns:
    """Work whose turns fail with the given errors, one after the other."""

    def __init__(self, *failures: Exception | None) -> None:
        self._failures = list(failures)
        self.done: Queue[None] = Queue()

    def __call__(self) -> None:
        failure = self._failures.pop(0) if self._failures else None
        self.done.put(None)
        if failure is not None:
            raise failure

    def wait(self, number: int) -> None:
        for _ in range(number):
            self.done.get(timeout=TIMEOUT_S)


def test_a_loop_works_until_it_is_stopped() -> None:
    turns = Turns()
    loop = Loop("work", turns, pause_s=0.001)
    assert loop.why_stopped() == "the work thread has ended"

    loop.start()
    turns.wait(3)
    assert loop.why_stopped() is None

    loop.stop()
    assert loop.why_stopped() == "the work thread has ended"


def test_a_failure_is_logged_once_and_retried() -> None:
    lines: Queue[str] = Queue()
    broken = FailedError("the store is unavailable")
    turns = Turns(broken, broken, None, broken)
    loop = Loop("work", turns, pause_s=0.001, say=lines.put)

    loop.start()
    turns.wait(6)
    loop.stop()

    # Logged at its first failure, and again after a success in between.
    assert [lines.get_nowait() for _ in range(lines.qsize())] == [
        "work: the store is unavailable"
    ] * 2
    assert loop.trouble is None


def test_a_turn_that_outlives_its_loop_logs_no_closed_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "JOIN_S", 0.01)
    lines: Queue[str] = Queue()
    begun, closed = threading.Event(), threading.Event()
    store = open_store(f"chdb://{tmp_path / 'store'}")

    def turn() -> None:
        begun.set()
        assert closed.wait(TIMEOUT_S)
        store.rows("SELECT 1 AS one")

    loop = Loop("work", turn, pause_s=0.001, say=lines.put)
    loop.start()
    assert begun.wait(TIMEOUT_S)

    # WHEN the server ends before the turn does
    loop.stop()
    store.close()
    closed.set()

    wait_until(lambda: loop.why_stopped() == "the work thread has ended", timeout_s=TIMEOUT_S)
    assert lines.qsize() == 0
    assert loop.num_failures == 0


def test_a_turn_may_ask_for_a_longer_pause() -> None:
    begun_s: Queue[float] = Queue()

    def turn() -> float:
        begun_s.put(time.monotonic())
        return 0.2

    loop = Loop("work", turn, pause_s=0.001)
    loop.start()
    first, second = (begun_s.get(timeout=TIMEOUT_S) for _ in range(2))
    loop.stop()

    assert second - first >= 0.15


def test_a_failing_loop_has_a_reason() -> None:
    turns = Turns(*[FailedError("the store is unavailable")] * 100_000)
    loop = Loop("work", turns, pause_s=0.001, say=lambda _: None)

    loop.start()
    turns.wait(2)

    assert loop.why_stopped() == "work: the store is unavailable"
    loop.stop()


def test_a_defect_is_logged_without_its_text_and_retried_after_a_longer_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loops, "DEFECT_PAUSE_S", 0.2)
    lines: Queue[str] = Queue()
    turns = Turns(ValueError("data of the job"))
    loop = Loop("work", turns, pause_s=0.001, say=lines.put)

    loop.start()
    turns.wait(1)
    begun_s = time.monotonic()
    turns.wait(2)

    assert time.monotonic() - begun_s >= 0.15
    wait_until(lambda: loop.why_stopped() is None, timeout_s=TIMEOUT_S)
    loop.stop()
    (line,) = [lines.get_nowait() for _ in range(lines.qsize())]
    assert line.startswith("work: ValueError at server/test_loops.py:")
    assert line.endswith("please report it")


def test_the_sampler_loop_works_until_it_is_stopped() -> None:
    taken = threading.Event()
    sampler = Sampler([], lambda _samples: taken.set())
    loop = Loop("sampler", sampler.turn)

    loop.start()

    assert taken.wait(TIMEOUT_S)
    assert loop.why_stopped() is None
    loop.stop()
    assert loop.why_stopped() == "the sampler thread has ended"
