"""Results that several requests share."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

from cachetools import LRUCache

if TYPE_CHECKING:
    from collections.abc import Callable

Key = TypeVar("Key")
Value = TypeVar("Value")


class SharedResults(Generic[Key, Value]):
    """Results by key. One request computes a result, and those that want it meanwhile wait for it.

    Args:
        max_results: Number of results that are kept: the ones that were asked for last.
        monotonic_ns: Clock for the age of a result.
    """

    def __init__(
        self, *, max_results: int, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._results: LRUCache[Key, tuple[int, Future[Value]]] = LRUCache(max_results)

    def get(
        self, key: Key, compute: Callable[[], Value], *, max_age_ns: int | None = None
    ) -> Value:
        """Return the result of a key, computed ``max_age_ns`` ago at most (None: at any time).

        A failure is raised for all that wait for it, and not kept.
        """
        now_ns = self._monotonic_ns()
        with self._lock:
            begun_ns, future = self._results.get(key, (0, Future[Value]()))
            is_old = max_age_ns is not None and now_ns - begun_ns >= max_age_ns
            is_mine = key not in self._results or (future.done() and is_old)
            if is_mine:
                future = Future()
                self._results[key] = (now_ns, future)
        if is_mine:
            try:
                future.set_result(compute())
            except BaseException as error:  # noqa: BLE001  # raised again by Future.result
                with self._lock:
                    if self._results.get(key) == (now_ns, future):
                        del self._results[key]
                future.set_exception(error)
        return future.result()
