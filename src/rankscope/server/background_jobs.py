"""Background jobs: slow results, computed once however many clients request them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cachetools import LRUCache

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

MAX_CONCURRENT = 2
"""Jobs that run at the same time: an analysis holds millions of spans in memory."""

RETRY_NS = 30_000_000_000
"""Time for which a failure is returned before the next request starts the job again."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    requested_ns: int


class BackgroundJobs:
    """Jobs in threads of their own, each with a key.

    A finished result is given to the waiting callers and then forgotten: the job itself may keep
    it. A failure is kept for `RETRY_NS`.

    Args:
        max_concurrent: Number of jobs that run at the same time; others are queued.
        monotonic_ns: Clock for the age of a job.
    """

    def __init__(
        self,
        *,
        max_concurrent: int = MAX_CONCURRENT,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._slots = threading.Semaphore(max_concurrent)
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._jobs: dict[Hashable, _Job] = {}

    def result(
        self, key: Hashable, compute: Callable[[], Any], *, timeout_s: float
    ) -> Future[Any] | None:
        """Return the result of a job, which is started unless it runs already.

        Args:
            key: Key of the job: jobs with the same key have the same result.
            compute: Computes the result, in any thread.
            timeout_s: Longest time to wait for the result.

        Returns:
            The finished result or failure; None if the job is not done in time.
        """
        future = self._future(key, compute)
        wait([future], timeout=timeout_s)
        return future if future.done() else None

    def is_running(self, key: Hashable) -> bool:
        """Return whether the job has left the queue."""
        with self._lock:
            job = self._jobs.get(key)
        return job is not None and job.future.running()

    def age_ns(self, key: Hashable) -> int:
        """Return the time since the job was requested; 0 if there is no such job."""
        with self._lock:
            job = self._jobs.get(key)
        return 0 if job is None else self._monotonic_ns() - job.requested_ns

    def num_unfinished(self) -> int:
        """Return the number of jobs that wait or run."""
        with self._lock:
            return sum(not job.future.done() for job in self._jobs.values())

    def _future(self, key: Hashable, compute: Callable[[], Any]) -> Future[Any]:
        now_ns = self._monotonic_ns()
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and not (
                job.future.done() and now_ns - job.requested_ns >= RETRY_NS
            ):
                return job.future
            future: Future[Any] = Future()
            self._jobs[key] = _Job(future, now_ns)
        # Daemon threads: a server that is stopped does not wait for an analysis.
        threading.Thread(
            target=self._run, args=(key, compute, future), name="background job", daemon=True
        ).start()
        return future

    def _run(self, key: Hashable, compute: Callable[[], Any], future: Future[Any]) -> None:
        with self._slots:
            future.set_running_or_notify_cancel()
            try:
                result = compute()
            except Exception as error:  # noqa: BLE001  # raised again by Future.result
                with self._lock:
                    self._jobs[key] = _Job(future, self._monotonic_ns())
                future.set_exception(error)
                return
        with self._lock:
            del self._jobs[key]
        future.set_result(result)


class KeptResults(Generic[Value]):
    """Results of background jobs, those that were asked for last.

    Args:
        max_results: Number of results that are kept.
    """

    def __init__(self, max_results: int) -> None:
        self._lock = threading.Lock()
        self._results: LRUCache[Hashable, Future[Value]] = LRUCache(max_results)

    def get(
        self,
        key: Hashable,
        compute: Callable[[], Value],
        *,
        jobs: BackgroundJobs,
        timeout_s: float,
        max_unfinished: int | None = None,
    ) -> Future[Value] | None:
        """Return a finished result or failure; None if its job is not done in time.

        Args:
            key: Key of the result.
            compute: Computes it, in any thread.
            jobs: Runs it.
            timeout_s: Longest time to wait for it.
            max_unfinished: Number of unfinished jobs at which none is added.
        """
        with self._lock:
            if key in self._results:
                return self._results[key]
        if max_unfinished is not None and jobs.num_unfinished() >= max_unfinished:
            return None

        def compute_and_keep() -> Value:
            done: Future[Value] = Future()
            done.set_result(compute())
            with self._lock:
                self._results[key] = done
            return done.result()

        return jobs.result(key, compute_and_keep, timeout_s=timeout_s)
