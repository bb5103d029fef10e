"""A ClickHouse server for tests that kill it: ``python -m tests.faults.store_process FOLDER ACCOUNT
PORT``.

The embedded engine with ClickHouse's HTTP interface, as in `tests.deploy.http_engine`, at the same
port after a restart. Every insert is on disk before it is answered.
"""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.deploy.http_engine import Engine, handler_of


def main() -> None:
    """Serve until killed."""
    folder, account, port = sys.argv[1:]
    engine = Engine(Path(folder))
    ThreadingHTTPServer.allow_reuse_address = True
    handler = handler_of(engine, account.encode())
    with ThreadingHTTPServer(("127.0.0.1", int(port)), handler) as server:
        server.serve_forever(0.05)


if __name__ == "__main__":
    main()
