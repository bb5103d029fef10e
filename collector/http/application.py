"""HTTP application of `rankscope serve`: probes, login, deletion of runs and the pages."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from a2wsgi import WSGIMiddleware
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ..clock.reference import clock_router
from ..errors import RunNameError
from ..identity import check_run_name
from .gate import (
    GRANT_KEY,
    LOGIN_PATH,
    LOOPBACK_NAMES,
    PEER_KEY,
    STRICT_POLICY,
    AccessGate,
    safe_next,
)
from .metrics import MeasuredApp, metrics_router
from .refusals import Refusal, Refusals
from .requests import is_secure, read_headers, request_client
from .tokens import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.routing import BaseRoute

    from ..retention.deletion import Deletions
    from ..store.store import Store
    from .access import Access, TrustedProxy
    from .metrics import Metrics
    from .requests import AsgiApp, Message, Receive, Scope, Send
    from .tokens import Grant


MAX_LOGIN_BYTES = 4096
PAGE_THREADS = 8
OPENAPI_PATH = "/v1/openapi.json"

LOGIN_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>rankscope: sign in</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 26rem; margin: 18vh auto;
  padding: 0 1rem }}
input, button {{ font: inherit; padding: .4rem .6rem; width: 100%; box-sizing: border-box;
  margin-top: .6rem }}
</style>
<h1>rankscope</h1>
<p>{message}</p>
<form method="post" action="/login">
<input type="hidden" name="next" value="{next}">
<label>Token<input type="password" name="token" autofocus required autocomplete="off"></label>
<button>Sign in</button>
</form>
{leave}</html>
"""
ASK = (
    "Open the URL that <code>rankscope serve</code> printed, or paste its token here. A token of"
    " role <code>read</code> for all runs shows every page and changes nothing."
)
LEAVE = '<form method="post" action="/logout"><button>Sign out</button></form>\n'
WAIT = "Too many invalid tokens from your address. Wait {wait_s} s, then try again."
WRONG = (
    "Invalid token. The server's own token changes at each start: copy it from its terminal, or"
    " give a token of role <code>read</code> that is for all runs."
)

SHARED_PATH = "/"
"""Path of both the first page and the gateway's statements (POST)."""

MIB = 2**20
DEFAULT_MAX_BYTES = MIB
"""Limit for bodies of pages, statements and commands."""

MAX_BYTES = {"/v1/spans": 64 * MIB, "/v1/rows/": 16 * MIB}
"""Limits by prefix of the path. The routes have lower limits with more exact messages."""

TOO_LARGE = b"413: the body is too long\n"
TWO_LENGTHS = b"400: both Content-Length and Transfer-Encoding\n"
LENGTHS = frozenset({"content-length", "transfer-encoding"})
DISCARD_TIMEOUT_S = 5
MAX_DISCARDED_BYTES = 64 * MIB
"""Limits for the rest of a body that is too long, which is read and discarded."""

GZIP_LEVEL = 1
"""A picture takes 5 ms; level 6 would save a tenth and take three times as long."""

DELETION_SCHEMA = 1
"""Version of the answer of ``DELETE /v1/runs``."""


def create_server(  # noqa: PLR0913  # one parameter per part
    access: Access,
    *,
    pages: Callable[..., Iterable[bytes]],
    not_ready: Callable[[], str | None],
    policy: str = STRICT_POLICY,
    routers: Sequence[APIRouter] = (),
    names: frozenset[str] = LOOPBACK_NAMES,
    refusals: Refusals | None = None,
    metrics: Metrics | None = None,
) -> AsgiApp:
    """Return the ASGI application behind the gate.

    Args:
        pages: WSGI application of the dashboard, mounted at ``/``.
        not_ready: Returns why the server is not ready; None if it is.
        policy: ``Content-Security-Policy`` of ``pages``.
        routers: Further routes, matched before ``pages``.
        names: Host names of this server, compared with the ``Host`` header.
        refusals: Counts and logs refused requests. None: they are not reported.
        metrics: Content of ``/metrics``. None: the route does not exist.
    """
    if metrics is not None:
        routers = [*routers, metrics_router(metrics)]
    counted = refusals or Refusals()
    app = create_app(access, pages=pages, not_ready=not_ready, routers=routers, refusals=counted)
    behind = BodyLimit(app, counted)
    whole: AsgiApp = AccessGate(behind, access, policy=policy, names=names, refusals=counted)
    if access.proxy is not None:
        whole = _behind_proxy(whole, access.proxy)
    return whole if metrics is None else MeasuredApp(whole, metrics)


def _behind_proxy(app: AsgiApp, proxy: TrustedProxy) -> AsgiApp:
    """Take the client's address and scheme from the headers of a trusted proxy, and of no other."""
    gate: Any = app  # uvicorn declares other types for scopes and messages
    forwarded: Any = ProxyHeadersMiddleware(gate, trusted_hosts=sorted(proxy.addresses))

    async def keep_peer(scope: Scope, receive: Receive, send: Send) -> None:
        scope[PEER_KEY] = scope.get("client")
        await forwarded(scope, receive, send)

    return keep_peer


def create_app(
    access: Access,
    *,
    pages: Callable[..., Iterable[bytes]],
    not_ready: Callable[[], str | None],
    routers: Sequence[APIRouter] = (),
    refusals: Refusals | None = None,
) -> FastAPI:
    """Return the application without the gate. It must not be served without one."""
    app = FastAPI(openapi_url=OPENAPI_PATH, docs_url=None, redoc_url=None, title="rankscope")

    @app.get("/healthz")
    def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    def readyz(request: Request) -> PlainTextResponse:
        reason = not_ready()
        if reason is None:
            return PlainTextResponse("ok\n")
        # The path needs no token and the reason may name a folder: show it to readers only.
        grant: Grant | None = request.scope.get(GRANT_KEY)
        is_reader = grant is not None and grant.allows(Role.READ) and not grant.run_prefix
        details = f": {reason}" if is_reader else ""
        return PlainTextResponse(f"not ready{details}\n", 503)

    _add_login(app, access, refusals or Refusals())
    for router in (clock_router(), *routers):
        # Flat, so that a test that lists the application's routes sees each of them.
        app.router.routes.extend(router.routes)
    # a2wsgi and Starlette declare different types for scopes and messages.
    bridge: Any = WSGIMiddleware(pages, workers=PAGE_THREADS)
    compressed: Any = GZipMiddleware(bridge, compresslevel=GZIP_LEVEL)
    app.mount("/", AllowedMethods(app.router.routes, compressed))
    described = app.openapi
    app.openapi = lambda: _with_exact_bounds(described())  # type: ignore[method-assign]  # FastAPI's way
    return app


def _add_login(app: FastAPI, access: Access, refusals: Refusals) -> None:
    @app.get("/login")
    def login_form(request: Request) -> HTMLResponse:
        following = safe_next(request.query_params.get("next", "/"))
        return _login_page(ASK, following, is_in=GRANT_KEY in request.scope)

    @app.post("/login")
    async def login(request: Request) -> Response:
        client = request_client(request.scope)
        fields = await _read_form(request)
        following = safe_next(fields.get("next", "/"))
        token = fields.get("token", "").strip()
        wait_s = access.log_in(token, client=client)
        if wait_s is None:
            answer = RedirectResponse(following, status_code=303)
            answer.headers["set-cookie"] = access.set_cookie_header(
                token,
                is_secure=is_secure(request.scope),
                instead_of=access.session_in(request.headers),
            )
            return answer
        if not wait_s:
            refusals.record(Refusal.WRONG_LOGIN, client=client, status=401)
            return _login_page(WRONG, following, status=401)
        refusals.record(Refusal.THROTTLED, client=client, path="/login", status=429)
        page = _login_page(WAIT.format(wait_s=wait_s), following, status=429)
        page.headers["retry-after"] = str(wait_s)
        return page

    @app.post("/logout")
    def logout(request: Request) -> Response:
        access.sessions.end(access.session_in(request.headers))
        answer = RedirectResponse(LOGIN_PATH, status_code=303)
        answer.headers["set-cookie"] = access.clear_cookie_header()
        return answer


def _with_exact_bounds(document: Any) -> Any:  # noqa: ANN401  # any JSON value
    """Return the description with whole numbers as integers.

    FastAPI makes floats of them, and the shortest text of 2.0 ** 63 is a larger integer.
    """
    if isinstance(document, dict):
        return {name: _with_exact_bounds(inner) for name, inner in document.items()}
    if isinstance(document, list):
        return [_with_exact_bounds(inner) for inner in document]
    return int(document) if isinstance(document, float) and document.is_integer() else document


def _login_page(
    message: str, following: str, *, status: int = 200, is_in: bool = False
) -> HTMLResponse:
    page = LOGIN_PAGE.format(
        message=message,
        next=escape(following, quote=True),
        leave=LEAVE if is_in else "",
    )
    return HTMLResponse(page, status_code=status)


async def _read_form(request: Request) -> dict[str, str]:
    """Return the fields of a url-encoded body; {} if it is longer than `MAX_LOGIN_BYTES`."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_LOGIN_BYTES:
            return {}
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[-1] for name, values in fields.items()}


class AllowedMethods:
    """Mounted pages that answer 405 for a route's path with a wrong method.

    A mounted application gets every request that no route matches completely. Without this, a
    page would answer the path of a route with another method.

    Args:
        routes: The application's routes, including those that are added later.
    """

    def __init__(self, routes: Sequence[BaseRoute], pages: AsgiApp) -> None:
        self._routes = routes
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that no route matched."""
        taken = self._methods_at(scope)
        answer: AsgiApp = self._pages
        if taken:
            allow = ", ".join(sorted(taken))
            answer = PlainTextResponse(
                f"{scope['method']} is not allowed. Allowed: {allow}\n", 405, {"allow": allow}
            )
        await answer(scope, receive, send)

    def _methods_at(self, scope: Scope) -> set[str]:
        if scope["type"] != "http" or scope["path"] == SHARED_PATH:
            return set()
        return {
            method
            for route in self._routes
            if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL
            for method in route.methods or ()
        }


class BodyLimit:
    """ASGI middleware that answers 413 to bodies that are too long.

    A body with a declared length is refused before it is read.

    Args:
        app: Application behind it. The gate is in front of it, so requests have a token.
        max_bytes: Limits by prefix of the path; `DEFAULT_MAX_BYTES` for all others.
    """

    def __init__(
        self, app: AsgiApp, refusals: Refusals, *, max_bytes: Mapping[str, int] = MAX_BYTES
    ) -> None:
        self._app = app
        self._refusals = refusals
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = read_headers(scope)
        limits = (n for begin, n in self._max_bytes.items() if scope["path"].startswith(begin))
        limit = next(limits, DEFAULT_MAX_BYTES)
        if headers.keys() >= LENGTHS:
            # A proxy in front may end the request at the one length, and h11 at the other: the
            # rest would be a second request (RFC 9112, 11.2).
            await _answer_and_close(send, 400, TWO_LENGTHS)
        elif (declared := int(headers.get("content-length", "0"))) > limit:
            is_short = declared <= MAX_DISCARDED_BYTES
            await self._refuse(scope, send, discard=receive if is_short else None)
        else:
            await self._pass_on(scope, receive, send, limit=limit)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, *, limit: int) -> None:
        num_bytes = 0
        is_read = has_begun = is_too_long = False

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_read, is_too_long
            if is_too_long:
                return {"type": "http.disconnect"}
            message = await receive()
            num_bytes += len(message.get("body", b""))
            is_read = not message.get("more_body", False)
            if num_bytes <= limit:
                return message
            is_too_long = True
            if not has_begun:
                await self._refuse(scope, send, discard=receive)
            return {"type": "http.disconnect"}

        async def send_unless_refused(message: Message) -> None:
            nonlocal has_begun
            if is_too_long:
                return
            has_begun = True
            if message["type"] == "http.response.start" and not is_read:
                # Closing a connection with unread bytes resets it, and the answer may be lost.
                kept = [pair for pair in message.get("headers", []) if pair[0] != b"connection"]
                message = {**message, "headers": kept}
            await send(message)

        try:
            await self._app(scope, receive_limited, send_unless_refused)
        except Exception as error:
            # Neither a client that disconnects within a body nor one that got 413 is an error.
            if not (is_too_long or isinstance(error, ClientDisconnect)):
                raise

    async def _refuse(self, scope: Scope, send: Send, *, discard: Receive | None) -> None:
        self._refusals.record(
            Refusal.BODY_TOO_LARGE,
            client=request_client(scope),
            method=scope["method"],
            path=scope["path"],
            status=413,
        )
        await _answer_and_close(send, 413, TOO_LARGE, discard=discard)


async def _answer_and_close(
    send: Send, status: int, body: bytes, *, discard: Receive | None = None
) -> None:
    """Answer, read on for a while, then close the connection.

    Closing at once would reset the connection while the client still sends, and it could lose
    the answer.
    """
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if discard is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                num_left = MAX_DISCARDED_BYTES
                while num_left > 0 and (message := await discard()).get("more_body", False):
                    num_left -= len(message.get("body", b""))
    await send({"type": "http.response.body", "body": b""})


def deletion_router(store: Store, deletions: Deletions) -> APIRouter:
    """Return the route ``DELETE /v1/runs?run_id=``, which deletes a run of this server's store.

    It answers 200 with the number of rows removed (for a run deleted before, those received
    since), 400 for an invalid name, 403 if the token is for other runs, and 404 if the store has
    no such run.
    """
    router = APIRouter()

    # Not async: the engine blocks, so FastAPI runs it in a thread.
    def delete_run(run_id: str, request: Request) -> dict[str, Any]:
        grant: Grant = request.scope[GRANT_KEY]
        try:
            check_run_name(run_id)
        except RunNameError as error:
            raise HTTPException(400, str(error)) from None
        if not grant.covers(run_id):
            raise HTTPException(403, "this token is for other runs")
        if not deletions.is_deleted(run_id) and not deletions.has_rows(run_id):
            raise HTTPException(404, f"no run {run_id!r} in this store")
        deletion = deletions.delete(run_id)
        return {
            "schema": DELETION_SCHEMA,
            "run": deletion.run_id,
            "at_ns": deletion.at_ns,
            "num_rows": deletion.num_rows,
        }

    router.add_api_route("/v1/runs", delete_run, methods=["DELETE"])
    return router
