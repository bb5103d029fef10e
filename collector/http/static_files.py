"""Cache of static files in memory. A slow reader then occupies no thread of the pages.

A module of its own: it is independent of the application and wraps any ASGI application.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .requests import read_headers

if TYPE_CHECKING:
    from .requests import AsgiApp, Message, Receive, Scope, Send

OK = 200
NOT_MODIFIED = 304
GZIP_LEVEL = 6
"""Each file is compressed once: the 8.4 MB of a first visit take 0.3 s and become 2.4 MB."""

MAX_PACKED_RATIO = 0.9

STAMP = b"m="
"""Dash's pages name the time of a file's last change so: another content has another address."""

FOREVER = b"public, max-age=31536000, immutable"

PIECE_BYTES = 2**16
"""Size of a transport's write buffer. Larger pieces would be in memory twice."""

MAX_BYTES = 64 * 2**20
"""Largest size of the cache: three times the files of Dash, its components and plotly."""

MAX_PATHS = 1024
"""Largest number of cached paths. Dash accepts any version in a file's name, so the number of
valid paths is unbounded."""

KEPT_HEADERS = frozenset({b"cache-control", b"content-type", b"etag", b"last-modified"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A complete answer of the application."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    packed: bytes = b""
    """The body compressed by gzip; empty if that saves nothing."""


class StaticFiles:
    """ASGI middleware that answers for static files of ``app``, and passes all else on.

    A file is requested from ``app`` once and then sent from memory. Static files do not change
    while the server runs.

    Args:
        app: Application with the files. It gets neither headers nor body of the client.
        prefixes: Prefixes of the files' paths.
        max_bytes: Largest sum of contents. Equal contents count once. Files beyond it are
            requested from ``app`` each time.
        max_paths: Largest number of cached paths.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        prefixes: tuple[str, ...],
        max_bytes: int = MAX_BYTES,
        max_paths: int = MAX_PATHS,
    ) -> None:
        self._app = app
        self._prefixes = prefixes
        self._max_bytes = max_bytes
        self._max_paths = max_paths
        self._files: dict[str, _File] = {}
        self._bodies: dict[bytes, tuple[bytes, bytes]] = {}
        self._num_bytes = 0
        self._fetching = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request."""
        if (
            scope["type"] != "http"
            or scope["method"] not in {"GET", "HEAD"}
            or not scope["path"].startswith(self._prefixes)
        ):
            await self._app(scope, receive, send)
            return
        file = self._files.get(scope["path"])
        if file is None:
            file = await self._fetch_file(scope)
        if scope["query_string"].startswith(STAMP):
            kept = [pair for pair in file.headers if pair[0].lower() != b"cache-control"]
            file = replace(file, headers=[*kept, (b"cache-control", FOREVER)])
        if file.packed:
            file = replace(file, headers=[*file.headers, (b"vary", b"Accept-Encoding")])
        if file.status == OK and _has_current_copy(scope, file):
            file = _File(status=NOT_MODIFIED, headers=file.headers, body=b"")
        elif file.packed and _accepts_gzip(scope):
            headers = [*file.headers, (b"content-encoding", b"gzip")]
            file = replace(file, headers=headers, body=file.packed)
        await _answer(file, send, with_body=scope["method"] == "GET")

    async def _fetch_file(self, scope: Scope) -> _File:
        """Return a file of the application, and cache it if it fits. One request at a time."""
        path = scope["path"]
        async with self._fetching:
            if path in self._files:  # another request cached it meanwhile
                return self._files[path]
            file = await _fetch(self._app, scope)
            if file.status != OK:
                return file
            digest = hashlib.sha256(file.body).digest()
            if digest not in self._bodies:
                packed = await asyncio.to_thread(_pack, file.body)
                if self._num_bytes + len(file.body) + len(packed) > self._max_bytes:
                    return file
                self._bodies[digest] = file.body, packed
                self._num_bytes += len(file.body) + len(packed)
            body, packed = self._bodies[digest]
            file = _File(status=OK, headers=file.headers, body=body, packed=packed)
            if len(self._files) < self._max_paths:
                self._files[path] = file
            return file


def _pack(body: bytes) -> bytes:
    """Return the body compressed; empty if that does not save a tenth."""
    packed = gzip.compress(body, GZIP_LEVEL, mtime=0)
    return packed if len(packed) <= MAX_PACKED_RATIO * len(body) else b""


def _accepts_gzip(scope: Scope) -> bool:
    """Return whether the client accepts gzip: it is named, and not with a quality of 0."""
    for one in read_headers(scope).get("accept-encoding", "").lower().split(","):
        name, _, quality = one.replace(" ", "").partition(";q=")
        if name in {"gzip", "*"}:
            return quality.strip("0.") != "" or not quality
    return False


async def _fetch(app: AsgiApp, scope: Scope) -> _File:
    """Return the application's complete answer to a plain GET."""
    status, headers, pieces = OK, [], []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = [pair for pair in message["headers"] if pair[0].lower() in KEPT_HEADERS]
        else:
            pieces.append(message.get("body", b""))

    host = [pair for pair in scope["headers"] if pair[0].lower() == b"host"]
    plain = {**scope, "method": "GET", "headers": host, "query_string": b""}
    await app(plain, receive, send)
    return _File(status=status, headers=headers, body=b"".join(pieces))


def _has_current_copy(scope: Scope, file: _File) -> bool:
    """Return whether the client has the file already, compared by ``ETag``."""
    etag = dict(file.headers).get(b"etag", b"").decode("latin-1")
    held = read_headers(scope).get("if-none-match", "")
    return bool(etag) and etag in [one.strip().removeprefix("W/") for one in held.split(",")]


async def _answer(file: _File, send: Send, *, with_body: bool) -> None:
    length = [(b"content-length", str(len(file.body)).encode())]
    more = [] if file.status == NOT_MODIFIED else length
    await send(
        {"type": "http.response.start", "status": file.status, "headers": [*file.headers, *more]}
    )
    body = memoryview(file.body if with_body else b"")
    for first in range(0, len(body), PIECE_BYTES):
        piece = bytes(body[first : first + PIECE_BYTES])
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
