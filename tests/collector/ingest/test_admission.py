from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.ingest.admission import ByteBudget
from rankscope.collector.ingest.backoff import BusyError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TIMEOUT_S = 30.0


class Queue:
    """Requests for a budget of 10 bytes, and the admitted ones."""

    def __init__(self) -> None:
        self.budget = ByteBudget(10, what="test bytes")
        self.admitted: list[str] = []
        self._leaving: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def enter(self, name: str, num_bytes: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._leaving[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._stay(name, num_bytes, timeout_s))
        await self.settle()

    async def leave(self, name: str) -> None:
        self._leaving[name].set()
        await self._tasks[name]
        await self.settle()

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks[name]
        await self.settle()

    async def outcome(self, name: str) -> None:
        await self._tasks[name]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _stay(self, name: str, num_bytes: int, timeout_s: float) -> None:
        async with self.budget.wait_and_take(num_bytes, timeout_s=timeout_s):
            self.admitted.append(name)
            await self._leaving[name].wait()


def run_queue(play: Callable[[Queue], Awaitable[None]]) -> Queue:
    async def run() -> Queue:
        queue = Queue()
        await play(queue)
        return queue

    return asyncio.run(run())


def test_a_request_waits_until_there_is_room() -> None:
    async def play(queue: Queue) -> None:
        await queue.enter("first", 6)
        await queue.enter("second", 6)
        assert queue.admitted == ["first"]
        await queue.leave("first")
        assert queue.admitted == ["first", "second"]
        await queue.leave("second")

    assert run_queue(play).budget.taken_bytes == 0


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    async def play(queue: Queue) -> None:
        await queue.enter("first", 6)
        await queue.enter("large", 8)
        await queue.enter("small", 1)
        assert queue.admitted == ["first"]
        await queue.leave("first")
        assert queue.admitted == ["first", "large", "small"]

    run_queue(play)


def test_a_request_larger_than_the_budget_is_admitted_alone() -> None:
    async def play(queue: Queue) -> None:
        await queue.enter("small", 1)
        await queue.enter("huge", 50)
        assert queue.admitted == ["small"]
        await queue.leave("small")
        assert queue.admitted == ["small", "huge"]

    run_queue(play)


def test_a_cancelled_request_lets_the_next_ones_pass() -> None:
    async def play(queue: Queue) -> None:
        await queue.enter("first", 6)
        await queue.enter("large", 8)
        await queue.enter("small", 1)
        await queue.give_up("large")
        assert queue.admitted == ["first", "small"]
        assert queue.budget.taken_bytes == 7
        await queue.leave("first")
        await queue.leave("small")

    assert run_queue(play).budget.taken_bytes == 0


def test_a_request_that_waits_too_long_gets_429() -> None:
    async def play(queue: Queue) -> None:
        await queue.enter("first", 6)
        await queue.enter("late", 6, timeout_s=0.01)
        with pytest.raises(BusyError) as busy:
            await queue.outcome("late")
        assert busy.value.status == 429
        await queue.leave("first")

    assert run_queue(play).budget.taken_bytes == 0


def test_a_disconnected_request_gives_its_bytes_back() -> None:
    async def play(queue: Queue) -> None:
        await queue.enter("first", 6)
        await queue.enter("second", 6)
        await queue.give_up("first")
        assert queue.admitted == ["first", "second"]
        await queue.leave("second")

    assert run_queue(play).budget.taken_bytes == 0
