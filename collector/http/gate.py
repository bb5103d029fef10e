"""Access control in front of the whole application: authentication, roles, origin, headers.

It is ASGI middleware, so mounted applications and unknown paths are behind it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from .refusals import Refusal, Refusals
from .requests import (
    clean_url,
    host_name,
    is_foreign,
    is_navigation,
    is_secure,
    query_tokens,
    read_headers,
    request_client,
    request_token,
)
from .tokens import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .access import Access
    from .requests import AsgiApp, Message, Receive, Scope, Send
    from .tokens import Grant


API_PREFIX = "/v1/"

LOGIN_PATH = "/login"
OPEN_PATHS = frozenset({"/healthz", "/readyz", LOGIN_PATH, "/_favicon.ico"})
"""Paths that need no token, besides `OPEN_PREFIXES`."""

OPEN_PREFIXES = ("/assets/", "/_dash-component-suites/")
"""Static files: our own assets and the bundles of Dash. They contain no data of runs."""

STRICT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'"
)
"""``Content-Security-Policy`` of a page without scripts."""

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # "no-referrer" would make browsers send "Origin: null" with the login form.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = frozenset({"GET", "HEAD"})
GRANT_KEY = "rankscope.grant"
"""Key of the request's `Grant` in the ASGI scope."""

PEER_KEY = "rankscope.peer"
"""Key of the address that the connection comes from, if a proxy is trusted to name the client's."""

UNAUTHORIZED = b"401: no valid token. Open the URL that `rankscope serve` printed\n"
WRONG_ROLE = b"403: this token does not allow this request\n"
FOREIGN_ORIGIN = b"403: this request came from a page of another site\n"
FOREIGN_HOST = b"400: unknown host name. Allow it with --server-name when the server starts\n"
THROTTLED = b"429: too many invalid tokens. Wait, then fix the token.\n"
ANSWERS = {
    Refusal.FOREIGN_HOST: (400, FOREIGN_HOST),
    Refusal.NO_TOKEN: (401, UNAUTHORIZED),
    Refusal.WRONG_ROLE: (403, WRONG_ROLE),
    Refusal.FOREIGN_ORIGIN: (403, FOREIGN_ORIGIN),
    Refusal.THROTTLED: (429, THROTTLED),
}
"""Status and body by reason. They are constant: a refusal reveals nothing about the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """Requirements of a route on a token."""

    role: Role
    any_scope: bool
    """Whether tokens for some runs only are accepted: the route concerns no run, or checks the
    run itself by the grant in the ASGI scope (`GRANT_KEY`)."""


ROUTE_RULES = {
    ("GET", "/v1/openapi.json"): RouteRule(role=Role.READ, any_scope=True),
    ("HEAD", "/v1/openapi.json"): RouteRule(role=Role.READ, any_scope=True),
    ("DELETE", "/v1/runs"): RouteRule(role=Role.ADMIN, any_scope=True),
    ("GET", "/metrics"): RouteRule(role=Role.READ, any_scope=False),
    # Statements cannot be limited to some runs. The gateway checks the role and names it.
    ("POST", "/"): RouteRule(role=Role.READ, any_scope=False),
    ("GET", "/ping"): RouteRule(role=Role.READ, any_scope=False),
    ("POST", "/logout"): RouteRule(role=Role.READ, any_scope=True),
    ("POST", "/v1/clock"): RouteRule(role=Role.INGEST, any_scope=True),
    ("POST", "/v1/spans"): RouteRule(role=Role.INGEST, any_scope=True),
    ("POST", "/v1/rows/{table}"): RouteRule(role=Role.INGEST, any_scope=True),
    ("GET", "/v1/resume"): RouteRule(role=Role.INGEST, any_scope=True),
}
"""Requirements by method and path. A last part in braces matches any value.

A path below `API_PREFIX` that is not listed requires the role ``admin``."""

_OF_FOLDERS = {
    (method, path.rpartition("/")[0]): rule
    for (method, path), rule in ROUTE_RULES.items()
    if path.endswith("}")
}

PAGES = RouteRule(role=Role.READ, any_scope=False)
"""Requirements of all paths outside `API_PREFIX`: the dashboard shows all runs, changes none."""

UNKNOWN = RouteRule(role=Role.ADMIN, any_scope=False)


def find_rule(method: str, path: str) -> RouteRule:
    """Return the requirements of a request."""
    known = ROUTE_RULES.get((method, path)) or _OF_FOLDERS.get((method, path.rpartition("/")[0]))
    if known is not None:
        return known
    return UNKNOWN if path.startswith(API_PREFIX) else PAGES


def is_allowed(grant: Grant, method: str, path: str) -> bool:
    """Return whether a grant covers a request, judged without its body."""
    rule = find_rule(method, path)
    return grant.allows(rule.role) and (rule.any_scope or not grant.run_prefix)


class Credential(Enum):
    """Kind of credential of a request."""

    NONE = "none"
    OPEN = "open path"
    BEARER = "a token in a header"
    SESSION = "session cookie, or a user whom the trusted proxy signed in"


class AccessGate:
    """Passes requests with a session, a valid token or an open path on to ``app``.

    Args:
        app: The whole application, including mounts.
        policy: ``Content-Security-Policy`` of all answers except the login page, which has
            `STRICT_POLICY`.
        names: Accepted host names. Any port is accepted, because an ssh tunnel changes it. The
            name protects against DNS rebinding.
    """

    def __init__(
        self,
        app: AsgiApp,
        access: Access,
        *,
        policy: str = STRICT_POLICY,
        names: frozenset[str] = LOOPBACK_NAMES,
        refusals: Refusals | None = None,
    ) -> None:
        self._app = app
        self._access = access
        self._names = names
        self._policy = policy
        self._refusals = refusals or Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer_http(scope, receive, self._with_headers(scope, send))
        else:
            # No page opens a web socket. Closing before the accept answers 403.
            await send({"type": "websocket.close", "code": 1008})

    async def _answer_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = read_headers(scope)
        readable = scope["method"] in SAFE_METHODS
        credential = self._authenticate(scope, headers)
        if host_name(headers.get("host", "")) not in self._names:
            await self._send_refusal(scope, send, Refusal.FOREIGN_HOST)
        elif readable and credential is not Credential.OPEN and query_tokens(scope):
            await self._exchange_token(scope, send, credential)
        elif credential is Credential.NONE:
            await self._refuse(scope, send, headers)
        elif credential is not Credential.OPEN and not is_allowed(
            scope[GRANT_KEY], scope["method"], scope["path"]
        ):
            await self._send_refusal(scope, send, Refusal.WRONG_ROLE)
        elif not readable and is_foreign(
            scope, headers, requires_origin=credential is Credential.SESSION
        ):
            await self._send_refusal(scope, send, Refusal.FOREIGN_ORIGIN)
        else:
            await self._app(scope, receive, send)

    def _authenticate(self, scope: Scope, headers: dict[str, str]) -> Credential:
        """Return the kind of credential, and store the grant in the scope."""
        token = request_token(headers)
        grant = self._access.grant(token) if token else None
        credential = Credential.BEARER if grant is not None else Credential.NONE
        if grant is None:
            grant = self._access.session_grant(self._access.session_in(headers))
            if grant is None and self._access.proxy is not None:
                host, _ = scope.get(PEER_KEY) or ("", 0)
                grant = self._access.proxy.grant(scope["headers"], str(host))
            credential = Credential.NONE if grant is None else Credential.SESSION
        if grant is not None:
            scope[GRANT_KEY] = grant
        return Credential.OPEN if _is_open(scope) else credential

    async def _exchange_token(self, scope: Scope, send: Send, credential: Credential) -> None:
        """Exchange ``?token=`` for a session, and redirect to a URL that is safe in histories."""
        headers = read_headers(scope)
        token = query_tokens(scope)[-1]
        wait_s = self._access.log_in(token, client=request_client(scope))
        if wait_s is None:
            cookie = self._access.set_cookie_header(
                token, is_secure=is_secure(scope), instead_of=self._access.session_in(headers)
            )
            await _redirect(send, clean_url(scope), cookie)
        elif credential is not Credential.NONE:
            await _redirect(send, clean_url(scope))
        elif wait_s:
            await self._send_refusal(scope, send, Refusal.THROTTLED, wait_s=wait_s)
        else:
            await self._refuse(scope, send, headers)

    async def _refuse(self, scope: Scope, send: Send, headers: dict[str, str]) -> None:
        """Redirect a browser that opens a page to the login, and refuse all other requests."""
        if scope["method"] in SAFE_METHODS and is_navigation(headers):
            await _redirect(send, f"{LOGIN_PATH}?{urlencode({'next': clean_url(scope)})}")
            return
        client = request_client(scope)
        wait_s = self._access.bearers.wait_s(client) if request_token(headers) else 0
        if wait_s:
            await self._send_refusal(scope, send, Refusal.THROTTLED, wait_s=wait_s)
            return
        if request_token(headers):
            self._access.bearers.failed(client)
        await self._send_refusal(scope, send, Refusal.NO_TOKEN)

    async def _send_refusal(
        self, scope: Scope, send: Send, refusal: Refusal, *, wait_s: int = 0
    ) -> None:
        status, body = ANSWERS[refusal]
        grant = scope.get(GRANT_KEY)
        self._refusals.record(
            refusal,
            client=request_client(scope),
            method=scope["method"],
            path=scope["path"],  # not the query, which may contain a token
            status=status,
            token_id=None if grant is None else grant.token_id,
        )
        more = [(b"www-authenticate", b"Bearer")] if refusal is Refusal.NO_TOKEN else []
        if wait_s:
            more.append((b"retry-after", str(wait_s).encode()))
        await _reply(send, status, body, more)

    def _with_headers(self, scope: Scope, send: Send) -> Send:
        """Add the security headers to all answers. Only static files may be cached."""
        policy = STRICT_POLICY if scope["path"] == LOGIN_PATH else self._policy
        extra = [(b"content-security-policy", policy.encode()), *SECURITY_HEADERS]
        is_static = scope["path"].startswith(OPEN_PREFIXES)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in extra}
                kept = [pair for pair in message.get("headers", []) if pair[0].lower() not in names]
                if not is_static:
                    kept = [pair for pair in kept if pair[0].lower() != b"cache-control"]
                    kept.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*kept, *extra]}
            await send(message)

        return send_with_headers


def safe_next(url: str) -> str:
    """Return ``url`` if it is a path of this server, else ``/``.

    The login must not redirect to another host, so a scheme, a host, a backslash and control
    characters are refused.
    """
    parts = urlsplit(url)
    is_local = url.startswith("/") and not url.startswith("//") and not parts.scheme
    is_plain = url.isprintable() and "\\" not in url and " " not in url
    return url if is_local and is_plain and not parts.netloc else "/"


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if path in OPEN_PATHS:
        return True
    is_plain = ".." not in path and "//" not in path and "\\" not in path
    return is_plain and scope["method"] in SAFE_METHODS and path.startswith(OPEN_PREFIXES)


async def _redirect(send: Send, url: str, set_cookie: str | None = None) -> None:
    headers = [(b"location", url.encode("latin-1"))]
    if set_cookie is not None:
        headers.append((b"set-cookie", set_cookie.encode()))
    await _reply(send, 303, b"", headers)


async def _reply(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    start = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
