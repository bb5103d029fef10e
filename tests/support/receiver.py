"""A webhook receiver on loopback, for tests."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

TIMEOUT_S = 60.0


class Receiver:
    """A server that keeps what is posted to it, and answers with given statuses.

    Args:
        context: TLS. None: plain HTTP.
    """

    def __init__(self, *, context: ssl.SSLContext | None = None) -> None:
        self.statuses: list[int] = []
        """Statuses of the next answers; then 200."""

        self.headers: dict[str, str] = {}
        self.hold = threading.Event()
        """Answers wait until it is set."""

        self.hold.set()
        self.paths: Queue[str] = Queue()
        self.bodies: Queue[bytes] = Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.paths.put(self.path)
                receiver.bodies.put(self.rfile.read(int(self.headers["content-length"])))
                receiver.hold.wait(TIMEOUT_S)
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
