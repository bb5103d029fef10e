"""Receivers of alerts on loopback, for tests: a web server and a mail server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

TIMEOUT_S = 60.0


class Receiver:
    """A server that keeps what is posted to it, and answers with given statuses.

    Args:
        context: TLS. None: plain HTTP.
        port: Port, of a receiver that is started again. 0: any.
    """

    def __init__(self, *, context: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.statuses: list[int] = []
        """Statuses of the next answers; then 200."""

        self.headers: dict[str, str] = {}
        self.hold = threading.Event()
        """Answers wait until it is set."""

        self.hold.set()
        self.paths: Queue[str] = Queue()
        self.sent_headers: Queue[dict[str, str]] = Queue()
        self.bodies: Queue[bytes] = Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.paths.put(self.path)
                receiver.sent_headers.put({k.lower(): v for k, v in self.headers.items()})
                receiver.bodies.put(self.rfile.read(int(self.headers["content-length"])))
                receiver.hold.wait(TIMEOUT_S)
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def next(self) -> Any:  # noqa: ANN401  # whatever JSON holds
        """Return the next posted document."""
        return json.loads(self.bodies.get(timeout=TIMEOUT_S))

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()


class MailServer:
    """An SMTP server that keeps the mails it gets.

    Args:
        port: Port, of a server that is started again. 0: any.
    """

    def __init__(self, *, port: int = 0) -> None:
        self.mails: Queue[str] = Queue()
        mails = self.mails

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                self._say("220 test")
                lines: list[str] = []
                is_text = False
                for raw in self.rfile:
                    line = raw.decode().rstrip("\r\n")
                    if is_text and line == ".":
                        mails.put("\n".join(lines))
                        is_text = False
                        self._say("250 kept")
                    elif is_text:
                        lines.append(line)
                    elif line.upper() == "DATA":
                        is_text = True
                        self._say("354 go on")
                    elif line.upper() == "QUIT":
                        self._say("221 bye")
                        return
                    else:
                        self._say("250 fine")

            def _say(self, line: str) -> None:
                self.wfile.write(f"{line}\r\n".encode())

        class Server(ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        """Apprise's URL of a mailbox on it."""
        return f"mailto://127.0.0.1:{self.port}?from=a@example.org&to=b@example.org&mode=insecure"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
