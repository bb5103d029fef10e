from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from starlette.routing import Route

from rankscope.collector.clock.probe import parse_reply
from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_app, create_server
from rankscope.collector.http.gate import (
    GRANT_KEY,
    UNAUTHORIZED,
    WRONG_ROLE,
    AccessGate,
)
from rankscope.collector.http.tokens import Grant, Role, TokenFile, mark_revoked, write_tokens
from tests.collector.http.test_login import pages
from tests.support.collector.asgi import Client, in_a_loop
from tests.support.collector.token_builder import DAY_NS, NOW_NS, made

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.http.requests import AsgiApp, Message, Scope
    from rankscope.collector.http.tokens import TokenRecord

OPEN = {"/healthz", "/readyz", "/login"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


class TokenServer:
    """Server with one token of each kind."""

    def __init__(self, path: Path) -> None:
        self.tokens: dict[str, str] = {}
        records: list[TokenRecord] = []
        sorts = {
            "ingest": made(Role.INGEST),
            "ingest for a run": made(Role.INGEST, run_prefix="a"),
            "read": made(Role.READ),
            "read for a run": made(Role.READ, run_prefix="a"),
            "admin for a run": made(Role.ADMIN, run_prefix="a"),
            "expired": made(Role.ADMIN, days=1),
            "revoked": made(Role.ADMIN),
        }
        for name, (token, record) in sorts.items():
            self.tokens[name] = token
            ends = mark_revoked([record], record.token_id, now_ns=NOW_NS)
            records += ends if name == "revoked" else [record]
        write_tokens(path, records)
        book = TokenFile(path, unix_ns=lambda: NOW_NS + 2 * DAY_NS)
        access = Access(port=8050, tokens=book)
        self.app = create_app(access, pages=pages, not_ready=lambda: None)
        self.client = Client(create_server(access, pages=pages, not_ready=lambda: None))

    def routes(self) -> Iterator[tuple[str, str]]:
        """Return the application's own routes, so that a route added later is tested too."""
        for route in self.app.routes:
            if isinstance(route, Route) and route.path not in OPEN:
                yield from ((method, route.path) for method in sorted(route.methods or ()))


@pytest.fixture
def server(path: Path) -> TokenServer:
    return TokenServer(path)


MALFORMED = [
    b"Bearer",
    b"Bearer ",
    b"Bearer rst_",
    b"Bearer rst_0123456789ab_" + b"A" * 43,
    b"Bearer rst_0123456789ab_" + b"A" * 1_000_000,
    b"Bearer \xff\xfe\x00",
    b"Basic cnN0Og==",
    b"bearer\trst_",
    b",,,,",
]


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: repr(value[:24]))
def test_a_malformed_token_is_401_with_a_constant_body_on_every_route(
    server: TokenServer, value: bytes
) -> None:
    for method, path in [*server.routes(), ("GET", "/timeline"), ("DELETE", "/v1/x")]:
        answer = server.client.request(method, path, headers={"authorization": value})
        body = b"" if method == "HEAD" else UNAUTHORIZED
        assert (answer.status_code, answer.content) == (401, body), f"{method} {path}"


def test_a_refusal_does_not_contain_the_token(server: TokenServer) -> None:
    for sort, body in (("expired", UNAUTHORIZED), ("revoked", UNAUTHORIZED), ("read", WRONG_ROLE)):
        headers = {"authorization": f"Bearer {server.tokens[sort]}"}
        assert server.client.post("/v1/clock", headers=headers).content == body


@pytest.mark.parametrize("sort", ["ingest", "read for a run", "admin for a run", "expired"])
def test_a_token_that_may_not_read_all_runs_opens_no_session_by_url_or_form(
    server: TokenServer, sort: str
) -> None:
    token = server.tokens[sort]

    assert server.client.get("/", params={"token": token}).status_code == 401
    assert server.client.post("/login", data={"token": token}).status_code == 401


def test_a_token_is_checked_before_a_byte_of_the_body_is_read(path: Path) -> None:
    book = TokenFile(path)
    sent: list[Message] = []

    async def app(*_: object) -> None:
        raise AssertionError("it came in")

    async def receive() -> Message:
        raise AssertionError("the body was asked for")

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/spans",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer nothing")],
    }
    in_a_loop(_call(AccessGate(app, Access(port=1, tokens=book)), scope, receive, send))

    assert sent[0]["status"] == 401


async def _call(app: AsgiApp, scope: Scope, receive: object, send: object) -> None:
    await app(scope, receive, send)  # type: ignore[arg-type]


def test_the_gate_passes_the_scope_of_a_token_to_the_application(path: Path) -> None:
    token, record = made(Role.INGEST, run_prefix="llama-")
    write_tokens(path, [record])
    seen: list[Grant] = []

    async def app(scope: Scope, *_: object) -> None:
        seen.append(scope[GRANT_KEY])

    async def nothing(*_: object) -> Message:
        return {}

    access = Access(port=1, tokens=TokenFile(path, unix_ns=lambda: NOW_NS))
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {token}".encode())]
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/clock", "query_string": b""}
    in_a_loop(_call(AccessGate(app, access), {**scope, "headers": headers}, nothing, nothing))

    assert [seen[0].covers(run) for run in ("llama-7b", "llama", "other", "")] == [
        True,
        False,
        False,
        False,
    ]


def test_the_clock_answers_a_probe(server: TokenServer) -> None:
    headers = {"authorization": f"Bearer {server.tokens['ingest for a run']}"}

    first = parse_reply(server.client.post("/v1/clock", headers=headers).json())
    second = parse_reply(server.client.post("/v1/clock", headers=headers).json())

    assert first.reference_id == second.reference_id
    assert second.received_ns >= first.replied_ns
