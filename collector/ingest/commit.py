"""Group commit: one insert for the rows of many requests.

While an insert is in progress, the next requests queue and go into the next one, so inserts grow
with the load. A request is acknowledged after its insert, never before.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ..errors import StoreQueryError, WireError
from .backoff import SHUTDOWN_RETRY_S, TOO_MANY_PARTS, BusyError, is_row_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .backoff import StoreBackoff

Payload = TypeVar("Payload")
Result = TypeVar("Result")

MAX_ROWS = 81_920
"""Rows of one insert, exceeded by its last request only. An insert holds its rows several times (as
received, as the engine's blocks, sorted, compressed), some 1.1 KB a span: 262,144 took 280 MB,
131,072 took 180, 65,536 took 75."""

MAX_REQUESTS = 1_024
"""Requests of one insert."""

MIN_INTERVAL_S = 0.25
MAX_INTERVAL_S = 2.0
"""Longest interval while the engine reports too many parts."""

BURST = 4
"""Inserts that an idle table takes without an interval: an agent that starts sends a few
descriptions one after the other."""

CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Request(Generic[Payload, Result]):
    payload: Payload
    num_rows: int
    done: Future[Result] = field(default_factory=Future)


@dataclass(slots=True)
class _Queue(Generic[Payload, Result]):
    """Requests that wait for an insert into one table. All times are monotonic seconds."""

    table: str
    requests: list[_Request[Payload, Result]] = field(default_factory=list)
    num_rows: int = 0
    idle_s: float = 0.0
    """Time at which the table takes `BURST` inserts at once again."""

    def is_full(self) -> bool:
        """Return whether the requests fill an insert."""
        return self.num_rows >= MAX_ROWS or len(self.requests) >= MAX_REQUESTS

    def take(self) -> list[_Request[Payload, Result]]:
        """Remove and return the requests of the next insert."""
        num_rows = num_requests = 0
        while num_requests < min(len(self.requests), MAX_REQUESTS) and num_rows < MAX_ROWS:
            num_rows += self.requests[num_requests].num_rows
            num_requests += 1
        taken, self.requests = self.requests[:num_requests], self.requests[num_requests:]
        self.num_rows -= num_rows
        return taken


class GroupCommit(Generic[Payload, Result]):
    """A thread that stores submitted requests, in groups of one table each.

    A table has one insert per interval, after a burst: with an insert for each of thousands of
    small requests it would have more parts than the engine can merge. A full insert begins at once
    and takes no part of the interval, and a single sender of few requests does not wait.

    The interval grows fourfold each time that the engine reports too many parts, and is halved by
    each insert that succeeds.

    Args:
        write: Stores the requests of a group and returns a result for each; all or nothing.
    """

    def __init__(
        self,
        write: Callable[[str, Sequence[Payload]], Sequence[Result]],
        *,
        backoff: StoreBackoff,
        min_interval_s: float = MIN_INTERVAL_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._min_interval_s = min_interval_s
        self.interval_s = min_interval_s
        self._backoff = backoff
        self._monotonic_s = monotonic_s
        self._queues: dict[str, _Queue[Payload, Result]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)
        self.num_inserts: Counter[str] = Counter()
        """Inserts by table."""

    @property
    def is_running(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, table: str, payload: Payload, *, num_rows: int) -> Future[Result]:
        """Queue a request.

        Returns:
            The request's result once its rows are stored, or a `BusyError` or `WireError`.

        Raises:
            BusyError: The collector is shutting down.
        """
        request: _Request[Payload, Result] = _Request(payload, num_rows)
        with self._changed:
            if self._is_closed:
                raise BusyError("the collector is shutting down", retry_after_s=SHUTDOWN_RETRY_S)
            queue = self._queues.setdefault(table, _Queue(table))
            queue.requests.append(request)
            queue.num_rows += num_rows
            self._changed.notify()
        return request.done

    def close(self) -> None:
        """Store the queued requests without pauses, and stop the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            self._commit(*group)

    def _next_group(self) -> tuple[str, list[_Request[Payload, Result]]] | None:
        """Wait for the table whose insert may begin first; None if closed and nothing waits."""
        with self._changed:
            while True:
                waiting = [queue for queue in self._queues.values() if queue.requests]
                if waiting:
                    queue = min(waiting, key=self._start_s)
                    now_s = self._monotonic_s()
                    wait_s = self._start_s(queue) - now_s
                    if wait_s <= 0 or self._is_closed:
                        share = max(0.0, 1 - queue.num_rows / MAX_ROWS)
                        queue.idle_s = max(queue.idle_s, now_s) + share * self.interval_s
                        return queue.table, queue.take()
                    self._changed.wait(wait_s)
                elif self._is_closed:
                    return None
                else:
                    self._changed.wait()

    def _start_s(self, queue: _Queue[Payload, Result]) -> float:
        """Return the time from which on the next insert of a table may begin."""
        return 0.0 if queue.is_full() else queue.idle_s - (BURST - 1) * self.interval_s

    def _commit(self, table: str, group: list[_Request[Payload, Result]]) -> None:
        try:
            results = self._write(table, [request.payload for request in group])
        except Exception as error:  # noqa: BLE001  # any failure is answered; the thread goes on
            self._fail(table, group, error)
            return
        self._backoff.succeeded()
        self.interval_s = max(self._min_interval_s, self.interval_s / 2)
        self.num_inserts[table] += 1
        for request, result in zip(group, results, strict=True):
            request.done.set_result(result)

    def _fail(self, table: str, group: list[_Request[Payload, Result]], error: Exception) -> None:
        """Answer the requests of a failed insert; no answer says that anything was stored.

        If the rows are at fault, each request is tried alone, so that one request's rows fail
        no other.
        """
        if isinstance(error, StoreQueryError) and error.code == TOO_MANY_PARTS:
            self.interval_s = min(MAX_INTERVAL_S, 4 * self.interval_s)
        if not is_row_error(error):
            busy = self._backoff.failed(error)
            for request in group:
                request.done.set_exception(BusyError(busy.reason, retry_after_s=busy.retry_after_s))
        elif len(group) == 1:
            group[0].done.set_exception(WireError(422, f"the store rejects the rows: {error}"))
        else:
            for request in group:
                self._commit(table, [request])
