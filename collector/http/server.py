"""HTTP server: uvicorn with our limits, on listeners with and without TLS."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Sequence

    from .requests import AsgiApp

SHUTDOWN_TIMEOUT_S = 2
HANDSHAKE_TIMEOUT_S = 10
TLS_CLOSE_TIMEOUT_S = 5

MAX_CONNECTIONS = 4096
"""Connections of all clients. A job of 12,288 ranks has 1,536 hosts, with one agent each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of uvicorn. Slow clients, and many of one address, are limited by a proxy."""

    max_connections: int = MAX_CONNECTIONS
    """Connections of all listeners. Requests beyond it are answered with 503."""

    max_header_bytes: int = 32 * 2**10
    keep_alive_s: int = 15
    """Timeout between two requests of a connection."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"ServerLimits.{field.name} must be above 0, not {value}")


DEFAULT_LIMITS = ServerLimits()


def fit_connections(wanted: int = MAX_CONNECTIONS) -> int:
    """Raise the limit of open files towards its hard limit; return how many connections fit.

    Half of the files are for connections: the store and the spool need the others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        enough = 4 * wanted
        soft = max(soft, enough if hard == resource.RLIM_INFINITY else min(hard, enough))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A listening socket, with its TLS context."""

    bound: socket.socket
    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""


class Connection(H11Protocol):
    """uvicorn's connection, which is closed once."""

    def shutdown(self) -> None:
        """Close after the current request. Does nothing if the connection is already closing.

        A TLS transport of asyncio that is closed twice can't be aborted any more.
        """
        if not self.transport.is_closing():
            super().shutdown()


class HttpServer(uvicorn.Server):
    """uvicorn server on several listeners, which may differ in TLS.

    Args:
        app: Application, including the gate.
        listeners: Sockets to accept connections from. They are closed when the server stops.
    """

    def __init__(
        self, app: AsgiApp, listeners: Sequence[Listener], *, limits: ServerLimits = DEFAULT_LIMITS
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                loop="asyncio",
                log_config=None,
                log_level="error",  # a warning for each invalid request would flood the log
                access_log=False,  # it would contain the token of a first visit's URL
                server_header=False,
                # `create_server` trusts the headers of a declared proxy only.
                proxy_headers=False,
                limit_concurrency=limits.max_connections,
                timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
                timeout_keep_alive=limits.keep_alive_s,
                h11_max_incomplete_event_size=limits.max_header_bytes,
            )
        )
        self._listeners = listeners
        self._on_start: Callable[[], None] = lambda: None

    @property
    def num_connections(self) -> int:
        """Number of open connections of all listeners."""
        return len(self.server_state.connections)

    def serve_until_stopped(self, *, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGINT or SIGTERM.

        Args:
            on_start: Called when connections are accepted and signals are handled. A signal
                before that would meet an event loop that is not ready.
        """
        self._on_start = on_start
        self.run(sockets=[])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the listeners: uvicorn itself has one TLS context for all sockets."""
        await super().startup(sockets=sockets)
        loop = asyncio.get_running_loop()

        def open_connection() -> Connection:
            return Connection(self.config, self.server_state, self.lifespan.state, loop)

        for listener in self._listeners:
            has_tls = listener.tls is not None
            server = await loop.create_server(
                open_connection,
                sock=listener.bound,
                ssl=listener.tls,
                backlog=self.config.backlog,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if has_tls else None,
                ssl_shutdown_timeout=TLS_CLOSE_TIMEOUT_S if has_tls else None,
            )
            self.servers.append(server)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let current requests finish, then end what is left."""
        await super().shutdown(sockets=sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # a client that does not read, or end its TLS session
        await asyncio.sleep(0)  # lets the event loop close their sockets
