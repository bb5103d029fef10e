"""Who was refused, why and how often: counted always, told sparsely."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    LogEvent = Callable[[str, Mapping[str, object]], None]
    """Takes the name of an event, and its fields."""

QUIET_NS = 60 * 10**9
MAX_LOGGED = 1024
MAX_PATH_LETTERS = 200


class Refusal(StrEnum):
    """Why something was turned away."""

    NO_TOKEN = "no-token"  # noqa: S105  # a reason
    WRONG_ROLE = "wrong-role"
    THROTTLED = "throttled"
    WRONG_LOGIN = "wrong-login"
    FOREIGN_HOST = "foreign-host"
    FOREIGN_ORIGIN = "foreign-origin"
    BODY_TOO_LARGE = "body-too-large"
    BAD_BODY = "bad-body"
    BAD_HTTP = "bad-http"
    SLOW_HEADER = "slow-header"
    SLOW_BODY = "slow-body"
    SLOW_READER = "slow-reader"
    TOO_MANY_CONNECTIONS = "too-many-connections"
    TOO_MANY_FROM_ADDRESS = "too-many-from-address"
    NO_FILES_LEFT = "no-files-left"
    TLS_HANDSHAKE = "tls-handshake"


def discard_event(event: str, fields: Mapping[str, object]) -> None:  # the form of `LogEvent`
    """Tell nobody."""


class Refusals:
    """Counts refusals by reason, and tells the first of each reason and client a minute.

    Whoever floods the server with bad requests shall not flood the log too.

    Args:
        tell: Where to.
        monotonic_ns: Clock of the minute.
    """

    def __init__(
        self, tell: LogEvent = discard_event, *, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._tell = tell
        self._monotonic_ns = monotonic_ns
        self._told: OrderedDict[tuple[Refusal, str], tuple[int, int]] = OrderedDict()
        self.counts: Counter[Refusal] = Counter()
        """By reason, since the start."""

    def note(self, reason: Refusal, *, client: str, **fields: object) -> None:
        """Count one.

        Args:
            reason: Why.
            client: Whose; an address.
            fields: What else to tell: method, path, status, a token's id. Never a secret.
        """
        self.counts[reason] += 1
        key = (reason, client)
        now_ns = self._monotonic_ns()
        told_ns, num_quiet = self._told.get(key, (None, 0))
        if told_ns is not None and now_ns - told_ns < QUIET_NS:
            self._told[key] = (told_ns, num_quiet + 1)
            return
        self._told[key] = (now_ns, 0)
        self._told.move_to_end(key)
        while len(self._told) > MAX_LOGGED:
            self._told.popitem(last=False)
        more = {"more_since_last": num_quiet} if num_quiet else {}
        self._tell("refused", {"reason": str(reason), "visitor": client, **_short(fields), **more})


def _short(fields: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value[:MAX_PATH_LETTERS] if isinstance(value, str) else value
        for name, value in fields.items()
    }
