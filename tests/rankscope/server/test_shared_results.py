from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from rankscope.server.shared_results import SharedResults


def test_requests_at_the_same_time_compute_once() -> None:
    results: SharedResults[str, int] = SharedResults(max_results=2)
    numbers, begun, may_end = count(), threading.Event(), threading.Event()

    def compute() -> int:
        begun.set()
        assert may_end.wait(10)
        return next(numbers)

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(results.get, "a", compute) for _ in range(3)]
        assert begun.wait(10)
        may_end.set()
        assert [one.result(10) for one in asked] == [0, 0, 0]


def test_an_old_result_is_computed_again() -> None:
    now = [0]
    results: SharedResults[str, int] = SharedResults(max_results=2, monotonic_ns=lambda: now[0])
    numbers = count()

    def ask(max_age_ns: int | None) -> int:
        return results.get("a", lambda: next(numbers), max_age_ns=max_age_ns)

    assert ask(10) == 0
    now[0] = 9
    assert ask(10) == 0
    now[0] = 10
    assert (ask(20), ask(None), ask(10), ask(10)) == (0, 0, 1, 1)


def test_the_result_that_was_asked_for_longest_ago_is_forgotten() -> None:
    results: SharedResults[str, int] = SharedResults(max_results=2)
    numbers = count()

    found = [results.get(key, lambda: next(numbers)) for key in "abacbab"]

    assert found == [0, 1, 0, 2, 3, 4, 3]


def test_a_failure_is_raised_and_not_kept() -> None:
    results: SharedResults[str, int] = SharedResults(max_results=1)

    def fail() -> int:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        results.get("a", fail)
    assert results.get("a", lambda: 5) == 5
