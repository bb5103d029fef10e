"""HTTP client with a deadline for each whole exchange and a limit for each answer.

No answer can make its caller hang, follow a redirect, fill its memory, or fall back from TLS to
plain text. urllib3's pool and `Retry` have no deadline for a whole exchange, no timeout of their
own for sending, and no way to end an exchange from another thread; so this uses its connections.
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import threading
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, InvalidHeader
from urllib3.util import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from urllib3.response import BaseHTTPResponse

MAX_ANSWER_BYTES = 64 << 10
CONNECT_S = 10.0
SEND_BUFFER_BYTES = 256 << 10
"""A small send buffer in the kernel: what was sent is then nearly what arrived, so that a slow
network can be distinguished from one that does not move."""

SOCKET_OPTIONS: list[tuple[int, int, int | bytes]] = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", 18), 30_000),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of a server."""

    status: int
    body: bytes
    """Empty if it was longer than the limit."""

    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of the parts of an exchange."""

    connect_s: float = CONNECT_S
    piece_s: float
    """Of sending a piece of 16 KiB."""

    answer_s: float
    """Of each wait for a part of the answer."""

    whole_s: float
    """Of the whole exchange, which also ends one that trickles."""


class HttpClient:
    """A connection to one server, opened when it is needed. One thread sends requests.

    Args:
        url: ``http`` or ``https`` URL of the server; its path is the prefix of all paths.
        tls_context: Returns the TLS context of a new connection.
    """

    def __init__(
        self,
        url: str,
        *,
        tls_context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._parts = urlsplit(url)
        self._tls_context = tls_context
        self._connection: HTTPConnection | None = None
        # urllib3 drops the socket of a connection that ends with its answer, and still reads it.
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def is_connected(self) -> bool:
        """True if a connection is open, which the server may have closed meanwhile."""
        return self._connection is not None

    def request(
        self,
        method: str,
        path: str,
        *,
        timeouts: Timeouts,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> Answer:
        """Send a request and return the answer.

        Raises:
            TimeoutError: A timeout passed.
            OSError: There is no answer, or it is not HTTP.
        """
        is_late = threading.Event()
        watchdog = threading.Timer(timeouts.whole_s, self._time_out, [is_late])
        watchdog.daemon = True
        watchdog.start()
        try:
            connection = self._connected(timeouts)
            connection.timeout = timeouts.piece_s
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # The server may reject the body before it is sent completely; read that answer.
                connection.request(
                    method,
                    self._parts.path.rstrip("/") + path,
                    body=None if body is None else io.BytesIO(body),  # sent in pieces
                    headers={**(headers or {}), "Content-Length": str(len(body or b""))},
                    preload_content=False,
                    decode_content=False,
                )
            connection.timeout = timeouts.answer_s
            # An answer that ends the connection holds the socket until it is closed itself.
            with closing(connection.getresponse()) as response:
                answer_body = _read(response, max_answer_bytes)
            # Headers that were cut off by the watchdog are parsed as if they were complete.
            if is_late.is_set():
                raise TimeoutError("timed out")
        except (HTTPError, HTTPException, OSError) as error:
            self.close()
            if is_late.is_set() or isinstance(error, TimeoutError):
                raise TimeoutError("timed out") from error
            if isinstance(error, OSError):
                raise
            raise ConnectionError(str(error) or type(error).__name__) from error
        finally:
            watchdog.cancel()
        if answer_body is None or response.headers.get("connection", "").lower() == "close":
            self.close()
        return Answer(
            status=response.status,
            body=answer_body or b"",
            retry_after_s=_retry_after_s(response.headers.get("retry-after")),
        )

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        with self._lock:
            connection, self._connection, self._sock = self._connection, None, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Make the exchange in progress fail; called by other threads."""
        with self._lock:
            sock = self._sock
            if sock is None and self._connection is not None:
                sock, self._connection = self._connection.sock, None  # send nothing once connected
        if sock is not None:
            with contextlib.suppress(OSError):
                # The shutdown of a TLS socket would send a message first, and block.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _connected(self, timeouts: Timeouts) -> HTTPConnection:
        if self._connection is None:
            host = self._parts.hostname or ""
            connect_s = min(timeouts.connect_s, timeouts.whole_s)
            connection = (
                HTTPSConnection(
                    host,
                    self._parts.port or 443,
                    timeout=connect_s,
                    socket_options=SOCKET_OPTIONS,
                    ssl_context=self._tls_context(),
                    cert_reqs="CERT_REQUIRED",
                )
                if self._parts.scheme == "https"
                else HTTPConnection(
                    host,
                    self._parts.port or 80,
                    timeout=connect_s,
                    socket_options=SOCKET_OPTIONS,
                )
            )
            with self._lock:
                self._connection = connection
            connection.connect()
            with self._lock:
                if self._connection is connection:
                    self._sock = connection.sock
                    return connection
            connection.close()
            raise ConnectionAbortedError("aborted")
        return self._connection

    def _time_out(self, is_late: threading.Event) -> None:
        is_late.set()
        self.abort()


def request_once(
    method: str,
    url: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> Answer:
    """Send one request on a connection of its own; arguments and errors of `HttpClient`."""
    timeouts = Timeouts(piece_s=timeout_s, answer_s=timeout_s, whole_s=timeout_s)
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc}"
    with closing(HttpClient(server)) as client:
        return client.request(
            method,
            url.removeprefix(server),
            timeouts=timeouts,
            body=body,
            headers=headers,
            max_answer_bytes=max_answer_bytes,
        )


def _read(response: BaseHTTPResponse, max_bytes: int) -> bytes | None:
    """Return the body; None if it is longer than ``max_bytes``."""
    body = bytearray()
    while piece := response.read(max_bytes + 1 - len(body)):
        body += piece
        if len(body) > max_bytes:
            return None
    return bytes(body)


def _retry_after_s(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return max(float(Retry().parse_retry_after(text)), 0.0)
    except (InvalidHeader, ValueError, OverflowError):
        return None
