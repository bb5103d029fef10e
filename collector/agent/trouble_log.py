"""Say once why something does not work, and once that it works again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


MAX_REASONS = 8
"""Of one trouble that are told; later ones are not."""


class Troubles:
    """What does not work just now, by name.

    Args:
        say: Tells a line.
        monotonic_s: For how long it lasted.
    """

    def __init__(
        self, say: Callable[[str], None], *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._monotonic_s = monotonic_s
        self._since_s: dict[str, float] = {}
        self._told: dict[str, set[str]] = {}

    def begin(self, name: str, reason: str) -> None:
        """Say why ``name`` does not work, unless that was said since it does not."""
        self._since_s.setdefault(name, self._monotonic_s())
        told = self._told.setdefault(name, set())
        if reason not in told and len(told) < MAX_REASONS:
            told.add(reason)
            self._say(f"{name}: {reason}; data waits in the spool")

    def end(self, name: str) -> None:
        """Say that it works again, if it was said that it does not."""
        self._told.pop(name, None)
        since_s = self._since_s.pop(name, None)
        if since_s is not None:
            self._say(f"{name}: works again after {self._monotonic_s() - since_s:.0f} s")
