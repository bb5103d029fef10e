"""Who has tried too often has to wait: per visitor, and all strangers together."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NS_PER_S = 1_000_000_000
WINDOW_S = 60
TRIES = 10
"""Of one visitor in a window."""

TRIES_OF_STRANGERS = 100
"""Of all who never succeeded, together: whoever has many addresses gains nothing by them."""

MAX_VISITORS = 4096


class Throttle:
    """Counts failed tries; a success clears a visitor and makes him no stranger.

    It spares the server work and the log. Guessing 256 random bits is hopeless without it.

    Args:
        tries: Failures of one visitor in `WINDOW_S`.
        tries_of_strangers: Failures of all strangers; one who once succeeded is not held up
            by them.
        monotonic_ns: Clock of the window.
    """

    def __init__(
        self,
        *,
        tries: int = TRIES,
        tries_of_strangers: int = TRIES_OF_STRANGERS,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._tries = tries
        self._monotonic_ns = monotonic_ns
        self._failures: OrderedDict[str, deque[int]] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._of_strangers: deque[int] = deque(maxlen=tries_of_strangers)

    def wait_s(self, visitor: str) -> int:
        """Return how many whole seconds a visitor has to wait; 0: he may try."""
        wait_ns = self._left_ns(self._failures.get(visitor))
        if visitor not in self._known:
            wait_ns = max(wait_ns, self._left_ns(self._of_strangers))
        return -(-wait_ns // NS_PER_S)

    def failed(self, visitor: str) -> None:
        """Count a failure."""
        now_ns = self._monotonic_ns()
        if visitor not in self._known:
            self._of_strangers.append(now_ns)
        self._failures.setdefault(visitor, deque(maxlen=self._tries)).append(now_ns)
        self._failures.move_to_end(visitor)
        while len(self._failures) > MAX_VISITORS:
            self._failures.popitem(last=False)

    def succeeded(self, visitor: str) -> None:
        """Forget a visitor's failures."""
        self._failures.pop(visitor, None)
        self._known[visitor] = None
        self._known.move_to_end(visitor)
        while len(self._known) > MAX_VISITORS:
            self._known.popitem(last=False)

    def _left_ns(self, failures: deque[int] | None) -> int:
        """Return when the oldest of a full row of failures leaves the window."""
        if failures is None or len(failures) < (failures.maxlen or 0):
            return 0
        return max(0, failures[0] + WINDOW_S * NS_PER_S - self._monotonic_ns())
