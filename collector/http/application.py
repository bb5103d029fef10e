"""The HTTP application of `rankscope serve`: probes, login and the mounted pages, all gated."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from a2wsgi import WSGIMiddleware
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from ..clock.reference import clock_router
from .body_limits import CappedBodies
from .gate import (
    GRANT_KEY,
    LOGIN_PATH,
    LOOPBACK_NAMES,
    OPEN_PREFIXES,
    STRICT_POLICY,
    AccessGate,
    safe_next,
)
from .methods import KnownMethods
from .metrics import Measured, metrics_router
from .refusals import Refusal, Refusals
from .requests import is_secure, visitor_in
from .static_files import StaticFiles
from .tokens import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .gate import Access, AsgiApp
    from .metrics import Metrics

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
    behind = CappedBodies(app, counted)
    gate = AccessGate(behind, access, policy=policy, names=names, refusals=counted)
    return gate if metrics is None else Measured(gate, metrics)


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
    app.mount("/", KnownMethods(app.router.routes, files))
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
        visitor = visitor_in(request.scope)
        fields = await _read_form(request)
        following = safe_next(fields.get("next", "/"))
        wait_s = access.log_in(fields.get("token", "").strip(), visitor=visitor)
        if wait_s is None:
            answer = RedirectResponse(following, status_code=303)
            answer.headers["set-cookie"] = access.set_cookie_header(
                is_secure=is_secure(request.scope), instead_of=access.session_in(request.headers)
            )
            return answer
        if not wait_s:
            refusals.note(Refusal.WRONG_LOGIN, visitor=visitor, status=401)
            return _login_page(WRONG, following, status=401)
        refusals.note(Refusal.THROTTLED, visitor=visitor, path="/login", status=429)
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
