"""Read a request's body into memory that a decoder can map, and no further than is allowed."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ..errors import WireError
from .retryable import BusyError
from .shared_memory import new_memory, seal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    from fastapi import Request


RETRY_S = 1.0


@dataclass(slots=True)
class Body:
    """A whole body; a context manager, because it holds a descriptor."""

    descriptor: int
    num_bytes: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)


def declared_bytes(request: Request) -> int | None:
    """Return what a request says it sends; None where it does not say, or no number."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None  # noqa: PLR2004


def check_declared(request: Request, *, max_bytes: int) -> None:
    """Refuse a body by its declared length, before any of it is read.

    Raises:
        WireError: 413.
    """
    declared = declared_bytes(request)
    if declared is not None and declared > max_bytes:
        raise _too_large(max_bytes)


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return a small body.

    Raises:
        WireError: 413; the rest of it is not read.
    """
    pieces: list[bytes] = []
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


async def spool_body(request: Request, *, max_bytes: int) -> Body:
    """Return a body in sealed memory.

    Raises:
        WireError: 413 where it is longer, whatever it declared, and 422 where it is empty.
    """
    body = Body(new_memory("rankscope-body"))
    try:
        await _fill(body, request, max_bytes=max_bytes)
    except BaseException:
        os.close(body.descriptor)
        raise
    return body


async def _fill(body: Body, request: Request, *, max_bytes: int) -> None:
    async for piece in request.stream():
        body.num_bytes += len(piece)
        if body.num_bytes > max_bytes:
            raise _too_large(max_bytes)
        _write_all(body.descriptor, piece)
    if not body.num_bytes:
        raise WireError(422, "the body is empty")
    seal(body.descriptor)


def _write_all(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def _too_large(max_bytes: int) -> WireError:
    return WireError(413, f"the body has more than {max_bytes} bytes: send less at once")


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
