"""Group commit: one insert for the rows of many requests.

While an insert is in progress, the next requests queue and go into the next one, so inserts grow
with the load. A request is acknowledged after its insert, never before.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
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

MAX_SPAN_ROWS = 81_920
"""Rows of one insert of spans, exceeded by its last request only. An insert holds its rows several
times (as received, as the engine's blocks, sorted, compressed), some 1.1 KB a row: 262,144 took
280 MB, 131,072 took 180, 65,536 took 75."""

MAX_DESCRIPTION_ROWS = 50_000
"""Rows of one insert of descriptions, exceeded by its last request only. The engine prefers inserts
of about this size."""

MAX_REQUESTS = 1_024
"""Requests of one insert."""

MIN_GATHER_S = 0.005
MIN_INTERVAL_S = 0.25
MAX_PAUSE_S = 2.0
"""Longest pause while the engine reports too many parts."""

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
    newest_s: float = 0.0
    """Time of the newest request."""

    idle_s: float = 0.0
    """Time at which the table takes `BURST` inserts at once again."""

    def take(self, max_rows: int) -> list[_Request[Payload, Result]]:
        """Remove and return the requests of the next insert."""
        num_rows = num_requests = 0
        while num_requests < min(len(self.requests), MAX_REQUESTS) and num_rows < max_rows:
            num_rows += self.requests[num_requests].num_rows
            num_requests += 1
        taken, self.requests = self.requests[:num_requests], self.requests[num_requests:]
        self.num_rows -= num_rows
        return taken


class Pacing(ABC):
    """Time at which the next insert into a table may begin.

    The pause grows fourfold each time that the engine reports too many parts, and is halved by
    each insert that succeeds.

    Args:
        min_pause_s: The usual pause.
        max_rows: Rows from which on an insert waits for no pause.
    """

    def __init__(self, *, min_pause_s: float, max_rows: int) -> None:
        self._min_pause_s = min_pause_s
        self.max_rows = max_rows
        self.pause_s = min_pause_s

    def start_s(self, queue: _Queue[Payload, Result], free_s: float) -> float:
        """Return the time from which on an insert may begin.

        Args:
            queue: The table's requests.
            free_s: Time at which the last insert ended.
        """
        if queue.num_rows >= self.max_rows or len(queue.requests) >= MAX_REQUESTS:
            return 0.0
        return self._start_s(queue, free_s)

    def started(self, queue: _Queue[Payload, Result], now_s: float) -> None:
        """Note that an insert begins."""
        queue.idle_s = max(queue.idle_s, now_s) + self.pause_s

    def slow_down(self) -> None:
        """Make inserts fewer and larger."""
        self.pause_s = min(MAX_PAUSE_S, self.pause_s * 4)

    def speed_up(self) -> None:
        """Go back towards the usual pause."""
        self.pause_s = max(self._min_pause_s, self.pause_s / 2)

    @abstractmethod
    def _start_s(self, queue: _Queue[Payload, Result], free_s: float) -> float: ...


class Gathering(Pacing):
    """An insert begins when no request came for the pause: for few, large requests."""

    def __init__(self) -> None:
        super().__init__(min_pause_s=MIN_GATHER_S, max_rows=MAX_SPAN_ROWS)

    def _start_s(self, queue: _Queue[Payload, Result], free_s: float) -> float:
        return max(queue.newest_s, free_s) + self.pause_s


class RateLimit(Pacing):
    """One insert a pause into each table, after a burst: for many small requests.

    Thousands of hosts post some sixty rows a second each. With an insert for each the table would
    have more parts than the engine can merge. A single sender does not wait.
    """

    def __init__(self) -> None:
        super().__init__(min_pause_s=MIN_INTERVAL_S, max_rows=MAX_DESCRIPTION_ROWS)

    def _start_s(self, queue: _Queue[Payload, Result], free_s: float) -> float:
        del free_s
        return queue.idle_s - (BURST - 1) * self.pause_s


class GroupCommit(Generic[Payload, Result]):
    """A thread that stores submitted requests, in groups of one table each.

    Args:
        write: Stores the requests of a group and returns a result for each; all or nothing.
        pacing: When inserts begin.
        backoff: Is informed of failures and successes.
        name: Name of the thread.
        monotonic_s: Clock of the pauses.
    """

    def __init__(
        self,
        write: Callable[[str, Sequence[Payload]], Sequence[Result]],
        pacing: Pacing,
        *,
        backoff: StoreBackoff,
        name: str,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self.pacing = pacing
        self._backoff = backoff
        self._monotonic_s = monotonic_s
        self._queues: dict[str, _Queue[Payload, Result]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.num_inserts = 0

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
            queue.newest_s = self._monotonic_s()
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
            free_s = self._monotonic_s()
            while True:
                waiting = [queue for queue in self._queues.values() if queue.requests]
                if not waiting:
                    if self._is_closed:
                        return None
                    self._changed.wait()
                    continue
                queue = min(waiting, key=lambda one: self.pacing.start_s(one, free_s))
                now_s = self._monotonic_s()
                wait_s = self.pacing.start_s(queue, free_s) - now_s
                if wait_s <= 0 or self._is_closed:
                    self.pacing.started(queue, now_s)
                    return queue.table, queue.take(self.pacing.max_rows)
                self._changed.wait(wait_s)

    def _commit(self, table: str, group: list[_Request[Payload, Result]]) -> None:
        try:
            results = self._write(table, [request.payload for request in group])
        except Exception as error:  # noqa: BLE001  # any failure is answered; the thread goes on
            self._fail(table, group, error)
            return
        self._backoff.succeeded()
        self.pacing.speed_up()
        self.num_inserts += 1
        for request, result in zip(group, results, strict=True):
            request.done.set_result(result)

    def _fail(self, table: str, group: list[_Request[Payload, Result]], error: Exception) -> None:
        """Answer the requests of a failed insert; no answer says that anything was stored.

        If the rows are at fault, each request is tried alone, so that one request's rows fail
        no other.
        """
        if isinstance(error, StoreQueryError) and error.code == TOO_MANY_PARTS:
            self.pacing.slow_down()
        if not is_row_error(error):
            busy = self._backoff.failed(error)
            for request in group:
                request.done.set_exception(BusyError(busy.reason, retry_after_s=busy.retry_after_s))
        elif len(group) == 1:
            group[0].done.set_exception(WireError(422, f"the store rejects the rows: {error}"))
        else:
            for request in group:
                self._commit(table, [request])
