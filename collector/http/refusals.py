"""Counts of refused requests, with a rate-limited log."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    LogEvent = Callable[[str, Mapping[str, object]], None]
    """Logs an event, given its name and fields."""

QUIET_NS = 60 * 10**9
MAX_LOGGED = 1024
MAX_PATH_LETTERS = 200


class Refusal(StrEnum):
    """Reason for a refusal."""

    NO_TOKEN = "no-token"  # noqa: S105  # not a password
    WRONG_ROLE = "wrong-role"
    THROTTLED = "throttled"
    WRONG_LOGIN = "wrong-login"
    FOREIGN_HOST = "foreign-host"
    FOREIGN_ORIGIN = "foreign-origin"
    BODY_TOO_LARGE = "body-too-large"


def discard_event(event: str, fields: Mapping[str, object]) -> None:  # signature of `LogEvent`
    """Log nothing."""


class Refusals:
    """Counts refusals by reason, and logs one per minute for each reason and client.

    A flood of bad requests must not flood the log too.
    """

    def __init__(
        self, log: LogEvent = discard_event, *, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._log = log
        self._monotonic_ns = monotonic_ns
        self._logged: OrderedDict[tuple[Refusal, str], tuple[int, int]] = OrderedDict()
        self.counts: Counter[Refusal] = Counter()
        """Refusals by reason, since the start."""

    def record(self, reason: Refusal, *, client: str, **fields: object) -> None:
        """Count one refusal, and log it unless it was logged within the last minute.

        Args:
            client: Key of the client (`client_key`).
            fields: Further fields of the log line, such as method, path, status and the id of a
                token. Never a secret.
        """
        self.counts[reason] += 1
        key = (reason, client)
        now_ns = self._monotonic_ns()
        logged_ns, num_quiet = self._logged.get(key, (None, 0))
        if logged_ns is not None and now_ns - logged_ns < QUIET_NS:
            self._logged[key] = (logged_ns, num_quiet + 1)
            return
        self._logged[key] = (now_ns, 0)
        self._logged.move_to_end(key)
        while len(self._logged) > MAX_LOGGED:
            self._logged.popitem(last=False)
        short = {
            name: value[:MAX_PATH_LETTERS] if isinstance(value, str) else value
            for name, value in fields.items()
        }
        more = {"more_since_last": num_quiet} if num_quiet else {}
        self._log("refused", {"reason": str(reason), "visitor": client, **short, **more})
