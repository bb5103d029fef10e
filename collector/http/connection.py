"""HTTP connection with deadlines and limits against slow clients."""

from __future__ import annotations

import struct
from socket import SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .refusals import Refusal
from .requests import PROOF_KEY

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from .limits import ConnectionLimits
    from .refusals import Refusals


LENGTHS = frozenset({b"content-length", b"transfer-encoding"})

RESET = struct.pack("ii", 1, 0)
"""``SO_LINGER`` on with a timeout of 0: closing sends a reset."""


class StrictConnection(h11.Connection):
    """Server side of an h11 connection that refuses ambiguous requests and long headers.

    If a request has both ``Content-Length`` and ``Transfer-Encoding``, h11 uses the latter. A
    proxy in front may use the former and read the end of one request as the next (request
    smuggling).

    Args:
        max_header_bytes: Limit for the request line and headers. h11 checks its own limit only if
            they arrive in several pieces.

    Source: RFC 9112, 6.1 and 11.2.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes

    def next_event(self) -> Any:  # noqa: ANN401  # h11's events and two sentinels
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: The request is invalid, ambiguous or too long.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._check(event)
        return event

    def _check(self, request: h11.Request) -> None:
        headers = list(request.headers)
        if {name for name, _ in headers} >= LENGTHS:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        num_bytes = len(request.method) + len(request.target)
        num_bytes += sum(len(name) + len(value) for name, value in headers)
        if num_bytes > self._max_header_bytes:
            raise h11.RemoteProtocolError("the header is too long", error_status_hint=431)


class Window:
    """Minimum-throughput check over fixed windows of time.

    The mean since the begin would not do: a client that sends much at first could then send a
    byte a minute for hours.

    Args:
        length_s: Length of a window.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._begin: tuple[float, int] | None = None

    def is_below(self, least_per_s: int, now_s: float, *, total: int, is_due: bool) -> bool:
        """Return whether a window ends now in which the total grew too little.

        Args:
            least_per_s: Minimum rate.
            now_s: Any monotonic clock.
            total: Value so far.
            is_due: Whether the total has to grow now. A window begins when this becomes true.
        """
        if not is_due:
            self._begin = None
            return False
        if self._begin is None:
            self._begin = (now_s, total)
        begin_s, before = self._begin
        if now_s - begin_s < self._length_s:
            return False
        self._begin = (now_s, total)
        return total - before < least_per_s * self._length_s


class LimitedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with deadlines, which `sweep` checks.

    One sweep checks all connections, so that a flood of connections sets no timers.

    Args:
        config: Loaded configuration of uvicorn.
        server_state: State shared by all connections.
        app_state: State of the application.
        loop: Event loop.
        limits: Deadlines and minimum rates.
        refusals: Counts connections that are cut off.
        client: Key of the client (`client_key`).
        on_end: Called once when the connection has ended.
        on_proof: Called when a request of the connection had a valid credential.
    """

    def __init__(  # noqa: PLR0913  # uvicorn's four parameters and ours
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        *,
        limits: ConnectionLimits,
        refusals: Refusals,
        client: str,
        on_end: Callable[[], None],
        on_proof: Callable[[], None] = lambda: None,
    ) -> None:
        # uvicorn hands a copy to each request of the connection.
        super().__init__(config, server_state, {**app_state, PROOF_KEY: on_proof}, loop)
        self.conn = StrictConnection(limits.max_header_bytes)
        self._limits = limits
        self._refusals = refusals
        self._visitor = client
        self._on_end = on_end
        self._num_received = 0
        self._header_since_s: float | None = None
        self._body = Window(limits.body_window_s)
        self._linger: tuple[float, int] | None = None
        self._reader = Window(limits.reader_window_s)
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first header."""
        super().connection_made(transport)
        self._header_since_s = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection."""
        super().connection_lost(exc)
        self._on_end()

    def data_received(self, data: bytes) -> None:
        """Read bytes of a request."""
        self._num_received += len(data)
        if self._header_since_s is None and self.conn.their_state is h11.IDLE:
            self._header_since_s = self.loop.time()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._header_since_s = None
        if self._is_lingering(self.loop.time()):  # much more may arrive before the next sweep
            self.cut_off()

    def on_response_complete(self) -> None:
        """Wait for the next request. Its deadline starts with its first byte."""
        self._header_since_s = None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not valid HTTP."""
        self._refusals.record(Refusal.BAD_HTTP, client=self._visitor, status=400)
        super().send_400_response(msg)

    def shutdown(self) -> None:
        """Close after the current request. Does nothing if the connection is already closing."""
        if not self.transport.is_closing():
            super().shutdown()

    def sweep(self, now_s: float) -> None:
        """Cut the connection off if it is too slow.

        Args:
            now_s: Time of the event loop.
        """
        unsent_bytes = self._unsent_bytes()
        if unsent_bytes is None:
            return  # The timeout of the TLS shutdown ends it.
        if self._is_lingering(now_s):
            self.cut_off()
            return
        slow = (
            self._slow_reader(now_s, unsent_bytes)
            or self._slow_header(now_s)
            or self._slow_body(now_s)
        )
        if slow is not None:
            self._refusals.record(slow, client=self._visitor)
            self.cut_off()

    def cut_off(self) -> None:
        """End the connection at once, with a reset."""
        socket = self.transport.get_extra_info("socket")
        if socket is not None:
            # Reset: otherwise the kernel keeps unsent megabytes for minutes.
            socket.setsockopt(SOL_SOCKET, SO_LINGER, RESET)
        self.transport.abort()

    def _slow_header(self, now_s: float) -> Refusal | None:
        since_s = self._header_since_s
        is_late = since_s is not None and now_s - since_s >= self._limits.header_s
        return Refusal.SLOW_HEADER if is_late else None

    def _slow_body(self, now_s: float) -> Refusal | None:
        is_due = self.conn.their_state is h11.SEND_BODY and not (
            # Then the server keeps the client waiting.
            self.flow.read_paused or self.cycle.waiting_for_100_continue
        )
        least = self._limits.min_body_bytes_per_s
        is_slow = self._body.is_below(least, now_s, total=self._num_received, is_due=is_due)
        return Refusal.SLOW_BODY if is_slow else None

    def _unsent_bytes(self) -> int | None:
        try:
            return self.transport.get_write_buffer_size()
        except AttributeError:
            # A TLS transport of asyncio that was closed twice before the client's close_notify:
            # it has dropped the object that knows the answer.
            return None

    def _slow_reader(self, now_s: float, unsent: int) -> Refusal | None:
        # It grows only up to the limit at which the application is paused, so a client that reads
        # nothing cannot make it grow forever.
        is_due = 0 < unsent <= self._unsent
        self._unsent = unsent
        least = self._limits.min_reader_bytes_per_s
        is_slow = self._reader.is_below(least, now_s, total=-unsent, is_due=is_due)
        return Refusal.SLOW_READER if is_slow else None

    def _is_lingering(self, now_s: float) -> bool:
        """Return whether the rest of an answered request's body arrives for too long."""
        is_rest = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if not is_rest:
            self._linger = None
            return False
        since_s, before = self._linger = self._linger or (now_s, self._num_received)
        is_long = now_s - since_s >= self._limits.linger_s
        return is_long or self._num_received - before > self._limits.max_linger_bytes
