"""HTTP connection to a collector, with deadlines for requests and a size limit for answers.

No answer can make the agent hang, follow a redirect, fill its memory, or fall back from TLS to
plain text.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, InvalidHeader
from urllib3.util import Retry

from ..errors import TokenFileError
from ..file_change import FileStamps, read_file_stamps
from ..http.tokens import ClientToken, read_client_token
from .errors import AgentConfigError, LinkError, RetryLaterError, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from urllib3.response import HTTPResponse

MAX_ANSWER_BYTES = 64 << 10
PIECE_BYTES = 16_384
LONGEST_ANSWER_S = 600.0
CLOSE_S = 1.0
SEND_BUFFER_BYTES = 256 << 10
"""A small send buffer in the kernel: what was sent is then nearly what arrived, so that a slow
network can be distinguished from one that does not move."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)

SOCKET_OPTIONS: list[tuple[int, int, int | bytes]] = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES),
    (socket.IPPROTO_TCP, TCP_USER_TIMEOUT, 30_000),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Timeouts of the parts of an exchange."""

    connect_s: float = 5.0
    stall_s: float = 20.0
    """Time to send a piece of 16 KiB."""

    answer_s: float = 30.0
    """Time until the answer. It doubles after each timeout."""


DEADLINES = Deadlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of the collector."""

    status: int
    body: bytes
    """Empty if it was longer than `MAX_ANSWER_BYTES`."""

    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Endpoint:
    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> _Endpoint:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise AgentConfigError(f"--collector {url}: the port is not a number") from None
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise AgentConfigError(f"--collector {url}: give https://HOST[:PORT]")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise AgentConfigError(
                "--collector takes no name, password or query: give https://HOST[:PORT], and the"
                " token in RANKSCOPE_TOKEN_FILE"
            )
        if parts.scheme == "http" and parts.hostname not in LOOPBACK_NAMES:
            raise AgentConfigError(
                f"--collector {url} would send the token in plain text: give https://, or a"
                " loopback address"
            )
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files for the agent's side of TLS."""

    ca: Path | None = None
    """CA of the collector's certificate; None: the CAs that this host trusts."""

    certificate: Path | None = None
    """The agent's certificate, if the collector requires one."""

    key: Path | None = None


class Certificates:
    """TLS context for new connections, which is reloaded if the files change.

    If the changed files can't be used, for instance because only one of certificate and key is
    renewed yet, the former context stays, and the files are read again at the next connection.

    Args:
        files: Paths of the files.

    Raises:
        AgentConfigError: They can't be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = self._read_stamps()
        self._context = _context(files)

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        stamps = self._read_stamps()
        if stamps != self._stamps:
            try:
                self._context = _context(self._files)
            except AgentConfigError:
                return self._context
            self._stamps = stamps
        return self._context

    def _read_stamps(self) -> FileStamps:
        files = self._files
        return read_file_stamps(
            *(path for path in (files.ca, files.certificate, files.key) if path)
        )


def _context(tls: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls.certificate is not None:
            key = None if tls.key is None else str(tls.key)
            context.load_cert_chain(str(tls.certificate), key, password=_no_password)
    except (OSError, ValueError) as error:
        raise AgentConfigError(f"the certificates can't be used: {reason_of(error)}") from error
    return context


def _no_password() -> str:
    raise ValueError("the key has a password: use a key without one, readable by its owner only")


class Link:
    """Sends one request at a time and returns the answer.

    With several addresses, the next one is used after a failure.

    Args:
        urls: Addresses of the collector: ``https://``, or ``http://`` on the loopback.
        agent: Value of ``X-Rankscope-Agent``.
        tls: Files of the certificates.
        environment: Variables that name the token, which is read again for each request.
        deadlines: Timeouts of the parts of an exchange.

    Raises:
        AgentConfigError: An address or a certificate can't be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        agent: str,
        tls: TlsFiles | None = None,
        environment: Mapping[str, str] = os.environ,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        self._endpoints = [_Endpoint.parse(url) for url in urls]
        is_tls = any(endpoint.is_tls for endpoint in self._endpoints)
        self._certificates = Certificates(tls or TlsFiles()) if is_tls else None
        self._agent = agent
        self._environment = environment
        self._index = 0
        self._deadlines = deadlines
        self._answer_s = deadlines.answer_s
        self._connection: HTTPConnection | None = None
        self.sent_token: ClientToken | None = None
        """Token of the last request; None if it had none, or was not sent."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._busy = threading.Lock()

    def token(self) -> ClientToken | None:
        """Return the current token; None if none is configured.

        Raises:
            RetryLaterError: It can't be read.
        """
        try:
            return read_client_token(self._environment)
        except (TokenFileError, OSError) as error:
            raise RetryLaterError(
                f"no token: {error}", pause_s=60.0, is_token_problem=True
            ) from error

    def get(self, path: str) -> Answer:
        """Send a GET request. Raises like `post`."""
        return self._exchange("GET", path, None, "")

    def post(self, path: str, body: bytes, *, content_type: str) -> Answer:
        """Send a POST request with ``body``.

        Raises:
            LinkError: There is no answer, none in time, or it is not HTTP.
            RetryLaterError: The token can't be read, or the link is closed.
        """
        return self._exchange("POST", path, body, content_type)

    def close(self) -> None:
        """Abort the current request, from any thread; later ones raise."""
        self._is_closed = True
        self._shut_down()
        if self._busy.acquire(timeout=CLOSE_S):
            self._disconnect()
            self._busy.release()

    def _exchange(self, method: str, path: str, body: bytes | None, content_type: str) -> Answer:
        with self._busy:
            try:
                return self._exchange_alone(method, path, body, content_type)
            finally:
                if self._is_closed:  # `close` no longer waits for it
                    self._disconnect()

    def _exchange_alone(
        self, method: str, path: str, body: bytes | None, content_type: str
    ) -> Answer:
        if self._is_closed:
            raise RetryLaterError("the agent is stopping")
        headers = {"X-Rankscope-Agent": self._agent, "Accept": "application/json"}
        self.sent_token = None
        self.sent_token = token = self.token()
        if token is not None:
            headers["Authorization"] = token.header()
        if body is not None:
            headers |= {"Content-Type": content_type, "Content-Length": str(len(body))}
        if self._connection is not None:
            # The collector may have closed the idle connection: try again on a new one.
            try:
                return self._try(method, path, body=body, headers=headers)
            except LinkError as error:
                if error.is_late or self._is_closed:
                    raise
        return self._try(method, path, body=body, headers=headers)

    def _try(
        self, method: str, path: str, *, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        begun_s = time.monotonic()
        is_late = threading.Event()
        watchdog = threading.Timer(self._deadline_s(body), self._time_out, [is_late])
        watchdog.daemon = True
        try:
            connection = self._connected()
            watchdog.start()
            answer = self._ask(connection, method, path, body=body, headers=headers)
            # Headers that were cut off by the timeout are parsed as if they were complete.
            _check_in_time(is_late)
        except (HTTPError, HTTPException, OSError) as error:
            self._disconnect()
            self._use_next_address()
            if isinstance(error, TimeoutError) or is_late.is_set():
                self._answer_s = min(2 * self._answer_s, LONGEST_ANSWER_S)
                raise LinkError("no answer in time", is_late=True) from error
            raise LinkError(reason_of(error)) from error
        finally:
            watchdog.cancel()
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # another address may accept it
            self._use_next_address()
        took_s = time.monotonic() - begun_s
        self._answer_s = max(self._deadlines.answer_s, min(self._answer_s, 4 * took_s))
        return answer

    def _deadline_s(self, body: bytes | None) -> float:
        """Return the timeout of the whole exchange, which also ends one that trickles."""
        num_pieces = 1 + len(body or b"") // PIECE_BYTES
        return self._answer_s + num_pieces * self._deadlines.stall_s

    def _ask(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        *,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> Answer:
        target = self._endpoints[self._index].prefix + path
        connection.timeout = self._deadlines.stall_s
        # A file is sent in pieces, each with its own timeout.
        pieces = None if body is None else io.BytesIO(body)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # The collector may reject the body before it is sent completely; read that answer.
            connection.request(
                method,
                target,
                body=pieces,
                headers=headers,
                preload_content=False,
                decode_content=False,
            )
        connection.timeout = self._answer_s
        # An answer that ends the connection holds the socket until it is closed itself.
        with contextlib.closing(connection.getresponse()) as response:
            found = self._read(response)
        if found is None or response.headers.get("connection", "").lower() == "close":
            self._disconnect()
        status, retry_after_s = response.status, _retry_after_s(response)
        return Answer(status=status, body=found or b"", retry_after_s=retry_after_s)

    def _read(self, response: HTTPResponse) -> bytes | None:
        """Return the body; None if it is longer than `MAX_ANSWER_BYTES`."""
        found = b""
        while piece := response.read(MAX_ANSWER_BYTES + 1 - len(found)):
            found += piece
            if len(found) > MAX_ANSWER_BYTES:
                return None
        return found

    def _connected(self) -> HTTPConnection:
        if self._connection is None:
            endpoint = self._endpoints[self._index]
            connection = self._new_connection(endpoint)
            with self._lock:
                self._connection = connection
            connection.connect()
            if self._is_closed:  # `close` was called before there was a socket to shut down
                raise RetryLaterError("the agent is stopping")
        return self._connection

    def _new_connection(self, endpoint: _Endpoint) -> HTTPConnection:
        if not endpoint.is_tls or self._certificates is None:
            return HTTPConnection(
                endpoint.host,
                endpoint.port,
                timeout=self._deadlines.connect_s,
                socket_options=SOCKET_OPTIONS,
            )
        return HTTPSConnection(
            endpoint.host,
            endpoint.port,
            timeout=self._deadlines.connect_s,
            socket_options=SOCKET_OPTIONS,
            ssl_context=self._certificates.context(),
            cert_reqs="CERT_REQUIRED",
        )

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _use_next_address(self) -> None:
        """Use the next address from now on, if there are several."""
        if len(self._endpoints) > 1:
            self._disconnect()
            self._index = (self._index + 1) % len(self._endpoints)

    def _time_out(self, is_late: threading.Event) -> None:
        is_late.set()
        self._shut_down()

    def _shut_down(self) -> None:
        """Wake up the thread that waits for the socket; called by other threads."""
        with self._lock:
            connection = self._connection
            sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                # The shutdown of a TLS socket would send a message first, and block.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _check_in_time(is_late: threading.Event) -> None:
    if is_late.is_set():
        raise TimeoutError


def _retry_after_s(response: HTTPResponse) -> float | None:
    text = response.headers.get("retry-after")
    if not text:
        return None
    try:
        return max(float(Retry().parse_retry_after(text)), 0.0)
    except (InvalidHeader, ValueError, OverflowError):
        return None
