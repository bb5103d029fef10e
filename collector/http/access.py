"""Sessions of browsers: random names that the server alone gives out and takes back."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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
        """Tell whether ``session`` is open."""
        # The names are random: looking one up tells an asker nothing about another.
        opened_ns = self._opened_ns.get(session)
        return opened_ns is not None and self._monotonic_ns() - opened_ns < SESSION_NS

    def end(self, session: str) -> None:
        """End it; one that is not open is no error."""
        self._opened_ns.pop(session, None)
