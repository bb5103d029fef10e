"""The gate before everything that the server answers: closed unless a request proves itself.

Pure ASGI, so that mounted applications and unknown paths stand behind it too.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from collector.route_roles import is_allowed
from collector.tokens import FULL_GRANT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from collector.token_file import TokenBook
    from collector.tokens import Grant

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

LOGIN_PATH = "/login"
OPEN_PATHS = frozenset({"/healthz", "/readyz", LOGIN_PATH, "/_favicon.ico"})
"""What answers without proof, besides `OPEN_PREFIXES`."""

OPEN_PREFIXES = ("/assets/", "/_dash-component-suites/")
"""Static files: our own assets and the component bundles of Dash. They hold no run's data."""

STRICT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'"
)
"""What a page without scripts needs."""

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
MAX_SESSIONS = 256
TOKEN_BYTES = 32
GRANT_KEY = "rankscope.grant"
"""Where the gate leaves, in the ASGI scope, what a request may do: a `Grant`."""

UNAUTHORIZED = b"401: open the address with the token that `rankscope serve` printed\n"
WRONG_ROLE = b"403: this token is not for that\n"
FOREIGN_ORIGIN = b"403: this request came from another site's page\n"
FOREIGN_HOST = b"400: ask for this server by a loopback name (127.0.0.1, localhost)\n"


@dataclass(kw_only=True)
class Access:
    """Who may come in: one token, made anew at each start, and the sessions opened with it."""

    port: int
    """Names the cookie: browsers keep cookies by host alone, and two servers share a host."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)
    tokens: TokenBook | None = field(default=None, repr=False)
    """Those that `rankscope token` made; None: only the server's own token counts."""

    _sessions: OrderedDict[str, None] = field(default_factory=OrderedDict, repr=False)

    @property
    def cookie_name(self) -> str:
        """Name of the session cookie of this server."""
        return f"rankscope_session_{self.port}"

    def is_token(self, text: str) -> bool:
        """Tell whether ``text`` is the token, in time that does not depend on where it differs."""
        return hmac.compare_digest(text.encode(), self.token.encode())

    def grant(self, text: str) -> Grant | None:
        """Return what a bearer of ``text`` may do; None where it is no live token."""
        if self.is_token(text):
            return FULL_GRANT
        return None if self.tokens is None else self.tokens.grant(text)

    def open_session(self) -> str:
        """Return a new session id; beyond `MAX_SESSIONS` the oldest session ends."""
        session = secrets.token_urlsafe(TOKEN_BYTES)
        self._sessions[session] = None
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def is_session(self, session: str) -> bool:
        """Tell whether ``session`` is open."""
        # The ids are random: looking one up tells an asker nothing about another.
        return session in self._sessions

    def set_cookie_header(self) -> str:
        """Open a session and return the ``Set-Cookie`` value that hands it to the browser."""
        return f"{self.cookie_name}={self.open_session()}; Path=/; HttpOnly; SameSite=Strict"


class Proof(Enum):
    """By what a request comes in."""

    NONE = "none"
    OPEN = "open path"
    BEARER = "a token in a header"
    SESSION = "session cookie"


class AccessGate:
    """Lets a request through to ``app`` only with a session, a bearer token or an open path.

    Args:
        app: The whole application, mounts included.
        access: The token and the sessions.
        policy: ``Content-Security-Policy`` of everything but the login page, which has
            `STRICT_POLICY`.
        names: Host names by which the server may be asked. Any port is let pass, because
            an ssh tunnel changes it; the name alone is what a rebound DNS entry can't forge.
    """

    def __init__(
        self,
        app: AsgiApp,
        access: Access,
        *,
        policy: str = STRICT_POLICY,
        names: frozenset[str] = LOOPBACK_NAMES,
    ) -> None:
        self._app = app
        self._access = access
        self._names = names
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer_http(scope, receive, self._with_headers(scope, send))
        else:
            # No page of ours opens a web socket; closing before the accept answers 403.
            await send({"type": "websocket.close", "code": 1008})

    async def _answer_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers_of(scope)
        readable = scope["method"] in SAFE_METHODS
        proof = self._proof(scope, headers)
        if _host_name(headers.get("host", "")) not in self._names:
            await _reply(send, 400, FOREIGN_HOST)
        elif readable and proof is not Proof.OPEN and _query_tokens(scope):
            await self._trade_token(scope, send, proof)
        elif proof is Proof.NONE:
            await _refuse(scope, send, headers)
        elif proof is not Proof.OPEN and not is_allowed(
            scope[GRANT_KEY], scope["method"], scope["path"]
        ):
            await _reply(send, 403, WRONG_ROLE)
        elif not readable and _is_foreign(headers, must_tell=proof is Proof.SESSION):
            await _reply(send, 403, FOREIGN_ORIGIN)
        else:
            await self._app(scope, receive, send)

    def _proof(self, scope: Scope, headers: dict[str, str]) -> Proof:
        if _is_open(scope):
            return Proof.OPEN
        token = _shown_token(headers)
        grant = self._access.grant(token) if token else None
        if grant is not None:
            scope[GRANT_KEY] = grant
            return Proof.BEARER
        if self._access.is_session(_cookie(headers, self._access.cookie_name)):
            scope[GRANT_KEY] = FULL_GRANT
            return Proof.SESSION
        return Proof.NONE

    async def _trade_token(self, scope: Scope, send: Send, proof: Proof) -> None:
        """Trade ``?token=`` for a session and a URL without it, to be safe in any history."""
        if self._access.is_token(_query_tokens(scope)[-1]):
            await _redirect(send, _clean_url(scope), self._access.set_cookie_header())
        elif proof is Proof.NONE:
            await _refuse(scope, send, _headers_of(scope))
        else:
            await _redirect(send, _clean_url(scope))

    def _with_headers(self, scope: Scope, send: Send) -> Send:
        """Add the security headers to whatever answers; only static files may be cached."""
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
    """Return ``url`` where it is a path of this server, else ``/``.

    A page of another host must not be reachable through our login, so a scheme,
    a host, a backslash and a control character are all refused.
    """
    parts = urlsplit(url)
    is_local = url.startswith("/") and not url.startswith("//") and not parts.scheme
    is_plain = url.isprintable() and "\\" not in url and " " not in url
    return url if is_local and is_plain and not parts.netloc else "/"


def _headers_of(scope: Scope) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


def _shown_token(headers: dict[str, str]) -> str:
    """Return the token that a request shows; "" where it shows none.

    ClickHouse's clients have a name and a password: the token is the password, in basic
    authentication or in ``X-ClickHouse-Key``, and any name will do.
    """
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return shown.strip()
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(shown.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
        return pair.partition(":")[2]
    return headers.get("x-clickhouse-key", "").strip()


def _host_name(host: str) -> str:
    """Return the name in a ``Host`` header, without port and brackets; "" where it is no host."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if path in OPEN_PATHS:
        return True
    is_plain = ".." not in path and "//" not in path and "\\" not in path
    return is_plain and scope["method"] in SAFE_METHODS and path.startswith(OPEN_PREFIXES)


def _is_foreign(headers: dict[str, str], *, must_tell: bool) -> bool:
    """Tell whether another site's page sent the request (OWASP's fetch-metadata rule).

    Args:
        headers: The request's.
        must_tell: Count a request that says nothing of its origin as foreign.
    """
    origin = headers.get("origin")
    if origin is not None:
        return urlsplit(origin).netloc != headers.get("host", "")
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in {"same-origin", "none"}
    return must_tell


def _is_navigation(headers: dict[str, str]) -> bool:
    mode = headers.get("sec-fetch-mode")
    wants_html = "text/html" in headers.get("accept", "")
    return wants_html and mode in {None, "navigate"}


def _cookie(headers: dict[str, str], name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _query_tokens(scope: Scope) -> list[str]:
    return [value for key, value in _query(scope) if key == "token"]


def _clean_url(scope: Scope) -> str:
    """Return the path and query asked for, without the token; always a path of this server."""
    path = "/" + quote(scope["path"].lstrip("/\\"))
    query = urlencode([(key, value) for key, value in _query(scope) if key != "token"])
    return f"{path}?{query}" if query else path


async def _refuse(scope: Scope, send: Send, headers: dict[str, str]) -> None:
    """Send a browser that opens a page to the login, and everything else away."""
    if scope["method"] in SAFE_METHODS and _is_navigation(headers):
        await _redirect(send, f"{LOGIN_PATH}?{urlencode({'next': _clean_url(scope)})}")
    else:
        await _reply(send, 401, UNAUTHORIZED, [(b"www-authenticate", b"Bearer")])


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
