"""Link to a collector: addresses, token and certificates of each request, growing deadlines."""

from __future__ import annotations

import os
import ssl
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import TokenFileError
from ..file_change import FileStamps, read_file_stamps
from ..http.tokens import ClientToken, read_client_token
from ..http_client import Answer, HttpClient, Timeouts
from .errors import AgentConfigError, LinkError, RetryLaterError, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PIECE_BYTES = 16_384
LONGEST_ANSWER_S = 600.0
CLOSE_S = 1.0
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Timeouts of the parts of an exchange."""

    connect_s: float = 5.0
    stall_s: float = 20.0
    """Time to send a piece of 16 KiB."""

    answer_s: float = 30.0
    """Time until the answer. It doubles after each timeout."""


DEADLINES = Deadlines()


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
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
        for url in urls:
            _check_url(url)
        if any(url.startswith("https:") for url in urls):
            tls_context = Certificates(tls or TlsFiles()).context
            self._clients = [HttpClient(url, tls_context=tls_context) for url in urls]
        else:
            self._clients = [HttpClient(url) for url in urls]
        self._agent = agent
        self._environment = environment
        self._index = 0
        self._deadlines = deadlines
        self._answer_s = deadlines.answer_s
        self.sent_token: ClientToken | None = None
        """Token of the last request; None if it had none, or was not sent."""
        self._is_closed = False
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
        for client in self._clients:
            client.abort()
        if self._busy.acquire(timeout=CLOSE_S):
            self._disconnect()
            self._busy.release()

    def _exchange(self, method: str, path: str, body: bytes | None, content_type: str) -> Answer:
        headers = {"X-Rankscope-Agent": self._agent, "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        with self._busy:
            try:
                self.sent_token = None
                self.sent_token = token = self.token()
                if token is not None:
                    headers["Authorization"] = token.header()
                if self._clients[self._index].is_connected:
                    # The collector may have closed the idle connection: try again on a new one.
                    try:
                        return self._try(method, path, body=body, headers=headers)
                    except LinkError as error:
                        if error.is_late:
                            raise
                return self._try(method, path, body=body, headers=headers)
            finally:
                if self._is_closed:  # `close` no longer waits for it
                    self._disconnect()

    def _try(
        self, method: str, path: str, *, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        if self._is_closed:
            raise RetryLaterError("the agent is stopping")
        begun_s = time.monotonic()
        num_pieces = 1 + len(body or b"") // PIECE_BYTES
        stall_s = self._deadlines.stall_s
        timeouts = Timeouts(
            connect_s=self._deadlines.connect_s,
            piece_s=stall_s,
            answer_s=self._answer_s,
            whole_s=self._answer_s + num_pieces * stall_s,
        )
        try:
            client = self._clients[self._index]
            answer = client.request(method, path, timeouts=timeouts, body=body, headers=headers)
        except TimeoutError as error:
            self._use_next_address()
            self._answer_s = min(2 * self._answer_s, LONGEST_ANSWER_S)
            raise LinkError("no answer in time", is_late=True) from error
        except OSError as error:
            if self._is_closed:
                raise RetryLaterError("the agent is stopping") from error
            self._use_next_address()
            raise LinkError(reason_of(error)) from error
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # another address may accept it
            self._use_next_address()
        took_s = time.monotonic() - begun_s
        self._answer_s = max(self._deadlines.answer_s, min(self._answer_s, 4 * took_s))
        return answer

    def _disconnect(self) -> None:
        for client in self._clients:
            client.close()

    def _use_next_address(self) -> None:
        if len(self._clients) > 1:
            self._disconnect()
            self._index = (self._index + 1) % len(self._clients)
