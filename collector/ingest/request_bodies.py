"""Read a request's body into memory that a decoder can map, and no further than is allowed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ..errors import WireError
from .shared_memory import new_memory, seal

if TYPE_CHECKING:
    from types import TracebackType

    from fastapi import Request


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
