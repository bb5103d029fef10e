"""One connection with deadlines: a client who is slow on purpose is cut off, nobody waits."""

from __future__ import annotations

import struct
from socket import SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .refusals import Refusal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from .limits import ConnectionLimits
    from .refusals import Refusals


LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


class StrictConnection(h11.Connection):
    """A server's side of a connection that takes no request with two lengths or a long header.

    h11 lets the pieces win where a request declares a length too. A proxy before us may do it
    the other way round, and take the end of one client's request for the next one's.

    Args:
        max_header_bytes: Of a request's line and headers; h11 counts only what comes in parts.

    Source: RFC 9112, 6.1 and 11.2.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes

    def next_event(self) -> Any:  # noqa: ANN401  # h11's events and its two marks
        """Return what came next.

        Raises:
            h11.RemoteProtocolError: It is no request that all programs read alike.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._check(event)
        return event

    def _check(self, request: h11.Request) -> None:
        headers = list(request.headers)
        if {name for name, _ in headers} >= LENGTHS:
            raise h11.RemoteProtocolError("a length and pieces")
        num_bytes = len(request.method) + len(request.target)
        num_bytes += sum(len(name) + len(value) for name, value in headers)
        if num_bytes > self._max_header_bytes:
            raise h11.RemoteProtocolError("too long a header", error_status_hint=431)


class Window:
    """Says whether a total grew too little in a stretch of time.

    Stretches, not the mean since the begin: who sent much at first could trickle for hours.

    Args:
        length_s: Of a stretch.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._begin: tuple[float, int] | None = None

    def is_below(self, least_per_s: int, now_s: float, *, total: int, is_due: bool) -> bool:
        """Return whether a stretch ends now in which the total grew by less than it had to.

        Args:
            least_per_s: What is asked for.
            now_s: Any clock that goes forward.
            total: So far.
            is_due: Whether it has to grow at all just now; a stretch begins when it does.
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


RESET = struct.pack("ii", 1, 0)
"""``SO_LINGER`` on, for no time."""


class LimitedConnection(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, looked at by `sweep` once in a while.

    A sweep instead of a timer for each deadline: a flood then sets no timers.

    Args:
        config: Of the server, loaded.
        server_state: Shared by all connections.
        app_state: Of the application.
        loop: That it runs in.
        limits: The deadlines.
        refusals: Counts who is cut off.
        client: Whose it is, as `client_key` says.
        on_end: Called once when it is over.
    """

    def __init__(  # noqa: PLR0913  # uvicorn's four and ours
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
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
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
        """Begin to wait for a header."""
        super().connection_made(transport)
        self._header_since_s = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place away."""
        super().connection_lost(exc)
        self._on_end()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._num_received += len(data)
        if self._header_since_s is None and self.conn.their_state is h11.IDLE:
            self._header_since_s = self.loop.time()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._header_since_s = None

    def on_response_complete(self) -> None:
        """Wait for the next request; its time begins with its first byte."""
        self._header_since_s = None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refusals.note(Refusal.BAD_HTTP, client=self._visitor, status=400)
        super().send_400_response(msg)

    def shutdown(self) -> None:
        """Let the request under way finish, and then close; what closes already goes on so."""
        if not self.transport.is_closing():
            super().shutdown()

    def sweep(self, now_s: float) -> None:
        """Cut the connection off where it is too slow.

        Args:
            now_s: The loop's clock.
        """
        unsent_bytes = self._unsent_bytes()
        if unsent_bytes is None:
            return  # The deadline of TLS's own goodbye ends it.
        if self._is_lingering(now_s):
            self._cut_off()
            return
        slow = (
            self._slow_reader(now_s, unsent_bytes)
            or self._slow_header(now_s)
            or self._slow_body(now_s)
        )
        if slow is not None:
            self._refusals.note(slow, client=self._visitor)
            self._cut_off()

    def _cut_off(self) -> None:
        socket = self.transport.get_extra_info("socket")
        if socket is not None:
            # Reset: the kernel would offer megabytes to a client who takes none, for minutes.
            socket.setsockopt(SOL_SOCKET, SO_LINGER, RESET)
        self.transport.abort()

    def _slow_header(self, now_s: float) -> Refusal | None:
        since_s = self._header_since_s
        is_late = since_s is not None and now_s - since_s >= self._limits.header_s
        return Refusal.SLOW_HEADER if is_late else None

    def _slow_body(self, now_s: float) -> Refusal | None:
        is_due = self.conn.their_state is h11.SEND_BODY and not (
            # It is we who keep it waiting.
            self.flow.read_paused or self.cycle.waiting_for_100_continue
        )
        least = self._limits.min_body_bytes_per_s
        is_slow = self._body.is_below(least, now_s, total=self._num_received, is_due=is_due)
        return Refusal.SLOW_BODY if is_slow else None

    def _unsent_bytes(self) -> int | None:
        try:
            return self.transport.get_write_buffer_size()
        except AttributeError:
            # asyncio's transport of TLS that was closed twice while the client has not said
            # goodbye: it has let go of what knows the answer.
            return None

    def _slow_reader(self, now_s: float, unsent: int) -> Refusal | None:
        # It grows only below the mark at which the application is stopped, so a client who
        # takes nothing can't make it grow for ever.
        is_due = 0 < unsent <= self._unsent
        self._unsent = unsent
        least = self._limits.min_reader_bytes_per_s
        is_slow = self._reader.is_below(least, now_s, total=-unsent, is_due=is_due)
        return Refusal.SLOW_READER if is_slow else None

    def _is_lingering(self, now_s: float) -> bool:
        """Return whether the rest of a body that was answered comes for too long."""
        is_rest = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if not is_rest:
            self._linger = None
            return False
        since_s, before = self._linger = self._linger or (now_s, self._num_received)
        is_long = now_s - since_s >= self._limits.linger_s
        return is_long or self._num_received - before > self._limits.max_linger_bytes
