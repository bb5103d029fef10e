"""Fake collector: keeps what it receives in memory, and can misbehave."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar, Self
from urllib.parse import parse_qs, urlsplit

from rankscope.collector.clock.reference import ReferenceClock
from tests.faults.checker import content_hash, key_of
from tests.support.collector.kept_cuts import decode_cuts

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from rankscope.collector.spool.cut import Cut
    from tests.faults.checker import Key

TOKEN = "test-token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer that is sent instead of the right one."""

    status: int
    document: Any = None
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def rejection(status: int, reason: str = "no") -> Reply:
    """Return the answer with which a collector rejects a request for good."""
    return Reply(status=status, document={"schema": 1, "error": reason})


@dataclass(slots=True)
class Stored:
    """Rows that a collector stored; they outlive its server."""

    rows: list[tuple[Key, str]] = field(default_factory=list)
    """Each inserted span row, repeated if it was inserted again."""

    cuts: dict[tuple[str, int, int, int], str] = field(default_factory=dict)
    """(run, segment, first row, end row) -> sha256."""

    described: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def take(self, cut: Cut) -> str:
        """Store a cut and return its state, like the ledger.

        Unlike the ledger it stores rows again if they come in cuts with other bounds: an agent
        must never send a row in another cut.
        """
        place = (cut.key.run_id, cut.key.segment, cut.key.first_row, cut.key.end_row)
        known = self.cuts.get(place)
        if known is not None:
            return "duplicate" if known == cut.sha256 else "conflict"
        self.cuts[place] = cut.sha256
        for row in cut.rows.spans.to_pylist():
            key = key_of(row["run_id"], row["epoch"], row["rank"], row["segment"], row["row"])
            content = content_hash(row["name"], row["step"], row["duration_ns"])
            self.rows.append((key, content))
        return "stored"

    def end_rows(self, run_id: str) -> dict[str, int]:
        """Return the row after the last that is stored of each segment of a run."""
        found: dict[str, int] = {}
        for run, segment, _, end_row in self.cuts:
            if run == run_id:
                found[str(segment)] = max(found.get(str(segment), 0), end_row)
        return found


class FakeCollector:
    """A collector on a port of the loopback, in its own threads.

    Args:
        stored: Rows that it has already.
        port: 0: any free port.
        context: TLS; None: plain HTTP.
    """

    def __init__(
        self, stored: Stored | None = None, *, port: int = 0, context: ssl.SSLContext | None = None
    ) -> None:
        self.stored = stored or Stored()
        self.tokens = {TOKEN}
        self.requests: list[tuple[str, str]] = []
        """Method and path of each, in order."""

        self.misbehave: Callable[[str, bytes], Reply | None] = lambda _path, _body: None
        """Called before each request; may return an answer instead of the right one."""

        self.after_storing: Callable[[], Reply | None] = lambda: None
        """Called after cuts are stored and before they are answered; may return another answer."""

        self.clock = ReferenceClock.start()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"collector": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._scheme = "http" if context is None else "https"
        self.port = self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"{self._scheme}://localhost:{self.port}"

    def __enter__(self) -> Self:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def num_requests(self, path: str) -> int:
        return sum(found.partition("?")[0] == path for _, found in self.requests)

    def serve(self, path: str, body: bytes) -> Reply:
        parts = urlsplit(path)
        found = self.misbehave(parts.path, body)
        if found is not None:
            return found
        with self._lock:
            return self._right_answer(parts.path, parse_qs(parts.query), body)

    def _right_answer(self, path: str, query: dict[str, list[str]], body: bytes) -> Reply:
        if path == "/v1/clock":
            return Reply(status=200, document=asdict(self.clock.answer(self.clock.now_ns())))
        if path == "/v1/resume":
            document: dict[str, Any] = {
                "end_rows": self.stored.end_rows(query["run_id"][0]),
                "unanswered": [],
                "source_format": None,
            }
            return Reply(status=200, document=document)
        if path == "/v1/spans":
            states = [
                {
                    "segment": cut.key.segment,
                    "first_row": cut.key.first_row,
                    "state": self.stored.take(cut),
                }
                for cut in decode_cuts(body)
            ]
            right = Reply(status=200, document={"schema": 1, "cuts": states})
            return self.after_storing() or right
        if path.startswith("/v1/rows/"):
            rows = json.loads(body)["rows"]
            self.stored.described.setdefault(path.removeprefix("/v1/rows/"), []).extend(rows)
            return Reply(status=200, document={"schema": 1, "num_rows": len(rows)})
        return Reply(status=404)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    collector: ClassVar[FakeCollector]

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _answer(self, body: bytes) -> None:
        own = self.collector
        own.requests.append((self.command, self.path))
        is_known = self.headers.get("authorization", "").removeprefix("Bearer ") in own.tokens
        reply = own.serve(self.path, body) if is_known else Reply(status=401)
        data = reply.body if reply.body is not None else json.dumps(reply.document).encode()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if "content-length" not in {name.lower() for name in reply.headers}:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        pass
