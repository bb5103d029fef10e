"""Admission of request bodies: size limits, and budgets for all bodies in progress."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from ..errors import WireError
from .backoff import BusyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from fastapi import Request

RETRY_S = 1.0


def declared_bytes(request: Request) -> int | None:
    """Return the length that a request declares; None if it declares none."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None  # noqa: PLR2004


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return the body of a request. The rest of one that is too large is not read.

    Raises:
        WireError: 413; it is larger than ``max_bytes``, whatever it declares.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def too_large(max_bytes: int) -> WireError:
    """Return the refusal of a body that is too large."""
    return WireError(413, f"the body has more than {max_bytes} bytes: send less at once")


class ByteBudget:
    """A number of bytes that requests take and give back. One event loop uses it.

    Args:
        what: What the bytes are, for the error message.
    """

    def __init__(self, max_bytes: int, *, what: str) -> None:
        self.max_bytes = max_bytes
        self.taken_bytes = 0
        self._what = what
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        """Hold bytes for the duration of the block.

        A request larger than the whole budget is admitted if no other request holds any.

        Raises:
            BusyError: 429; fewer bytes are left.
        """
        if not self._has_room(num_bytes):
            raise self._busy_error()
        self.taken_bytes += num_bytes
        try:
            yield
        finally:
            self._give_back(num_bytes)

    @asynccontextmanager
    async def wait_and_take(self, num_bytes: int, *, timeout_s: float) -> AsyncIterator[None]:
        """Hold bytes for the duration of the block, once they are left; first come, first served.

        Raises:
            BusyError: 429; fewer bytes were left until the timeout.
        """
        if self._waiting or not self._has_room(num_bytes):
            await self._wait(num_bytes, timeout_s)
        else:
            self.taken_bytes += num_bytes
        try:
            yield
        finally:
            self._give_back(num_bytes)

    async def _wait(self, num_bytes: int, timeout_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_bytes, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit_waiting()  # the next one may need fewer bytes
            elif turn.done() and not turn.cancelled():
                self._give_back(num_bytes)  # admitted and cancelled at the same moment
            if isinstance(error, TimeoutError):
                raise self._busy_error() from error
            raise

    def _has_room(self, num_bytes: int) -> bool:
        return not self.taken_bytes or self.taken_bytes + num_bytes <= self.max_bytes

    def _busy_error(self) -> BusyError:
        return BusyError(
            f"too many requests in progress ({self._what})", retry_after_s=RETRY_S, status=429
        )

    def _give_back(self, num_bytes: int) -> None:
        self.taken_bytes -= num_bytes
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self.taken_bytes += num_bytes
                turn.set_result(None)
