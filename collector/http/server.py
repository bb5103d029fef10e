"""Runs an application on a socket, with the edge around it: TLS, caps and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from .connection import LimitedConnection
from .limits import ConnectionLimits
from .refusals import Refusal, Refusals
from .requests import client_key

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from .requests import AsgiApp
    from .tls import CertificateRenewal

    MakeProtocol = Callable[[str, Callable[[], None]], asyncio.Protocol]
    """Takes whose connection it is, and what to call when it is over."""


NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
NONE_LEFT_PAUSE_S = 0.2
"""The connection stays in the kernel's queue, so asking again at once would spin."""

HERE = "this-server"


class Acceptor:
    """Accepts on one bound socket until closed.

    Args:
        bound: Listens; the caller closes it.
        make_protocol: Makes one connection's protocol.
        tls: None: plain.
        limits: The caps.
        refusals: Counts who is turned away.
    """

    def __init__(
        self,
        bound: socket.socket,
        *,
        make_protocol: MakeProtocol,
        tls: ssl.SSLContext | None,
        limits: ConnectionLimits,
        refusals: Refusals,
    ) -> None:
        self._bound = bound
        self._make_protocol = make_protocol
        self._tls = tls
        self._limits = limits
        self._refusals = refusals
        self._seats: Counter[str] = Counter()
        self._handshakes: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        """Return how many there are, those that still agree on TLS too."""
        return self._seats.total()

    def renew(self, tls: ssl.SSLContext) -> None:
        """Serve another certificate to those who come from now on."""
        self._tls = tls

    async def run(self) -> None:
        """Accept until cancelled; handshakes under way are given up then."""
        self._bound.settimeout(0)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._bound)
                except OSError as error:
                    await self._wait_out(error)
                else:
                    self._take(connection, client_key(str(address[0])))
        finally:
            for handshake in self._handshakes:
                handshake.cancel()

    async def _wait_out(self, error: OSError) -> None:
        """Wait where the system is out of files; a connection that broke off is no error.

        Raises:
            OSError: The socket itself is broken.
        """
        if error.errno in NONE_LEFT:
            self._refusals.note(Refusal.NO_FILES_LEFT, client=HERE)
            await asyncio.sleep(NONE_LEFT_PAUSE_S)
        elif error.errno in {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}:
            raise error

    def _take(self, connection: socket.socket, client: str) -> None:
        refusal = self._full(client)
        if refusal is not None:
            self._refusals.note(refusal, client=client)
            connection.close()
            return
        self._seats[client] += 1
        task = asyncio.get_running_loop().create_task(self._connect(connection, client))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _full(self, client: str) -> Refusal | None:
        if self._seats[client] >= self._limits.max_connections_per_address:
            return Refusal.TOO_MANY_FROM_ADDRESS
        # A missing name reads as 0 and is not kept, so the count of names stays bounded.
        if self.num_connections >= self._limits.max_connections:
            return Refusal.TOO_MANY_CONNECTIONS
        return None

    async def _connect(self, connection: socket.socket, client: str) -> None:
        seat = _Seat(self._seats, client)
        handshake_s = None if self._tls is None else self._limits.handshake_s
        shutdown_s = None if self._tls is None else self._limits.linger_s
        try:
            # asyncio does so where it listens itself. An answer is written in two pieces, and the
            # second would wait 40 ms until a client who waits for it confirms the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(client, seat.leave),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=shutdown_s,
            )
        except OSError as error:
            seat.leave()
            if self._tls is not None:
                reason = getattr(error, "reason", None) or type(error).__name__
                self._refusals.note(Refusal.TLS_HANDSHAKE, client=client, why=str(reason))
        except asyncio.CancelledError:
            seat.leave()
            raise
        finally:
            if seat.is_left:
                with contextlib.suppress(OSError):
                    connection.close()


class _Seat:
    """One connection's place in the count; left once, however often it is said."""

    def __init__(self, seats: Counter[str], client: str) -> None:
        self._seats = seats
        self._visitor = client
        self.is_left = False

    def leave(self) -> None:
        if self.is_left:
            return
        self.is_left = True
        self._seats[self._visitor] -= 1
        if not self._seats[self._visitor]:
            del self._seats[self._visitor]


SHUTDOWN_S = 2
DEFAULT_LIMITS = ConnectionLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Where visitors come in."""

    bound: socket.socket
    """Listens; whoever made it closes it."""

    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""

    renewal: CertificateRenewal | None = None
    """Brings renewed certificates; None: ``tls`` stays as it is."""


class HttpServer(uvicorn.Server):
    """uvicorn with our own listener: it listens on nothing itself.

    Args:
        app: The application, gate included.
        listeners: Where visitors come in.
        limits: Caps and deadlines; the caps are each listener's.
        refusals: Counts who is turned away; None: nobody sees them.
    """

    def __init__(
        self,
        app: AsgiApp,
        listeners: Sequence[Listener],
        *,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        refusals: Refusals | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedConnection,
                ws="none",
                loop="asyncio",
                log_config=None,
                log_level="error",
                access_log=False,  # it would write the token of a first visit
                server_header=False,
                # Else anybody on this host could say which address he comes from.
                proxy_headers=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
                timeout_keep_alive=round(limits.keep_alive_s),
                h11_max_incomplete_event_size=limits.max_header_bytes,
            )
        )
        self._limits = limits
        self._refusals = refusals or Refusals()
        self._acceptors = [
            Acceptor(
                listener.bound,
                make_protocol=self._connection,
                tls=listener.tls,
                limits=limits,
                refusals=self._refusals,
            )
            for listener in listeners
        ]
        self._renewals = [
            (listener.renewal, acceptor)
            for listener, acceptor in zip(listeners, self._acceptors, strict=True)
            if listener.renewal is not None
        ]
        self._on_start: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_connections(self) -> int:
        """Return how many connections there are."""
        return sum(acceptor.num_connections for acceptor in self._acceptors)

    def serve_until_stopped(self, *, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGINT or SIGTERM.

        Args:
            on_start: Called when visitors can come in and signals are waited for: one that came
                earlier would find half an event loop.

        Raises:
            OSError: The socket broke.
        """
        self._on_start = on_start
        self.run(sockets=[])
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the listeners."""
        await super().startup(sockets=sockets)
        loop = asyncio.get_running_loop()
        accepting = [loop.create_task(acceptor.run()) for acceptor in self._acceptors]
        self._tasks = [*accepting, loop.create_task(self._sweep())]
        for task in self._tasks:
            task.add_done_callback(self._end)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners first, then let what is under way finish."""
        *accepting, sweeping = self._tasks
        for task in accepting:
            task.cancel()
        await super().shutdown(sockets=sockets)
        sweeping.cancel()
        for connection in list(self.server_state.connections):
            # Whoever has not said goodbye by now.
            connection.transport.abort()
        await asyncio.sleep(0)  # in which the loop closes their sockets

    def _connection(self, client: str, on_end: Callable[[], None]) -> LimitedConnection:
        return LimitedConnection(
            self.config,
            self.server_state,
            self.lifespan.state,
            asyncio.get_running_loop(),
            limits=self._limits,
            refusals=self._refusals,
            client=client,
            on_end=on_end,
        )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep_s)
            for renewal, acceptor in self._renewals:
                if renewal.take():
                    acceptor.renew(renewal.served.context)
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, LimitedConnection):
                    connection.sweep(now_s)

    def _end(self, task: asyncio.Task[None]) -> None:
        # A listener that is broken ends the server: silence would look like a network's fault.
        if not task.cancelled():
            self.should_exit = True
