"""Runs an application on a socket, with the edge around it: TLS, caps and deadlines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from .acceptor import Acceptor
from .connection import EdgeConnection
from .limits import EdgeLimits
from .refusals import Refusals

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Sequence

    from .certificate_renewal import Renewal
    from .gate import AsgiApp

SHUTDOWN_S = 2
DEFAULT_LIMITS = EdgeLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where visitors come in."""

    bound: socket.socket
    """Listens; whoever made it closes it."""

    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""

    renewal: Renewal | None = None
    """Brings renewed certificates; None: ``tls`` stays as it is."""


class EdgeServer(uvicorn.Server):
    """uvicorn with our own door: it listens on nothing itself.

    Args:
        app: The application, gate included.
        doors: Where visitors come in.
        limits: Caps and deadlines; the caps are each door's.
        refusals: Counts who is turned away; None: nobody sees them.
    """

    def __init__(
        self,
        app: AsgiApp,
        doors: Sequence[Door],
        *,
        limits: EdgeLimits = DEFAULT_LIMITS,
        refusals: Refusals | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=EdgeConnection,
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
                door.bound,
                make_protocol=self._connection,
                tls=door.tls,
                limits=limits,
                refusals=self._refusals,
            )
            for door in doors
        ]
        self._renewals = [
            (door.renewal, acceptor)
            for door, acceptor in zip(doors, self._acceptors, strict=True)
            if door.renewal is not None
        ]
        self._on_start: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_connections(self) -> int:
        """Return how many connections there are."""
        return sum(acceptor.num_connections for acceptor in self._acceptors)

    def serve_until_told(self, *, on_start: Callable[[], None] = lambda: None) -> None:
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
        """Open the doors."""
        await super().startup(sockets=sockets)
        loop = asyncio.get_running_loop()
        accepting = [loop.create_task(acceptor.run()) for acceptor in self._acceptors]
        self._tasks = [*accepting, loop.create_task(self._sweep())]
        for task in self._tasks:
            task.add_done_callback(self._end)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the doors first, then let what is under way finish."""
        *accepting, sweeping = self._tasks
        for task in accepting:
            task.cancel()
        await super().shutdown(sockets=sockets)
        sweeping.cancel()
        for connection in list(self.server_state.connections):
            # Whoever has not said goodbye by now.
            connection.transport.abort()
        await asyncio.sleep(0)  # in which the loop closes their sockets

    def _connection(self, visitor: str, on_end: Callable[[], None]) -> EdgeConnection:
        return EdgeConnection(
            self.config,
            self.server_state,
            self.lifespan.state,
            asyncio.get_running_loop(),
            limits=self._limits,
            refusals=self._refusals,
            visitor=visitor,
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
                if isinstance(connection, EdgeConnection):
                    connection.sweep(now_s)

    def _end(self, task: asyncio.Task[None]) -> None:
        # A door that is broken ends the server: silence would look like a network's fault.
        if not task.cancelled():
            self.should_exit = True
