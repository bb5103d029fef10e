"""HTTP server in a thread of this process, and clients with plain sockets."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankscope.collector.http.server import DEFAULT_LIMITS, HttpServer, Listener
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from rankscope.collector.http.requests import AsgiApp, Message, Receive, Scope, Send
    from rankscope.collector.http.server import ServerLimits

TIMEOUT_S = 60.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the size of the body."""
    if scope["type"] != "http":
        return
    num_bytes = 0
    message: Message = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
    body = str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Running:
    """Server of this process, as a test sees it."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.port = port

    def connect(self) -> socket.socket:
        """Return a plain connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)

    def get(self) -> bytes:
        """Return the whole answer to a small request."""
        with self.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            return read_to_end(connection)


@contextmanager
def running(
    app: AsgiApp = echo, *, limits: ServerLimits = DEFAULT_LIMITS, tls: ssl.SSLContext | None = None
) -> Iterator[Running]:
    """Serve ``app`` until the block ends."""
    problems: list[Exception] = []

    def serve() -> None:
        try:
            server.serve_until_stopped()
        except Exception as problem:  # noqa: BLE001  # asserted below
            problems.append(problem)

    with socket.create_server(("127.0.0.1", 0), backlog=512) as bound:
        port = bound.getsockname()[1]
        server = HttpServer(app, [Listener(bound=bound, tls=tls)], limits=limits)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Running(server, port)
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
