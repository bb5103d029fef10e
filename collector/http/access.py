"""Login: the server's own token, browser sessions, and a limit on failed attempts."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from rankscope.tracer.span import NS_PER_S

from .requests import cookie_in
from .tokens import FULL_GRANT, HOLDER_FORM, Grant, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .tokens import TokenFile


MAX_SESSIONS = 256
"""Of one token: who signs in often ends no session of another token."""

SESSION_BYTES = 32
SESSION_NS = 7 * 86_400 * 10**9
"""Limits the use of a stolen cookie to a week."""

WINDOW_S = 60
TRIES = 10
"""Failures of one client in a window."""

TRIES_OF_UNKNOWN = 100
"""Failures of all clients that never succeeded. Bounds an attacker with many addresses."""

MAX_VISITORS = 4096
TOKEN_BYTES = 32
BEARER_TRIES = 100
"""Failures of one client a minute: agents behind one address may share it."""


class Session(NamedTuple):
    """An open session of a browser."""

    opened_ns: int
    token_id: str | None
    """Id of the token that opened it. None: the server's own."""


class Sessions:
    """Open sessions of browsers. Their names are random and given out by the server alone."""

    def __init__(self, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._opened: dict[str, Session] = {}
        """By name, the oldest first."""

    def open(self, token_id: str | None = None) -> str:
        """Return the name of a new session. Beyond `MAX_SESSIONS` the token's oldest one ends.

        Args:
            token_id: Id of the token that opens it. None: the server's own.
        """
        name = secrets.token_urlsafe(SESSION_BYTES)
        self._opened[name] = Session(self._monotonic_ns(), token_id)
        own = []
        for other, session in list(self._opened.items()):
            if not self._is_young(session):
                self.end(other)
            elif session.token_id == token_id:
                own.append(other)
        for oldest in own[:-MAX_SESSIONS]:
            self.end(oldest)
        return name

    def find(self, name: str) -> Session | None:
        """Return an open session; None if there is none of this name."""
        # Names are random, so the time of a lookup reveals nothing about other names.
        session = self._opened.get(name)
        return session if session is not None and self._is_young(session) else None

    def end(self, name: str) -> None:
        """End a session. Does nothing if it is not open."""
        self._opened.pop(name, None)

    def _is_young(self, session: Session) -> bool:
        return self._monotonic_ns() - session.opened_ns < SESSION_NS


class Throttle:
    """Rate limit on failed logins, for each client and for all unknown clients together.

    A client is known once it succeeded; a success also clears its failures. The limit saves work
    and log lines. It is not needed against guessing: a token has 256 random bits.

    Args:
        tries: Failures of one client in `WINDOW_S`.
        tries_of_unknown: Failures of all unknown clients. Known clients are not limited by them.
    """

    def __init__(
        self,
        *,
        tries: int = TRIES,
        tries_of_unknown: int = TRIES_OF_UNKNOWN,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._tries = tries
        self._monotonic_ns = monotonic_ns
        self._failures: OrderedDict[str, deque[int]] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._unknown_failures: deque[int] = deque(maxlen=tries_of_unknown)

    def wait_s(self, client: str) -> int:
        """Return the whole seconds that a client has to wait; 0 if it may try now."""
        wait_ns = self._left_ns(self._failures.get(client))
        if client not in self._known:
            wait_ns = max(wait_ns, self._left_ns(self._unknown_failures))
        return -(-wait_ns // NS_PER_S)

    def failed(self, client: str) -> None:
        """Count a failure."""
        now_ns = self._monotonic_ns()
        if client not in self._known:
            self._unknown_failures.append(now_ns)
        self._failures.setdefault(client, deque(maxlen=self._tries)).append(now_ns)
        self._failures.move_to_end(client)
        while len(self._failures) > MAX_VISITORS:
            self._failures.popitem(last=False)

    def succeeded(self, client: str) -> None:
        """Forget a client's failures."""
        self._failures.pop(client, None)
        self._known[client] = None
        self._known.move_to_end(client)
        while len(self._known) > MAX_VISITORS:
            self._known.popitem(last=False)

    def _left_ns(self, failures: deque[int] | None) -> int:
        """Return the time until the oldest failure leaves the window; 0 below the limit."""
        if failures is None or len(failures) < (failures.maxlen or 0):
            return 0
        return max(0, failures[0] + WINDOW_S * NS_PER_S - self._monotonic_ns())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedProxy:
    """A proxy in front of the server, which names the client's address and scheme in headers.

    One such as oauth2-proxy also signs users in and names them. Any client that connects from one
    of its addresses can name any address, and any user.
    """

    header: str = ""
    """Name of the header with the user, in lower case; "": none has. The proxy removes it from
    what browsers send."""

    addresses: frozenset[str]

    def grant(self, headers: Iterable[tuple[bytes, bytes]], address: str) -> Grant | None:
        """Return the grant of a request of a signed-in user, who may read; None for any other.

        A header that is there twice names no user: one of them may be the browser's.
        """
        users = [value for name, value in headers if name.decode("latin-1").lower() == self.header]
        if address not in self.addresses or len(users) != 1:
            return None
        user = users[0].decode("latin-1")
        if not HOLDER_FORM.fullmatch(user):
            return None
        return Grant(role=Role.READ, run_prefix="", token_id="proxy", holder=user)  # noqa: S106


@dataclass(kw_only=True)
class Access:
    """Credentials that the server accepts: its own token, sessions and created tokens."""

    port: int
    """Part of the cookie's name: browsers do not separate the cookies of two ports of a host."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)
    tokens: TokenFile | None = field(default=None, repr=False)
    """Tokens that `rankscope token` created. None: only the server's own token is accepted."""

    sessions: Sessions = field(default_factory=Sessions, repr=False)
    """Browser sessions. One that a created token opened may read, while that token is valid."""

    proxy: TrustedProxy | None = None
    """Proxy that signs users in. None: no header names a user."""

    logins: Throttle = field(default_factory=Throttle, repr=False)
    """Limit for the login form and ``?token=``."""

    bearers: Throttle = field(
        default_factory=lambda: Throttle(tries=BEARER_TRIES, tries_of_unknown=10 * BEARER_TRIES),
        repr=False,
    )
    """Limit for tokens in a header. A valid token is always accepted."""

    @property
    def cookie_name(self) -> str:
        """Name of this server's session cookie."""
        return f"rankscope_session_{self.port}"

    def is_token(self, text: str) -> bool:
        """Return whether ``text`` is the server's own token, compared in constant time."""
        return hmac.compare_digest(text.encode(), self.token.encode())

    def grant(self, text: str) -> Grant | None:
        """Return the grant of a token; None if it is not valid."""
        if self.is_token(text):
            return FULL_GRANT
        return None if self.tokens is None else self.tokens.grant(text)

    def log_in(self, text: str, *, client: str) -> int | None:
        """Check a token given at login: the server's own, or one that may read all runs.

        Args:
            client: Key of the client (`client_key`).

        Returns:
            None if it is valid; 0 if it is not; else the whole seconds to wait. A valid token
            never waits: otherwise any client could lock its user out.
        """
        if self._reader(text) is not None:
            self.logins.succeeded(client)
            return None
        wait_s = self.logins.wait_s(client)
        if not wait_s:
            self.logins.failed(client)
        return wait_s

    def _reader(self, text: str) -> Grant | None:
        """Return the grant of a token that can open a session; None for any other."""
        grant = self.grant(text)
        return grant if grant and grant.allows(Role.READ) and not grant.run_prefix else None

    def session_grant(self, session: str) -> Grant | None:
        """Return the grant of a session; None if it is not open or its token no longer valid.

        Only the server's own token opens a session that may change anything.
        """
        found = self.sessions.find(session)
        if found is None:
            return None
        if found.token_id is None:
            return FULL_GRANT
        grant = None if self.tokens is None else self.tokens.grant_by_id(found.token_id)
        return None if grant is None else replace(grant, role=Role.READ)

    def set_cookie_header(self, text: str, *, is_secure: bool, instead_of: str = "") -> str:
        """Open a session and return its ``Set-Cookie`` value.

        Args:
            text: A token that `log_in` accepted.
            is_secure: Whether the request came over TLS. The cookie is then marked ``Secure``.
            instead_of: Current session of the browser, which ends.
        """
        self.sessions.end(instead_of)
        flags = "; Secure" if is_secure else ""
        grant = self._reader(text)
        # Revoked in this moment: the session opens, and its first request is refused.
        session = self.sessions.open("revoked" if grant is None else grant.token_id)
        return f"{self.cookie_name}={session}; Path=/; HttpOnly; SameSite=Strict{flags}"

    def clear_cookie_header(self) -> str:
        """Return the ``Set-Cookie`` value that deletes the session cookie."""
        return f"{self.cookie_name}=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"

    def session_in(self, headers: Mapping[str, str]) -> str:
        """Return the session named in a request's cookie; "" if there is none."""
        return cookie_in(headers, self.cookie_name)
