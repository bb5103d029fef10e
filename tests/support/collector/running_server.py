"""HTTP server in a thread of this process, and clients with plain sockets."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.collector.http.limits import ConnectionLimits
from rankscope.collector.http.refusals import Refusals
from rankscope.collector.http.server import HttpServer, Listener
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from rankscope.collector.http.refusals import Refusal
    from rankscope.collector.http.requests import AsgiApp, Message, Receive, Scope, Send
    from rankscope.collector.http.tls import CertificateRenewal

TIMEOUT_S = 60.0

GENEROUS = ConnectionLimits(
    handshake_s=60.0,
    header_s=60.0,
    body_window_s=60.0,
    reader_window_s=60.0,
    linger_s=60.0,
    keep_alive_s=60.0,
    sweep_s=0.02,
)
"""Deadlines that no test reaches, even on a busy machine. A test shortens the one that it tests."""

LARGE = replace(GENEROUS, max_connections=10_000, max_connections_per_address=10_000)
"""The same, with limits on connections that no test reaches."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the size of the body; ``/early`` before the body, ``/large`` with 8 MiB."""
    if scope["type"] != "http":
        return
    num_bytes = 0
    message: Message = {"more_body": scope["path"] != "/early"}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
    body = b"x" * 2**23 if scope["path"] == "/large" else str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Clients:
    """Clients of a server on a loopback port."""

    def __init__(self, port: int) -> None:
        self.port = port

    def connect(self, *, source: str = "127.0.0.1") -> socket.socket:
        """Return a plain connection from a loopback address."""
        return socket.create_connection(
            ("127.0.0.1", self.port), timeout=TIMEOUT_S, source_address=(source, 0)
        )

    def get(self, *, source: str = "127.0.0.1") -> bytes:
        """Return the whole answer to a small request."""
        with self.connect(source=source) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            return read_to_end(connection)


class Running(Clients):
    """Server of this process, as a test sees it."""

    def __init__(self, server: HttpServer, port: int, refusals: Refusals) -> None:
        super().__init__(port)
        self.server = server
        self.refusals = refusals

    def wait_for(self, refusal: Refusal) -> None:
        """Wait until a client was refused for this reason."""
        wait_until(lambda: self.refusals.counts[refusal] > 0)


@contextmanager
def running(
    app: AsgiApp = echo,
    *,
    limits: ConnectionLimits = GENEROUS,
    tls: ssl.SSLContext | None = None,
    renewal: CertificateRenewal | None = None,
) -> Iterator[Running]:
    """Serve ``app`` until the block ends."""
    refusals = Refusals()
    problems: list[Exception] = []

    def serve() -> None:
        try:
            server.serve_until_stopped()
        except Exception as problem:  # noqa: BLE001  # asserted below
            problems.append(problem)

    with socket.create_server(("127.0.0.1", 0), backlog=512) as bound:
        listener = Listener(bound=bound, tls=tls, renewal=renewal)
        server = HttpServer(app, [listener], limits=limits, refusals=refusals)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Running(server, bound.getsockname()[1], refusals)
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert problems == []


def answer_on(connection: socket.socket) -> bytes:
    """Return the body of the next answer, which has a Content-Length."""
    text = b""
    while b"\r\n\r\n" not in text:
        piece = connection.recv(1)
        assert piece, "the connection ended before an answer"
        text += piece
    num_bytes = int(text.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = b""
    while len(body) < num_bytes:
        piece = connection.recv(num_bytes - len(body))
        assert piece, "the connection ended within a body"
        body += piece
    return body


def read_to_end(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes or resets the connection."""
    pieces = []
    try:
        while piece := connection.recv(2**16):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)
