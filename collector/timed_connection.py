"""HTTP connections with a deadline for the whole exchange."""

from __future__ import annotations

import io
import socket
import ssl
import time
from http.client import HTTPConnection, HTTPResponse
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable


class TimedConnection(HTTPConnection):
    """Connection for one request, which has a deadline from connecting to the last byte read.

    The timeout of a socket is of each call: a server that sends a byte a second would hold its
    client for good.

    Beyond the deadline, every method and the reading of the answer raise `TimeoutError`.

    Args:
        url: ``http`` or ``https`` URL of the server; only its host and port are used.
        timeout_s: Time from now to the deadline.
        address: Address to connect to. None: one of the host's.
    """

    def __init__(self, url: str, *, timeout_s: float, address: str | None = None) -> None:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        self.default_port = 443 if is_tls else 80
        super().__init__(parts.hostname or "", parts.port or self.default_port)
        self._tls = ssl.create_default_context() if is_tls else None
        self._address = address or self.host
        self._deadline_s = time.monotonic() + timeout_s

    def connect(self) -> None:
        """Connect, with a TLS handshake for the host's name if it is ``https``."""
        sock = socket.create_connection((self._address, self.port), self._left_s())
        if self._tls is not None:
            sock.settimeout(self._left_s())
            sock = self._tls.wrap_socket(sock, server_hostname=self.host)
        self.sock = sock

    def send(self, data: Any) -> None:  # noqa: ANN401  # as in the base
        """Send a part of the request."""
        if self.sock is None:
            self.connect()
        self.sock.settimeout(self._left_s())
        super().send(data)

    def response_class(  # type: ignore[override]  # the base has a class there
        self,
        sock: socket.socket,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> HTTPResponse:
        """Return the answer, which is read until the deadline only."""
        response = HTTPResponse(sock, *args, **kwargs)
        response.fp = io.BufferedReader(_TimedReads(response.fp.detach(), sock, self._left_s))
        return response

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s


class _TimedReads(io.RawIOBase):
    """Reads of a socket, each with the time that is left."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._raw, self._sock, self._left_s = raw, sock, left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:  # noqa: ANN401  # a buffer
        self._sock.settimeout(self._left_s())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
