"""The one connection to a collector: what goes out is bounded in time, what comes back in size.

Nothing that a collector (or whatever stands in its place) answers can make the agent hang,
follow it elsewhere, fill its memory, or speak in plain text where TLS was asked for.
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
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, InvalidHeader
from urllib3.util import Retry

from ..errors import TokenFileError
from ..file_change import FileStamps, read_file_stamps
from ..http.token_file import OwnToken, read_own_token
from .errors import AgentConfigError, LinkError, RetryLaterError, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from urllib3.response import HTTPResponse

MAX_ANSWER_BYTES = 64 << 10
PIECE_BYTES = 16_384
LONGEST_ANSWER_S = 600.0
SERVER_ERROR = 500
CLOSE_S = 1.0
SEND_BUFFER_BYTES = 256 << 10
"""What the kernel may hold of a request: what has left is then nearly what has arrived, so that
a slow network is told from one that stands."""

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
    """How long the parts of an exchange may take."""

    connect_s: float = 5.0
    stall_s: float = 20.0
    """For each piece of 16 KiB to leave."""

    answer_s: float = 30.0
    """At first; one that comes late makes the next longer."""


DEADLINES = Deadlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    """Empty where it was longer than `MAX_ANSWER_BYTES`."""

    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Endpoint:
    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> _Endpoint:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise AgentConfigError(f"--collector {url}: the port is no number") from None
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


class Link:
    """Sends one request at a time and returns the answer.

    With several addresses, one that fails makes room for the next.

    Args:
        urls: Where the collector is: ``https://``, or ``http://`` on the loopback.
        agent: Value of ``X-Rankscope-Agent``.
        tls: Certificates.
        environment: Names the token, which is read anew for each request.
        deadlines: How long the parts of an exchange may take.

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
        self._endpoints = [_Endpoint.of(url) for url in urls]
        is_tls = any(endpoint.is_tls for endpoint in self._endpoints)
        self._certificates = Certificates(tls or TlsFiles()) if is_tls else None
        self._agent = agent
        self._environment = environment
        self._place = 0
        self._deadlines = deadlines
        self._answer_s = deadlines.answer_s
        self._connection: HTTPConnection | None = None
        self.sent_token: OwnToken | None = None
        """What the last request went out with; None where it had none, or did not go."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._busy = threading.Lock()

    def token(self) -> OwnToken | None:
        """Return the token of this moment.

        Raises:
            RetryLaterError: It can't be read.
        """
        try:
            return read_own_token(self._environment)
        except (TokenFileError, OSError) as error:
            raise RetryLaterError(f"no token: {error}", pause_s=60.0, is_token=True) from error

    def get(self, path: str) -> Answer:
        """Ask for ``path``. Raises as `post`."""
        return self._exchange("GET", path, None, "")

    def post(self, path: str, body: bytes, *, content_type: str) -> Answer:
        """Send ``body``.

        Raises:
            LinkError: No answer came, or none in time, or it is no HTTP.
            RetryLaterError: There is no token, or the link is closed.
        """
        return self._exchange("POST", path, body, content_type)

    def close(self) -> None:
        """End the request under way, from any thread; later ones raise."""
        self._is_closed = True
        self._sever()
        if self._busy.acquire(timeout=CLOSE_S):
            self._drop()
            self._busy.release()

    def _exchange(self, method: str, path: str, body: bytes | None, content_type: str) -> Answer:
        with self._busy:
            return self._exchange_alone(method, path, body, content_type)

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
            # The collector may have closed it while it was idle: that is no trouble yet.
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
        watchdog = threading.Timer(self._deadline_s(body), self._give_up, [is_late])
        watchdog.daemon = True
        try:
            connection = self._connected()
            watchdog.start()
            answer = self._ask(connection, method, path, body=body, headers=headers)
            # Headers that were cut short in the middle read as if they were all.
            _check_in_time(is_late)
        except (HTTPError, HTTPException, OSError) as error:
            self._drop()
            self._go_on()
            if isinstance(error, TimeoutError) or is_late.is_set():
                self._answer_s = min(2 * self._answer_s, LONGEST_ANSWER_S)
                raise LinkError("no answer in time", is_late=True) from error
            raise LinkError(reason_of(error)) from error
        finally:
            watchdog.cancel()
        if answer.status >= SERVER_ERROR:  # another may well take what this one can't just now
            self._go_on()
        took_s = time.monotonic() - begun_s
        self._answer_s = max(self._deadlines.answer_s, min(self._answer_s, 4 * took_s))
        return answer

    def _deadline_s(self, body: bytes | None) -> float:
        """Return how long the whole exchange may take, whatever drips meanwhile."""
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
        target = self._endpoints[self._place].prefix + path
        connection.timeout = self._deadlines.stall_s
        # As a file it goes out in pieces, each with a deadline of its own.
        pieces = None if body is None else io.BytesIO(body)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A refusal may come before the whole body has gone: it is read below.
            connection.request(
                method,
                target,
                body=pieces,
                headers=headers,
                preload_content=False,
                decode_content=False,
            )
        connection.timeout = self._answer_s
        response = connection.getresponse()
        found = self._read(response)
        if found is None or response.headers.get("connection", "").lower() == "close":
            self._drop()
        status, retry_after_s = response.status, _retry_after_s(response)
        return Answer(status=status, body=found or b"", retry_after_s=retry_after_s)

    def _read(self, response: HTTPResponse) -> bytes | None:
        """Return the body; None where it is longer than one may be, or no length fits."""
        found = b""
        while piece := response.read(MAX_ANSWER_BYTES + 1 - len(found)):
            found += piece
            if len(found) > MAX_ANSWER_BYTES:
                return None
        return found

    def _connected(self) -> HTTPConnection:
        if self._connection is None:
            endpoint = self._endpoints[self._place]
            connection = self._new_connection(endpoint)
            with self._lock:
                self._connection = connection
            connection.connect()
            if self._is_closed:  # meanwhile: there was nothing yet that `close` could end
                self._drop()
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

    def _drop(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _go_on(self) -> None:
        """Ask the next address from now on, where there is one."""
        if len(self._endpoints) > 1:
            self._drop()
            self._place = (self._place + 1) % len(self._endpoints)

    def _give_up(self, is_late: threading.Event) -> None:
        is_late.set()
        self._sever()

    def _sever(self) -> None:
        """Make whoever waits on the socket wait no more; called by other threads."""
        with self._lock:
            connection = self._connection
            sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                # A TLS socket would say goodbye first, and wait.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Files of the agent's side of TLS."""

    ca: Path | None = None
    """Who may sign the collector's certificate; None: whom this machine trusts."""

    certificate: Path | None = None
    """The agent's own, where the collector asks for one."""

    key: Path | None = None


class Certificates:
    """Holds what a new connection needs; renewed files are taken up at the next one.

    An agent lives longer than a certificate. Files that can't be used, such as a pair of which
    one half is renewed, leave what was read before, and are looked at again each time.

    Args:
        files: Where they are.

    Raises:
        AgentConfigError: They can't be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._marks = self._look()
        self._context = _context(files)

    def context(self) -> ssl.SSLContext:
        """Return what to connect with."""
        marks = self._look()
        if marks != self._marks:
            try:
                self._context = _context(self._files)
            except AgentConfigError:
                return self._context
            self._marks = marks
        return self._context

    def _look(self) -> FileStamps:
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
    raise ValueError("the key has a password: give one without, readable by its owner alone")
