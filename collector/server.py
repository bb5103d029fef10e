"""The HTTP application of `rankscope serve`: probes, login and the mounted pages, all gated."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from a2wsgi import WSGIMiddleware
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from collector.access import STRICT_POLICY, AccessGate, safe_next
from collector.clock_probe import ReferenceClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from collector.access import Access, AsgiApp

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
</html>
"""
ASK = "Open the address that <code>rankscope serve</code> printed, or paste its token here."
WRONG = "That is not this server's token: it changes at each start. Copy it from the terminal."


def create_server(
    access: Access,
    *,
    pages: Callable[..., Iterable[bytes]],
    not_ready: Callable[[], str | None],
    policy: str = STRICT_POLICY,
    routers: Sequence[APIRouter] = (),
) -> AsgiApp:
    """Return the ASGI application, with the gate in front of all of it.

    Args:
        access: The token and the sessions.
        pages: WSGI application of the dashboard, mounted at ``/``.
        not_ready: Why the server cannot do its work just now, in words; None when it can.
        policy: ``Content-Security-Policy`` of ``pages``.
        routers: Further routes, matched before ``pages``.
    """
    app = create_app(access, pages=pages, not_ready=not_ready, routers=routers)
    return AccessGate(app, access, policy=policy)


def create_app(
    access: Access,
    *,
    pages: Callable[..., Iterable[bytes]],
    not_ready: Callable[[], str | None],
    routers: Sequence[APIRouter] = (),
) -> FastAPI:
    """Return the application that stands behind the gate; never serve it bare."""
    app = FastAPI(openapi_url=OPENAPI_PATH, docs_url=None, redoc_url=None, title="rankscope")

    @app.get("/healthz")
    def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    def readyz() -> PlainTextResponse:
        reason = not_ready()
        # The reason stays out of the answer: the path is open, and it may name a folder.
        return (
            PlainTextResponse("ok\n") if reason is None else PlainTextResponse("not ready\n", 503)
        )

    reference = ReferenceClock.start()

    @app.post("/v1/clock")
    async def clock() -> dict[str, Any]:
        return reference.answer(reference.now_ns()).document()

    @app.get("/login")
    def login_form(request: Request) -> HTMLResponse:
        return _login_page(ASK, safe_next(request.query_params.get("next", "/")))

    @app.post("/login")
    async def login(request: Request) -> Response:
        fields = await _read_form(request)
        following = safe_next(fields.get("next", "/"))
        if not access.is_token(fields.get("token", "").strip()):
            return _login_page(WRONG, following, status=401)
        answer = RedirectResponse(following, status_code=303)
        answer.headers["set-cookie"] = access.set_cookie_header()
        return answer

    for router in routers:
        # Flat, so that a walk over the application's map meets each of them.
        app.router.routes.extend(router.routes)
    # a2wsgi types scopes and messages as its own dictionaries, Starlette as plain mappings.
    bridge: Any = WSGIMiddleware(pages, workers=PAGE_THREADS)
    app.mount("/", bridge)
    return app


def _login_page(message: str, following: str, *, status: int = 200) -> HTMLResponse:
    page = LOGIN_PAGE.format(message=message, next=escape(following, quote=True))
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
