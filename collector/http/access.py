"""Sessions of browsers: random names that the server alone gives out and takes back."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .requests import cookie_in
from .tokens import FULL_GRANT, Grant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .token_file import TokenFile


MAX_SESSIONS = 256
SESSION_BYTES = 32
SESSION_NS = 7 * 86_400 * 10**9
"""A cookie that was stolen is worth a week at most."""


class Sessions:
    """Those that are open.

    Args:
        monotonic_ns: Clock of their age.
    """

    def __init__(self, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._opened_ns: OrderedDict[str, int] = OrderedDict()

    def open(self) -> str:
        """Return a new session; beyond `MAX_SESSIONS` the oldest one ends."""
        session = secrets.token_urlsafe(SESSION_BYTES)
        self._opened_ns[session] = self._monotonic_ns()
        while len(self._opened_ns) > MAX_SESSIONS:
            self._opened_ns.popitem(last=False)
        return session

    def is_open(self, session: str) -> bool:
        """Return whether ``session`` is open."""
        # The names are random: looking one up tells an asker nothing about another.
        opened_ns = self._opened_ns.get(session)
        return opened_ns is not None and self._monotonic_ns() - opened_ns < SESSION_NS

    def end(self, session: str) -> None:
        """End it; one that is not open is no error."""
        self._opened_ns.pop(session, None)


NS_PER_S = 1_000_000_000
WINDOW_S = 60
TRIES = 10
"""Of one client in a window."""

TRIES_OF_UNKNOWN = 100
"""Of all who never succeeded, together: whoever has many addresses gains nothing by them."""

MAX_VISITORS = 4096


class Throttle:
    """Counts failed tries; a success clears a client and makes him no stranger.

    It spares the server work and the log. Guessing 256 random bits is hopeless without it.

    Args:
        tries: Failures of one client in `WINDOW_S`.
        tries_of_unknown: Failures of all strangers; one who once succeeded is not held up
            by them.
        monotonic_ns: Clock of the window.
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
        """Return how many whole seconds a client has to wait; 0: he may try."""
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
        """Return when the oldest of a full row of failures leaves the window."""
        if failures is None or len(failures) < (failures.maxlen or 0):
            return 0
        return max(0, failures[0] + WINDOW_S * NS_PER_S - self._monotonic_ns())


@dataclass(kw_only=True)
class Access:
    """Who may come in: one token, made anew at each start, and the sessions opened with it."""

    port: int
    """Names the cookie: browsers keep cookies by host alone, and two servers share a host."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(TOKEN_BYTES), repr=False)
    tokens: TokenFile | None = field(default=None, repr=False)
    """Those that `rankscope token` made; None: only the server's own token counts."""

    sessions: Sessions = field(default_factory=Sessions, repr=False)
    """Those of browsers; all are of the server's own token."""

    logins: Throttle = field(default_factory=Throttle, repr=False)
    """Of the login form and of ``?token=``."""

    bearers: Throttle = field(
        default_factory=lambda: Throttle(tries=BEARER_TRIES, tries_of_unknown=10 * BEARER_TRIES),
        repr=False,
    )
    """Of tokens in a header; a right one is always let in."""

    @property
    def cookie_name(self) -> str:
        """Name of the session cookie of this server."""
        return f"rankscope_session_{self.port}"

    def is_token(self, text: str) -> bool:
        """Return whether ``text`` is the token; takes the same time wherever it differs."""
        return hmac.compare_digest(text.encode(), self.token.encode())

    def grant(self, text: str) -> Grant | None:
        """Return what a bearer of ``text`` may do; None where it is no live token."""
        if self.is_token(text):
            return FULL_GRANT
        return None if self.tokens is None else self.tokens.grant(text)

    def log_in(self, text: str, *, client: str) -> int | None:
        """Take a try to log in; return None where it is the token, else how long to wait.

        Args:
            text: What was given.
            client: Who tries, as `client_key` says.

        Returns:
            0: wrong; above 0: whole seconds to wait, and nothing was compared.
        """
        wait_s = self.logins.wait_s(client)
        if wait_s:
            return wait_s
        if self.is_token(text):
            self.logins.succeeded(client)
            return None
        self.logins.failed(client)
        return 0

    def set_cookie_header(self, *, is_secure: bool, instead_of: str = "") -> str:
        """Open a session and return the ``Set-Cookie`` value that hands it to the browser.

        Args:
            is_secure: Whether the browser came by TLS; it then never sends the cookie without.
            instead_of: The session that the browser shows now; it ends.
        """
        self.sessions.end(instead_of)
        flags = "; Secure" if is_secure else ""
        return (
            f"{self.cookie_name}={self.sessions.open()}; Path=/; HttpOnly; SameSite=Strict{flags}"
        )

    def clear_cookie_header(self) -> str:
        """Return the ``Set-Cookie`` value that makes a browser forget its session."""
        return f"{self.cookie_name}=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"

    def session_in(self, headers: Mapping[str, str]) -> str:
        """Return what the cookie of this server says; "" where there is none."""
        return cookie_in(headers, self.cookie_name)


TOKEN_BYTES = 32


BEARER_TRIES = 100
"""Failures of one client a minute: agents behind one address may share it."""
