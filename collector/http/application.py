"""The HTTP application of `rankscope serve`: probes, login and the mounted pages, all gated."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from a2wsgi import WSGIMiddleware
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from ..clock.reference import clock_router
from ..errors import RunNameError
from ..identity import check_run_name
from .gate import (
    GRANT_KEY,
    LOGIN_PATH,
    LOOPBACK_NAMES,
    OPEN_PREFIXES,
    STRICT_POLICY,
    AccessGate,
    safe_next,
)
from .metrics import MeasuredApp, metrics_router
from .refusals import Refusal, Refusals
from .requests import headers_of, is_secure, request_client
from .static_files import StaticFiles
from .tokens import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from starlette.routing import BaseRoute

    from ..retention.deletion import Deletions
    from ..store.store import Store
    from .access import Access
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
ASK = "Open the address that <code>rankscope serve</code> printed, or paste its token here."
LEAVE = '<form method="post" action="/logout"><button>Sign out</button></form>\n'
WAIT = "Too many wrong tokens from your address. Wait {wait_s} s, then try again."
WRONG = "That is not this server's token: it changes at each start. Copy it from the terminal."


def create_server(  # noqa: PLR0913  # all that is wired together here
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
    """Return the ASGI application, with the gate in front of all of it.

    Args:
        access: The token and the sessions.
        pages: WSGI application of the dashboard, mounted at ``/``.
        not_ready: Why the server cannot do its work just now, in words; None when it can.
        policy: ``Content-Security-Policy`` of ``pages``.
        routers: Further routes, matched before ``pages``.
        names: Host names by which the server may be asked.
        refusals: Counts and tells who was turned away; None: nobody sees them.
        metrics: What ``/metrics`` tells; None: there is no such route.
    """
    if metrics is not None:
        routers = [*routers, metrics_router(metrics)]
    counted = refusals or Refusals()
    app = create_app(access, pages=pages, not_ready=not_ready, routers=routers, refusals=counted)
    behind = BodyLimit(app, counted)
    gate = AccessGate(behind, access, policy=policy, names=names, refusals=counted)
    return gate if metrics is None else MeasuredApp(gate, metrics)


def create_app(
    access: Access,
    *,
    pages: Callable[..., Iterable[bytes]],
    not_ready: Callable[[], str | None],
    routers: Sequence[APIRouter] = (),
    refusals: Refusals | None = None,
) -> FastAPI:
    """Return the application that stands behind the gate; never serve it bare."""
    app = FastAPI(openapi_url=OPENAPI_PATH, docs_url=None, redoc_url=None, title="rankscope")

    @app.get("/healthz")
    def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    def readyz(request: Request) -> PlainTextResponse:
        reason = not_ready()
        if reason is None:
            return PlainTextResponse("ok\n")
        # The path is open, and the reason may name a folder: it is for those who may read.
        told = f": {reason}" if _may_read(request) else ""
        return PlainTextResponse(f"not ready{told}\n", 503)

    _add_login(app, access, refusals or Refusals())
    for router in (clock_router(), *routers):
        # Flat, so that a walk over the application's map meets each of them.
        app.router.routes.extend(router.routes)
    # a2wsgi types scopes and messages as its own dictionaries, Starlette as plain mappings.
    bridge: Any = WSGIMiddleware(pages, workers=PAGE_THREADS)
    # Strangers may ask for these files, and take them as slowly as they like.
    files = StaticFiles(bridge, prefixes=OPEN_PREFIXES)
    app.mount("/", AllowedMethods(app.router.routes, files))
    described = app.openapi
    app.openapi = lambda: _with_exact_bounds(described())  # type: ignore[method-assign]  # FastAPI's way
    return app


def _add_login(app: FastAPI, access: Access, refusals: Refusals) -> None:
    """Add the routes by which a browser's session begins and ends."""

    @app.get("/login")
    def login_form(request: Request) -> HTMLResponse:
        following = safe_next(request.query_params.get("next", "/"))
        return _login_page(ASK, following, is_in=GRANT_KEY in request.scope)

    @app.post("/login")
    async def login(request: Request) -> Response:
        client = request_client(request.scope)
        fields = await _read_form(request)
        following = safe_next(fields.get("next", "/"))
        wait_s = access.log_in(fields.get("token", "").strip(), client=client)
        if wait_s is None:
            answer = RedirectResponse(following, status_code=303)
            answer.headers["set-cookie"] = access.set_cookie_header(
                is_secure=is_secure(request.scope), instead_of=access.session_in(request.headers)
            )
            return answer
        if not wait_s:
            refusals.note(Refusal.WRONG_LOGIN, client=client, status=401)
            return _login_page(WRONG, following, status=401)
        refusals.note(Refusal.THROTTLED, client=client, path="/login", status=429)
        page = _login_page(WAIT.format(wait_s=wait_s), following, status=429)
        page.headers["retry-after"] = str(wait_s)
        return page

    @app.post("/logout")
    def logout(request: Request) -> Response:
        access.sessions.end(access.session_in(request.headers))
        answer = RedirectResponse(LOGIN_PATH, status_code=303)
        answer.headers["set-cookie"] = access.clear_cookie_header()
        return answer


def _with_exact_bounds(document: Any) -> Any:  # noqa: ANN401  # whatever JSON holds
    """Return the description with whole numbers written as such.

    FastAPI makes floats of them, and the shortest text of 2.0 ** 63 is that of a larger number.
    """
    if isinstance(document, dict):
        return {name: _with_exact_bounds(inner) for name, inner in document.items()}
    if isinstance(document, list):
        return [_with_exact_bounds(inner) for inner in document]
    return int(document) if isinstance(document, float) and document.is_integer() else document


def _may_read(request: Request) -> bool:
    grant = request.scope.get(GRANT_KEY)
    return grant is not None and grant.allows(Role.READ) and not grant.run_prefix


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
    """Return the fields of a url-encoded body; empty when it is longer than `MAX_LOGIN_BYTES`."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_LOGIN_BYTES:
            return {}
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[-1] for name, values in fields.items()}


SHARED_PATH = "/"
"""Statements are posted to it, and the pages begin there."""


class AllowedMethods:
    """The pages, behind routes whose paths are theirs alone.

    A mounted application takes whatever no route takes whole: a route's path with another
    method would be answered by a page. It is 405 here, with the methods that there are.

    Args:
        routes: Those of the application, also later ones.
        pages: What is mounted behind them.
    """

    def __init__(self, routes: Sequence[BaseRoute], pages: AsgiApp) -> None:
        self._routes = routes
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that no route took."""
        taken = self._methods_at(scope)
        answer: AsgiApp = self._pages
        if taken:
            allow = ", ".join(sorted(taken))
            answer = PlainTextResponse(
                f"{scope['method']} is not taken here: {allow}\n", 405, {"allow": allow}
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


MIB = 2**20
DEFAULT_MAX_BYTES = MIB
"""Of what a page, a statement or a command sends."""

MAX_BYTES = {"/v1/spans": 64 * MIB, "/v1/rows/": 16 * MIB}
"""By how a path begins; the routes themselves take less, and say by how much it was too long."""

TOO_LARGE = b"413: the body is too long\n"
BAD_LENGTH = b"400: Content-Length is no number\n"


class BodyLimit:
    """Passes requests on to ``app`` with no more body than the path may have.

    Args:
        app: Behind the gate: nobody without a token gets this far.
        refusals: Counts who sent too much.
        max_bytes: By how a path begins; `DEFAULT_MAX_BYTES` elsewhere.
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
        declared = headers_of(scope).get("content-length", "0")
        body = _Body(receive, send, max_bytes=self._cap(scope["path"]))
        if not (declared.isascii() and declared.isdigit()):
            await _answer(send, 400, BAD_LENGTH)
        elif int(declared[:20]) > body.max_bytes:
            self._note(scope)
            await _answer(send, 413, TOO_LARGE)
        else:
            await self._pass_on(scope, body)

    async def _pass_on(self, scope: Scope, body: _Body) -> None:
        try:
            await self._app(scope, body.receive, body.send)
        except ClientDisconnect:
            return  # Who hangs up in the middle of a body is no error of ours, and fills no log.
        except Exception:
            # Of an application whose request ended under it; its answer is given already.
            if not body.is_too_long:
                raise
        if body.is_too_long:
            self._note(scope)

    def _cap(self, path: str) -> int:
        found = (cap for begin, cap in self._max_bytes.items() if path.startswith(begin))
        return next(found, DEFAULT_MAX_BYTES)

    def _note(self, scope: Scope) -> None:
        self._refusals.note(
            Refusal.BODY_TOO_LARGE,
            client=request_client(scope),
            method=scope["method"],
            path=scope["path"],
            status=413,
        )


class _Body:
    """What one request may still send, and whether an answer has begun."""

    def __init__(self, receive: Receive, send: Send, *, max_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self.max_bytes = max_bytes
        self.is_too_long = False
        self._num_bytes = 0
        self._is_read = False
        self._has_begun = False

    async def receive(self) -> Message:
        """Return the next piece; past the cap, answer 413 and say that the asker has gone."""
        if self.is_too_long:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self._is_read = not message.get("more_body", False)
        if self._num_bytes <= self.max_bytes:
            return message
        self.is_too_long = True
        if not self._has_begun:
            await _answer(self._send, 413, TOO_LARGE)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Pass an answer on, unless 413 was given."""
        if self.is_too_long:
            return
        self._has_begun = True
        if message["type"] == "http.response.start" and not self._is_read:
            # Closed with unread bytes, a connection is reset, and the answer may be lost with it.
            # Left open, the edge throws the rest away for a while.
            kept = [pair for pair in message.get("headers", []) if pair[0].lower() != b"connection"]
            message = {**message, "headers": kept}
        await self._send(message)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


SCHEMA = 1


def deletion_router(store: Store, deletions: Deletions) -> APIRouter:
    """Return the route. It answers 200 with what was removed (for a run that was deleted
    before: with what came in since), 400 for a name that no run can have, 403 where the token
    is for other runs, 404 for a run that the store does not hold.
    """
    router = APIRouter()

    # Not async: the engine blocks, so it works in a thread of the pool.
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
            "schema": SCHEMA,
            "run": deletion.run_id,
            "at_ns": deletion.at_ns,
            "num_rows": deletion.num_rows,
        }

    router.add_api_route("/v1/runs", delete_run, methods=["DELETE"])
    return router
