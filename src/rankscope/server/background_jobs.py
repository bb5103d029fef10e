"""Results that take long are made aside, each once however many visitors ask for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

NUM_AT_ONCE = 2
"""Results that are made at a time: an analysis holds millions of spans."""

RETRY_NS = 30_000_000_000
"""A failure stands for so long before the next visitor has it tried again."""


@dataclass(frozen=True, slots=True)
class _Asked:
    future: Future[Any]
    asked_ns: int


class Aside:
    """Makes results in threads of its own.

    What is finished is handed to those who wait and forgotten: keeping it is the maker's. A
    failure is kept for `RETRY_NS`.

    Args:
        num_at_once: Results that are made at a time; others wait for their turn.
        monotonic_ns: Clock of how long ago something was asked for.
    """

    def __init__(
        self,
        *,
        num_at_once: int = NUM_AT_ONCE,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._turn = threading.Semaphore(num_at_once)
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._asked: dict[Hashable, _Asked] = {}

    def ask(
        self, key: Hashable, make: Callable[[], Any], *, patience_s: float
    ) -> Future[Any] | None:
        """Have ``make`` called, unless that is under way; return what is finished in time.

        Args:
            key: The same for the same result.
            make: Makes the result; it may be called in any thread.
            patience_s: How long to wait for it.

        Returns:
            The finished result, or the failure; None while it is being made.
        """
        future = self._future(key, make)
        wait([future], timeout=patience_s)
        return future if future.done() else None

    def has_begun(self, key: Hashable) -> bool:
        """Tell whether its turn has come."""
        with self._lock:
            asked = self._asked.get(key)
        return asked is not None and asked.future.running()

    def age_ns(self, key: Hashable) -> int:
        """Return how long ago it was asked for; 0 where it is not under way."""
        with self._lock:
            asked = self._asked.get(key)
        return 0 if asked is None else self._monotonic_ns() - asked.asked_ns

    def _future(self, key: Hashable, make: Callable[[], Any]) -> Future[Any]:
        now_ns = self._monotonic_ns()
        with self._lock:
            asked = self._asked.get(key)
            stands = asked is not None and not (
                asked.future.done() and now_ns - asked.asked_ns >= RETRY_NS
            )
            if asked is not None and stands:
                return asked.future
            future: Future[Any] = Future()
            self._asked[key] = _Asked(future, now_ns)
        # Daemons: a server that is told to end does not wait for an analysis.
        threading.Thread(
            target=self._make, args=(key, make, future), name="aside", daemon=True
        ).start()
        return future

    def _make(self, key: Hashable, make: Callable[[], Any], future: Future[Any]) -> None:
        with self._turn:
            future.set_running_or_notify_cancel()
            try:
                made = make()
            except Exception as error:  # noqa: BLE001  # it is raised where the result is asked for
                with self._lock:
                    self._asked[key] = _Asked(future, self._monotonic_ns())
                future.set_exception(error)
                return
        with self._lock:
            del self._asked[key]
        future.set_result(made)
