from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.ingest.request_bodies import ByteBudget
from rankscope.collector.ingest.retryable import BusyError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PATIENCE_S = 30.0


class Queue:
    """Requests for a budget of 10 bytes, and which of them were let in."""

    def __init__(self) -> None:
        self.budget = ByteBudget(10, what="test bytes")
        self.let_in: list[str] = []
        self._leaving: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, num_bytes: int, *, patience_s: float = PATIENCE_S) -> None:
        self._leaving[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._stay(name, num_bytes, patience_s))
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

    async def _stay(self, name: str, num_bytes: int, patience_s: float) -> None:
        async with self.budget.waiting(num_bytes, patience_s=patience_s):
            self.let_in.append(name)
            await self._leaving[name].wait()


def played(play: Callable[[Queue], Awaitable[None]]) -> Queue:
    async def run() -> Queue:
        queue = Queue()
        await play(queue)
        return queue

    return asyncio.run(run())


def test_what_does_not_fit_waits_for_its_turn_and_is_let_in() -> None:
    async def play(queue: Queue) -> None:
        await queue.come("first", 6)
        await queue.come("second", 6)
        assert queue.let_in == ["first"]
        await queue.leave("first")
        assert queue.let_in == ["first", "second"]
        await queue.leave("second")

    assert played(play).budget.taken_bytes == 0


def test_a_small_one_does_not_pass_a_large_one() -> None:
    async def play(queue: Queue) -> None:
        await queue.come("first", 6)
        await queue.come("large", 8)
        await queue.come("small", 1)
        assert queue.let_in == ["first"]
        await queue.leave("first")
        assert queue.let_in == ["first", "large", "small"]

    played(play)


def test_one_that_is_larger_than_the_budget_is_let_in_alone() -> None:
    async def play(queue: Queue) -> None:
        await queue.come("small", 1)
        await queue.come("huge", 50)
        assert queue.let_in == ["small"]
        await queue.leave("small")
        assert queue.let_in == ["small", "huge"]

    played(play)


def test_who_gives_up_makes_way_for_those_behind() -> None:
    async def play(queue: Queue) -> None:
        await queue.come("first", 6)
        await queue.come("large", 8)
        await queue.come("small", 1)
        await queue.give_up("large")
        assert queue.let_in == ["first", "small"]
        assert queue.budget.taken_bytes == 7
        await queue.leave("first")
        await queue.leave("small")

    assert played(play).budget.taken_bytes == 0


def test_who_waits_too_long_is_told_to_come_again() -> None:
    async def play(queue: Queue) -> None:
        await queue.come("first", 6)
        await queue.come("late", 6, patience_s=0.01)
        with pytest.raises(BusyError) as busy:
            await queue.outcome("late")
        assert busy.value.status == 429
        await queue.leave("first")

    queue = played(play)
    assert (queue.budget.num_refused, queue.budget.taken_bytes) == (1, 0)


def test_what_is_taken_is_given_back_by_who_is_cut_off() -> None:
    async def play(queue: Queue) -> None:
        await queue.come("first", 6)
        await queue.come("second", 6)
        await queue.give_up("first")
        assert queue.let_in == ["first", "second"]
        await queue.leave("second")

    assert played(play).budget.taken_bytes == 0
