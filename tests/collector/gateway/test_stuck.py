from __future__ import annotations

import operator
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.gateway.engine import Workers

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 120.0

ASK = """
import asyncio, os, sys
from dataclasses import replace
import rankscope.collector.gateway.engine as engine
from rankscope.collector.gateway.engine import stuck_threads
from rankscope.collector.gateway.errors import QueryError
from rankscope.collector.gateway.settings import QueryLimits
from rankscope.collector.store.store import open_store

# One block of 65,536 slow rows, which would take about ten minutes.
STUCK = (
    "SELECT sum(damerauLevenshteinDistance(repeat('a', 4000 + number % 2), repeat('b', 4000)))"
    " FROM numbers(65536)"
)
engine.GRACE_S, engine.CLOSE_TIMEOUT_S = 1.0, 0.5

def ask(opened, text, **settings):
    try:
        request = engine.QueryRequest(text=text, settings=settings)
        return bytes(asyncio.run(opened.answer(request)).answer.view).decode().strip()
    except QueryError as error:
        return f"{error.status} {error.code}"

with open_store("chdb://" + sys.argv[1]) as store:
    limits = QueryLimits(max_seconds=3, max_running=1, max_waiting=1)
    opened = engine.QueryEngine(store.path, limits)
    print(ask(opened, "SELECT 1"))
    print(ask(opened, STUCK, max_execution_time="1"))
    print(ask(opened, "SELECT 2"))
    opened.close()
    print("left", stuck_threads(), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_stuck_statement_is_answered_in_time_and_its_thread_is_left(
    tmp_path: Path,
) -> None:
    # WHEN a statement cannot be ended, another waits behind it, and the engine is closed
    ended = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    # THEN the first gets a timeout, the second an error to try again, and close returns in time
    expected = ["1", "408 159", "503 202", "left ['query-0']", ""]
    assert ended.stdout.split("\n") == expected, ended.stderr


def test_workers_run_calls_and_pass_errors_on() -> None:
    workers = Workers(2, name="test")

    def fail() -> None:
        raise ValueError("seven")

    found = [workers.submit(partial(operator.mul, number, 2)) for number in range(10)]
    failed = workers.submit(fail)

    assert [future.result(TIMEOUT_S) for future in found] == list(range(0, 20, 2))
    with pytest.raises(ValueError, match="seven"):
        failed.result(TIMEOUT_S)
    assert workers.close(timeout_s=TIMEOUT_S)
    assert workers.close(timeout_s=TIMEOUT_S)


def test_closed_workers_cancel_queued_calls_and_leave_stuck_ones() -> None:
    workers, may_end = Workers(1, name="test"), threading.Event()
    begun = threading.Event()

    def stay() -> bool:
        begun.set()
        return may_end.wait(TIMEOUT_S)

    stuck = workers.submit(stay)
    assert begun.wait(TIMEOUT_S)
    waits = workers.submit(lambda: 1)

    asked_s = time.monotonic()
    assert not workers.close(timeout_s=0.05)
    assert time.monotonic() - asked_s < TIMEOUT_S
    assert waits.cancelled()
    with pytest.raises(RuntimeError):
        workers.submit(lambda: 1)

    may_end.set()
    assert stuck.result(TIMEOUT_S)
    assert workers.close(timeout_s=TIMEOUT_S)
