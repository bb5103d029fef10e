"""How much may be under way at once, counted before it is read or inflated."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from .retryable import BusyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

RETRY_S = 1.0


class ByteBudget:
    """A number of bytes that requests take from and give back. One event loop uses it.

    Args:
        max_bytes: All that there is.
        what: What the bytes are, for the refusal.
    """

    def __init__(self, max_bytes: int, *, what: str) -> None:
        self.max_bytes = max_bytes
        self.taken_bytes = 0
        self.num_refused = 0
        self._what = what
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        """Hold bytes for as long as the block runs.

        Raises:
            BusyError: 429; there are not so many left. A request that alone is larger than
                the budget waits for nothing: it is let in when nobody else is.
        """
        if not self._has_room(num_bytes):
            raise self._refused()
        self.taken_bytes += num_bytes
        try:
            yield
        finally:
            self._give_back(num_bytes)

    @asynccontextmanager
    async def waiting(self, num_bytes: int, *, patience_s: float) -> AsyncIterator[None]:
        """Hold bytes for as long as the block runs, once there are so many; first come, first.

        Raises:
            BusyError: 429; there were not so many for that long.
        """
        if self._waiting or not self._has_room(num_bytes):
            await self._wait(num_bytes, patience_s)
        else:
            self.taken_bytes += num_bytes
        try:
            yield
        finally:
            self._give_back(num_bytes)

    async def _wait(self, num_bytes: int, patience_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (num_bytes, turn)
        self._waiting.append(place)
        try:
            async with asyncio.timeout(patience_s):
                await turn
        except BaseException as error:
            if place in self._waiting:
                self._waiting.remove(place)
                self._let_in()  # a smaller one may have stood behind
            elif turn.done() and not turn.cancelled():
                self._give_back(num_bytes)  # let in and gone in the same moment
            if isinstance(error, TimeoutError):
                raise self._refused() from error
            raise

    def _has_room(self, num_bytes: int) -> bool:
        return not self.taken_bytes or self.taken_bytes + num_bytes <= self.max_bytes

    def _refused(self) -> BusyError:
        self.num_refused += 1
        return BusyError(f"too much is under way ({self._what})", retry_after_s=RETRY_S, status=429)

    def _give_back(self, num_bytes: int) -> None:
        self.taken_bytes -= num_bytes
        self._let_in()

    def _let_in(self) -> None:
        """Give what is free to those who wait, in their order."""
        while self._waiting and self._has_room(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self.taken_bytes += num_bytes
                turn.set_result(None)
