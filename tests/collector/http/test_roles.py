"""Rights of every kind of token on every route of the server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rankscope.collector.gateway import query_router
from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_app, create_server, deletion_router
from rankscope.collector.http.gate import OPEN_PATHS, AccessGate
from rankscope.collector.http.metrics import Metrics, metrics_router
from rankscope.collector.http.tokens import Role, TokenFile, mark_revoked, write_tokens
from rankscope.collector.ingest.router import ingest_router
from rankscope.collector.ingest.rows import QUESTIONS, ROW_TABLES
from tests.collector.http.test_login import pages
from tests.support.collector.asgi import Client
from tests.support.collector.token_builder import DAY_NS, NOW_NS, made

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi import APIRouter

    from rankscope.collector.http.requests import Receive, Scope, Send

OWN = "correct-horse"
TRUSTED = {"own", "session", "admin"}
READERS = TRUSTED | {"read", "sql"}
ANY_READER = READERS | {"read for a run", "sql for a run", "admin for a run"}
ANY_AGENT = {"own", "session", "admin", "admin for a run", "ingest", "ingest for a run"}

MAY = {
    ("GET", "/v1/openapi.json"): ANY_READER,
    ("HEAD", "/v1/openapi.json"): ANY_READER,
    ("POST", "/v1/clock"): ANY_AGENT,
    ("POST", "/v1/spans"): ANY_AGENT,
    ("POST", "/v1/rows/{table}"): ANY_AGENT,
    **{("POST", f"/v1/rows/{table}"): ANY_AGENT for table in ROW_TABLES | QUESTIONS},
    ("GET", "/v1/resume"): ANY_AGENT,
    ("DELETE", "/v1/runs"): TRUSTED | {"admin for a run"},
    ("POST", "/logout"): ANY_READER,
    ("GET", "/metrics"): READERS,
    ("GET", "/ping"): READERS,
    ("POST", "/"): READERS,  # the gateway refuses statements of readers
    ("GET", "/"): READERS,
    ("POST", "/_dash-update-component"): READERS,
    ("GET", "/run/{run}"): READERS,
    ("PATCH", "/v1/unknown-route"): TRUSTED,
}
"""All other valid tokens get 403, and requests without one 401."""


async def anything(scope: Scope, receive: Receive, send: Send) -> None:
    """Application that accepts every request, so that only the gate refuses."""
    await PlainTextResponse("done")(scope, receive, send)


def all_routers() -> list[APIRouter]:
    nothing: Any = None  # the routes are listed and refused, not called
    return [
        ingest_router(nothing),
        deletion_router(nothing, nothing),
        query_router(nothing),
        metrics_router(Metrics()),
    ]


def routes_of_the_server() -> set[tuple[str, str]]:
    """Return method and path of each route of the server."""
    app = create_app(Access(port=1), pages=pages, not_ready=lambda: None, routers=all_routers())
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes) - 1, "all but the mount of the pages"
    return {(method, route.path) for route in routes for method in route.methods or set()}


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """Return a token of each kind, whose hashes are in a file."""
    sorts = {"expired": made(Role.ADMIN, days=1)}
    for role in Role:
        sorts[role.value] = made(role)
        sorts[f"{role} for a run"] = made(role, run_prefix="a")
    sorts["revoked"] = made(Role.ADMIN)
    records = [record for _, record in sorts.values()]
    write_tokens(
        tmp_path / "tokens.json", mark_revoked(records, records[-1].token_id, now_ns=NOW_NS)
    )
    return {"own": OWN, **{sort: token for sort, (token, _) in sorts.items()}}


def test_every_route_of_the_server_is_in_the_table() -> None:
    open_ones = {(method, path) for method in ("GET", "HEAD", "POST") for path in OPEN_PATHS}
    heads = {(method, path) for method, path in routes_of_the_server() if method == "HEAD"}

    assert routes_of_the_server() - open_ones - heads <= set(MAY)
    assert all(("GET", path) in MAY for _, path in heads - open_ones)


def test_each_kind_of_token_has_the_rights_in_the_table(
    tmp_path: Path, tokens: dict[str, str]
) -> None:
    book = TokenFile(tmp_path / "tokens.json", unix_ns=lambda: NOW_NS + 2 * DAY_NS)
    access = Access(port=8050, token=OWN, tokens=book)
    client = Client(AccessGate(anything, access))
    session = {"cookie": f"{access.cookie_name}={access.sessions.open()}"}
    ours = {**session, "sec-fetch-site": "same-origin"}
    shown = {sort: {"authorization": f"Bearer {token}"} for sort, token in tokens.items()}

    for (method, path), may in MAY.items():
        asked = re.sub(r"\{\w+\}", "ranks", path)
        for sort, headers in {**shown, "session": ours, "none": {}}.items():
            status = client.request(method, asked, headers=headers).status_code
            wanted = 200 if sort in may else 401 if sort in {"none", "expired", "revoked"} else 403
            assert status == wanted, f"{method} {path} with {sort}"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_without_a_token_no_route_answers_by_any_method(method: str) -> None:
    access = Access(port=8050, token=OWN)
    server = create_server(access, pages=pages, not_ready=lambda: None, routers=all_routers())
    client = Client(server)
    paths = {path for _, path in routes_of_the_server()} - OPEN_PATHS
    pages_and_more = ["/", "/runs", "/docs", "/openapi.json", "/_dash-layout", "/_reload-hash"]

    for path in [*paths, *pages_and_more, "/v1/", "/v2/x", "/console"]:
        assert client.request(method, path).status_code == 401, path


@pytest.mark.parametrize(
    "path",
    [
        "/assets",
        "/assets//metrics",
        "/assets/../v1/spans",
        "/healthz/",
        "/assets/%2e%2e/v1/spans",
        "/assets/..%2fmetrics",
        "/assets/%2e%2e%2f%2e%2e%2fetc/passwd",
        "/healthz/../metrics",
        "/healthz%00/metrics",
        "/login/../../metrics",
        "//metrics",
        "/assets/..\\metrics",
        "/_dash-component-suites/..%5c..%5cmetrics",
    ],
)
def test_no_spelling_of_a_path_bypasses_the_gate(path: str) -> None:
    client = Client(AccessGate(anything, Access(port=8050, token=OWN)))

    assert client.get(f"http://127.0.0.1:8050{path}").status_code == 401
