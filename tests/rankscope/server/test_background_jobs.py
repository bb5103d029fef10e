from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from rankscope.server.background_jobs import RETRY_NS, BackgroundJobs, KeptResults
from tests.support.receiver import TIMEOUT_S


class Computation:
    """A computation that waits until it is released, and counts its calls."""

    def __init__(self, *, fails: bool = False) -> None:
        self.is_released = threading.Event()
        self.started = threading.Semaphore(0)
        self.num_calls = 0
        self.fails = fails

    def __call__(self) -> str:
        self.num_calls += 1
        self.started.release()
        assert self.is_released.wait(TIMEOUT_S)
        if self.fails:
            raise ValueError("no such step")
        return "done"


def test_two_clients_that_request_one_result_share_one_job() -> None:
    # GIVEN a result that takes long
    jobs, compute = BackgroundJobs(), Computation()

    # WHEN two clients wait for it
    with ThreadPoolExecutor(2) as clients:
        waiting = [
            clients.submit(jobs.result, "run", compute, timeout_s=TIMEOUT_S) for _ in range(2)
        ]
        assert compute.started.acquire(timeout=TIMEOUT_S)
        compute.is_released.set()
        results = [one.result(TIMEOUT_S) for one in waiting]

    # THEN both get it, from one call
    assert [one.result() for one in results if one is not None] == ["done", "done"]
    assert compute.num_calls == 1


def test_without_a_timeout_the_result_of_a_running_job_is_none() -> None:
    now = [5_000]
    jobs, compute = BackgroundJobs(monotonic_ns=lambda: now[0]), Computation()

    assert jobs.result("run", compute, timeout_s=0) is None
    assert compute.started.acquire(timeout=TIMEOUT_S)
    now[0] += 700

    assert jobs.is_running("run")
    assert jobs.age_ns("run") == 700
    compute.is_released.set()
    done = jobs.result("run", compute, timeout_s=TIMEOUT_S)
    assert done is not None
    assert done.result() == "done"


def test_jobs_beyond_the_limit_are_queued() -> None:
    jobs, first, second = BackgroundJobs(max_concurrent=1), Computation(), Computation()

    assert jobs.result("first", first, timeout_s=0) is None
    assert first.started.acquire(timeout=TIMEOUT_S)
    assert jobs.result("second", second, timeout_s=0) is None
    assert not jobs.is_running("second")

    first.is_released.set()
    second.is_released.set()
    done = jobs.result("second", second, timeout_s=TIMEOUT_S)
    assert done is not None
    assert done.result() == "done"


def test_a_failed_job_is_retried_after_half_a_minute() -> None:
    # GIVEN a job that fails
    now = [0]
    jobs, compute = BackgroundJobs(monotonic_ns=lambda: now[0]), Computation(fails=True)
    compute.is_released.set()

    # WHEN its result is requested three times
    for at_ns in (0, RETRY_NS - 1, RETRY_NS):
        now[0] = at_ns
        done = jobs.result("run", compute, timeout_s=TIMEOUT_S)

        # THEN each request gets the failure
        assert done is not None
        assert str(done.exception()) == "no such step"

    # THEN the job ran twice
    assert compute.num_calls == 2


def test_the_results_that_were_asked_for_last_are_kept_and_failures_are_not() -> None:
    jobs, calls = BackgroundJobs(), []
    results: KeptResults[str] = KeptResults(2)

    def ask(key: str) -> str:
        def compute() -> str:
            calls.append(key)
            if key == "bad":
                raise ValueError(key)
            return key

        done = results.get(key, compute, jobs=jobs, timeout_s=TIMEOUT_S)
        assert done is not None
        return str(done.exception() or done.result())

    assert [ask(key) for key in ("a", "b", "a", "c", "a", "b", "bad")] == [*"abacab", "bad"]
    assert calls == ["a", "b", "c", "b", "bad"]
