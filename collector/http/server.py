"""HTTP server: accepts connections, with TLS, limits and deadlines, and runs the application."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from .connection import LimitedConnection
from .limits import ConnectionLimits
from .refusals import Refusal, Refusals
from .requests import client_key

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Sequence

    from .requests import AsgiApp
    from .tls import CertificateRenewal

    MakeProtocol = Callable[[str, Callable[[], None], Callable[[], None]], asyncio.Protocol]
    """Takes the client's key, and functions to call when the connection has ended and when its
    client has shown a valid credential."""


OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
OUT_OF_FILES_PAUSE_S = 0.2
"""Pause if no file descriptor is left. The connection stays in the kernel's queue, so retrying
without a pause would spin."""

THIS_SERVER = "this-server"

SHUTDOWN_S = 2
DEFAULT_LIMITS = ConnectionLimits()


class Acceptor:
    """Accepts the connections of one socket, and counts them before it reads a byte.

    At a limit, a new connection takes the place of the oldest one whose client has not shown a
    valid credential. So idle connections keep no client out, and one with a credential keeps its
    place. If all have shown one, the new connection is closed.

    Args:
        bound: Listening socket; the caller closes it.
        make_protocol: Creates the protocol of one connection.
        tls: TLS context. None: plain HTTP.
        limits: Limits on the number of connections.
        refusals: Counts refused connections.
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
        self._counts: Counter[str] = Counter()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._unproven: OrderedDict[_Slot, None] = OrderedDict()
        self._unproven_of: dict[str, OrderedDict[_Slot, None]] = {}

    @property
    def num_connections(self) -> int:
        """Number of open connections, including those in a TLS handshake."""
        return self._counts.total()

    def renew(self, tls: ssl.SSLContext) -> None:
        """Use another certificate for new connections."""
        self._tls = tls

    async def run(self) -> None:
        """Accept until cancelled, then cancel unfinished handshakes."""
        self._bound.settimeout(0)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._bound)
                except OSError as error:
                    await self._handle_accept_error(error)
                else:
                    self._accept(connection, client_key(str(address[0])))
        finally:
            for handshake in self._handshakes:
                handshake.cancel()

    async def _handle_accept_error(self, error: OSError) -> None:
        """Pause if no file descriptor is left. A connection that broke is not an error.

        Raises:
            OSError: The listening socket is broken.
        """
        if error.errno in OUT_OF_FILES:
            self._refusals.record(Refusal.NO_FILES_LEFT, client=THIS_SERVER)
            await asyncio.sleep(OUT_OF_FILES_PAUSE_S)
        elif error.errno in {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}:
            raise error

    def _accept(self, connection: socket.socket, client: str) -> None:
        refusal, in_its_place = self._reached_limit(client)
        if refusal is not None:
            oldest = next(iter(in_its_place), None)
            self._refusals.record(refusal, client=client if oldest is None else oldest.client)
            if oldest is None:
                connection.close()
                return
            oldest.evict()
        slot = _Slot(client, on_release=self._forget)
        self._counts[client] += 1
        self._unproven[slot] = None
        self._unproven_of.setdefault(client, OrderedDict())[slot] = None
        slot.task = asyncio.get_running_loop().create_task(self._connect(connection, slot))
        self._handshakes.add(slot.task)
        slot.task.add_done_callback(self._handshakes.discard)
        # A task that is cancelled before it runs closes nothing itself.
        slot.task.add_done_callback(lambda _: connection.close() if slot.is_released else None)

    def _reached_limit(self, client: str) -> tuple[Refusal | None, Iterable[_Slot]]:
        """Return the limit that a new connection would exceed, and those that could give way."""
        if self._counts[client] >= self._limits.max_connections_per_address:
            return Refusal.TOO_MANY_FROM_ADDRESS, self._unproven_of.get(client, ())
        # Reading a missing key of a Counter adds none, so the number of keys stays bounded.
        if self.num_connections >= self._limits.max_connections:
            return Refusal.TOO_MANY_CONNECTIONS, self._unproven
        return None, ()

    def _prove(self, slot: _Slot) -> None:
        """Keep a connection's place from now on."""
        if self._unproven.pop(slot, slot) is None:
            of_client = self._unproven_of[slot.client]
            del of_client[slot]
            if not of_client:
                del self._unproven_of[slot.client]

    def _forget(self, slot: _Slot) -> None:
        self._prove(slot)
        self._counts[slot.client] -= 1
        if not self._counts[slot.client]:
            del self._counts[slot.client]

    async def _connect(self, connection: socket.socket, slot: _Slot) -> None:
        handshake_s = None if self._tls is None else self._limits.handshake_s
        shutdown_s = None if self._tls is None else self._limits.linger_s

        def make_protocol() -> asyncio.Protocol:
            slot.protocol = self._make_protocol(
                slot.client, slot.release, lambda: self._prove(slot)
            )
            return slot.protocol

        try:
            # As asyncio does for its own listeners. An answer is written in two pieces, and
            # without it the second would wait 40 ms for the delayed ACK of the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=shutdown_s,
            )
        except OSError as error:
            slot.release()
            if self._tls is not None:
                reason = getattr(error, "reason", None) or type(error).__name__
                self._refusals.record(Refusal.TLS_HANDSHAKE, client=slot.client, why=str(reason))
        except asyncio.CancelledError:
            slot.release()
            raise


class _Slot:
    """One counted connection. It is subtracted once, even if `release` is called again."""

    def __init__(self, client: str, *, on_release: Callable[[_Slot], None]) -> None:
        self.client = client
        self.task: asyncio.Task[None] | None = None
        self.protocol: asyncio.Protocol | None = None
        self.is_released = False
        self._on_release = on_release

    def release(self) -> None:
        if not self.is_released:
            self.is_released = True
            self._on_release(self)

    def evict(self) -> None:
        """Close the connection, in its handshake or later, and give up its place."""
        self.release()
        if self.task is not None and not self.task.done():
            self.task.cancel()
        elif isinstance(self.protocol, LimitedConnection):
            self.protocol.cut_off()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A listening socket, with its TLS configuration."""

    bound: socket.socket
    """Listening socket; its creator closes it."""

    tls: ssl.SSLContext | None = None
    """TLS context. None: plain HTTP."""

    renewal: CertificateRenewal | None = None
    """Loads renewed certificates. None: ``tls`` never changes."""


class HttpServer(uvicorn.Server):
    """uvicorn server whose connections come from our own listeners.

    Args:
        app: Application, including the gate.
        listeners: Sockets to accept connections from.
        limits: Limits and deadlines. The limits on connections apply to each listener.
        refusals: Counts refused requests and connections. None: they are not reported.
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
                access_log=False,  # it would contain the token of a first visit's URL
                server_header=False,
                # Otherwise any process on this host could forge its client address.
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
        """Number of open connections of all listeners."""
        return sum(acceptor.num_connections for acceptor in self._acceptors)

    def serve_until_stopped(self, *, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGINT or SIGTERM.

        Args:
            on_start: Called when connections are accepted and signals are handled. A signal
                before that would meet an event loop that is not ready.

        Raises:
            OSError: A listening socket broke.
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
        """Stop accepting, then let current requests finish."""
        *accepting, sweeping = self._tasks
        for task in accepting:
            task.cancel()
        await super().shutdown(sockets=sockets)
        sweeping.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # those that did not end in time
        await asyncio.sleep(0)  # lets the event loop close their sockets

    def _connection(
        self, client: str, on_end: Callable[[], None], on_proof: Callable[[], None]
    ) -> LimitedConnection:
        return LimitedConnection(
            self.config,
            self.server_state,
            self.lifespan.state,
            asyncio.get_running_loop(),
            limits=self._limits,
            refusals=self._refusals,
            client=client,
            on_end=on_end,
            on_proof=on_proof,
        )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep_s)
            for renewal, acceptor in self._renewals:
                if renewal.reload():
                    acceptor.renew(renewal.served.context)
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, LimitedConnection):
                    connection.sweep(now_s)

    def _end(self, task: asyncio.Task[None]) -> None:
        # A broken listener ends the server: otherwise it would look like a network failure.
        if not task.cancelled():
            self.should_exit = True
