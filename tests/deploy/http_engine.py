"""ClickHouse's HTTP protocol with the embedded engine, for tests of `clickhouse://`.

    python -m tests.deploy.http_engine FOLDER USER PASSWORD [PORT]

It prints its port, and understands the requests of our client: a statement in the body or, if the
body has rows, in the URL; bound values, settings and the database in the URL. Settings are set in
the engine, which refuses unknown ones. It answers one request at a time.
"""

from __future__ import annotations

import base64
import re
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import chdb

NOT_SETTINGS = frozenset(
    {"query", "database", "default_format", "session_id", "query_id", "role", "wait_end_of_query"}
)
NOT_OF_THIS_ENGINE = frozenset({"client_protocol_version"})
"""Parameter of the protocol, not of the engine. Without it, rows have the oldest Native form."""


class Engine:
    """One connection of embedded ClickHouse."""

    def __init__(self, folder: Path) -> None:
        self._connection = chdb.connect(str(folder))  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def answer(self, given: dict[str, str], body: bytes) -> bytes:
        """Run the statement of one request.

        Raises:
            Exception: The engine refused the statement.
        """
        bound = {name[6:]: value for name, value in given.items() if name.startswith("param_")}
        settings = {
            name: value
            for name, value in given.items()
            if name not in NOT_SETTINGS | NOT_OF_THIS_ENGINE and not name.startswith("param_")
        }
        shape = given.get("default_format", "TabSeparated")
        with self._lock:
            if "database" in given:
                self._run(f"USE `{given['database']}`")
            for name, value in settings.items():
                self._run(f"SET {name} = '{value}'")
            if "query" not in given:
                return self._run(body.decode(), shape, bound)
            if not body:
                return self._run(given["query"], shape, bound)
            with tempfile.NamedTemporaryFile(suffix=".rows") as file:
                file.write(body)
                file.flush()
                source = f" FROM INFILE '{file.name}' FORMAT "
                return self._run(re.sub(r"\s+FORMAT\s+", source, given["query"], count=1))

    def _run(
        self, sql: str, shape: str = "TabSeparated", bound: dict[str, str] | None = None
    ) -> bytes:
        return bytes(self._connection.query(sql, shape, params=bound or {}).bytes())


def handler_of(engine: Engine, account: bytes) -> type[BaseHTTPRequestHandler]:
    """Return a handler that answers requests of ``account`` (``user:password``) only."""
    expected = "Basic " + base64.b64encode(account).decode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            if self.headers.get("authorization") != expected:
                self._send(403, b"Code: 516. DB::Exception: Authentication failed", code="516")
                return
            given = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
            try:
                self._send(200, engine.answer(given, body))
            except Exception as error:  # noqa: BLE001  # whatever the engine says
                found = re.search(r"Code: (\d+)", str(error))
                self._send(500, str(error).encode(), code=found[1] if found else "1001")

        do_GET = do_POST  # noqa: N815  # as the base class names it

        def _send(self, status: int, body: bytes, *, code: str | None = None) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("x-clickhouse-summary", "{}")
            if code is not None:
                self.send_header("x-clickhouse-exception-code", code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    return Handler


def main() -> None:
    """Serve until stdin ends."""
    folder, user, password, *port = sys.argv[1:]
    handler = handler_of(Engine(Path(folder)), f"{user}:{password}".encode())
    server = ThreadingHTTPServer(("127.0.0.1", int(*port)), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
