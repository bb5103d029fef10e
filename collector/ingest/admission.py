"""Admission of request bodies: size limits, and budgets for all bodies in progress."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ..errors import WireError
from .backoff import BusyError
from .shared_memory import create_memory, seal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from fastapi import Request

RETRY_S = 1.0


@dataclass(slots=True)
class Body:
    """A whole body in memory; a context manager that closes its descriptor."""

    descriptor: int
    num_bytes: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def declared_bytes(request: Request) -> int | None:
    """Return the length that a request declares; None if it declares none."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None  # noqa: PLR2004


def check_declared_bytes(request: Request, *, max_bytes: int) -> None:
    """Check a body's declared length before any of it is read.

    Raises:
        WireError: 413; it is larger than ``max_bytes``.
    """
    declared = declared_bytes(request)
    if declared is not None and declared > max_bytes:
        raise _too_large(max_bytes)


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return a small body.

    Raises:
        WireError: 413; it is larger than ``max_bytes``. The rest is not read.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


async def read_body_into_memory(request: Request, *, max_bytes: int) -> Body:
    """Return a body in sealed memory that a decoder can map.

    Raises:
        WireError: 413 if it is larger than ``max_bytes``, whatever it declared; 422 if it is empty.
    """
    body = Body(create_memory("rankscope-body"))
    try:
        await _fill(body, request, max_bytes=max_bytes)
    except BaseException:
        os.close(body.descriptor)
        raise
    return body


async def _fill(body: Body, request: Request, *, max_bytes: int) -> None:
    async for chunk in request.stream():
        body.num_bytes += len(chunk)
        if body.num_bytes > max_bytes:
            raise _too_large(max_bytes)
        _write_all(body.descriptor, chunk)
    if not body.num_bytes:
        raise WireError(422, "the body is empty")
    seal(body.descriptor)


def _write_all(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _too_large(max_bytes: int) -> WireError:
    return WireError(413, f"the body has more than {max_bytes} bytes: send less at once")


class ByteBudget:
    """A number of bytes that requests take and give back. One event loop uses it.

    Args:
        max_bytes: The whole budget.
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
        """Give free bytes to waiting requests, in their order."""
        while self._waiting and self._has_room(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self.taken_bytes += num_bytes
                turn.set_result(None)
