from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.gateway.engine import QueryEngine, QueryRequest
from rankscope.collector.gateway.errors import QueryError
from rankscope.collector.gateway.settings import (
    CGROUP_LIMITS,
    GIB,
    QueryLimits,
    choose_settings,
    machine_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store
    from tests.collector.gateway.conftest import Ask

pytestmark = pytest.mark.slow

LIMITS = QueryLimits(
    max_seconds=60,
    max_rows=1_000,
    max_result_bytes=100_000,
    max_memory_bytes=200_000_000,
    max_running=1,
    max_waiting=1,
    max_held_bytes=1_000,
)
SLOW = "SELECT max(sipHash64(number)) FROM numbers(1000000000000)"


@pytest.fixture(scope="module")
def small(store: Store) -> Iterator[QueryEngine]:
    assert store.path is not None
    opened = QueryEngine(store.path, LIMITS)
    yield opened
    opened.close()


def ask(engine: QueryEngine, text: str, **settings: str) -> bytes:
    request = QueryRequest(text=text, settings=settings)
    return bytes(asyncio.run(engine.answer(request)).answer.view)


def once_let_go(engine: QueryEngine, text: str) -> bytes:
    deadline = time.monotonic() + 60
    while True:
        try:
            return ask(engine, text)
        except QueryError:
            if time.monotonic() > deadline:
                raise


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("SELECT number FROM numbers(1001)", 396),
        ("SELECT toString(number), repeat(toString(number), 100) FROM numbers(1000)", 396),
        ("SELECT repeat('x', 1000000) FROM numbers(1000)", 396),
        ("SELECT length(groupArray(number)) FROM numbers(100000000)", 241),
        ("SELECT range(number * 100000) FROM numbers(90)", 241),
        ("SELECT " + "(" * 1_100 + "1" + ")" * 1_100, 306),
        ("SELECT " + "1+" * 9_000 + "1", 168),
    ],
)
def test_a_statement_that_costs_too_much_is_ended(small: QueryEngine, text: str, code: int) -> None:
    with pytest.raises(QueryError) as caught:
        ask(small, text)

    assert caught.value.code in {code, 167}
    assert ask(small, "SELECT 1") == b"1\n"


def test_a_statement_that_takes_too_long_is_ended(store: Store) -> None:
    assert store.path is not None
    hasty = QueryEngine(store.path, replace(LIMITS, max_seconds=2))

    with pytest.raises(QueryError) as caught:
        ask(hasty, SLOW)
    hasty.close()
    assert caught.value.code == 159


def test_a_request_may_lower_a_limit_but_not_raise_it(small: QueryEngine) -> None:
    found = choose_settings({"max_result_rows": "10", "max_execution_time": "600"}, LIMITS)
    assert (found["max_result_rows"], found["max_execution_time"]) == (10, 60)
    assert choose_settings({"max_memory_usage": "0"}, LIMITS)["max_memory_usage"] == 200_000_000

    with pytest.raises(QueryError) as caught:
        ask(small, "SELECT number FROM numbers(20)", max_result_rows="10")
    assert caught.value.code == 396
    assert ask(small, "SELECT number FROM numbers(20)", limit="2") == b"0\n1\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_threads", "64"),
        ("max_threads", "0"),
        ("max_execution_time", "-1"),
        ("max_result_rows", "1 OR 1"),
        ("max_result_rows", "9" * 30),
        ("date_time_input_format", "x', readonly = '0"),
        ("allow_introspection_functions", "1"),
        ("format_schema", "/etc/passwd"),
        ("format_template_row", "/etc/passwd"),
        ("custom; DROP", "1"),
        ("max_bytes_before_external_sort", "1"),
    ],
)
def test_a_setting_that_is_not_allowed_is_refused(name: str, value: str) -> None:
    with pytest.raises(QueryError):
        choose_settings({name: value}, LIMITS)


def test_settings_of_the_transport_have_no_effect() -> None:
    sent = {"session_id": "x", "readonly": "0", "wait_end_of_query": "1", "log_comment": "y"}

    assert choose_settings(sent, LIMITS) == LIMITS.settings()


def test_too_many_statements_are_refused_and_an_abandoned_one_is_ended(store: Store) -> None:
    assert store.path is not None
    slow = QueryEngine(store.path, replace(LIMITS, max_seconds=120))

    async def crowd() -> list[int]:
        first = asyncio.create_task(slow.answer(QueryRequest(text=SLOW)))
        second = asyncio.create_task(slow.answer(QueryRequest(text="SELECT 1")))
        await asyncio.sleep(0)
        with pytest.raises(QueryError) as caught:
            await slow.answer(QueryRequest(text="SELECT 1"))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        found = await second
        return [caught.value.status, len(found.answer.view)]

    begun = time.monotonic()
    assert asyncio.run(crowd()) == [503, 2]
    # If the first had run to its limit, the second would have waited for it.
    assert time.monotonic() - begun < 120
    slow.close()


def test_unfetched_results_block_other_statements_until_released(
    small: QueryEngine,
) -> None:
    text = "SELECT repeat('x', 10) FROM numbers(100)"
    held = asyncio.run(small.answer(QueryRequest(text=text)))

    with pytest.raises(QueryError, match="unfetched results"):
        ask(small, "SELECT 1")
    assert len(held.answer.view) == 1_100
    del held
    # The worker thread may still refer to the result for a moment.
    assert once_let_go(small, "SELECT 1") == b"1\n"


def test_unfetched_results_of_others_block_statements_that_have_waited_for_them(
    store: Store,
) -> None:
    assert store.path is not None
    engine = QueryEngine(store.path, replace(LIMITS, max_waiting=3))
    request = QueryRequest(text="SELECT repeat('x', 10) FROM numbers(100)")

    async def crowd() -> list[object]:
        asked = (engine.answer(request) for _ in range(4))
        return list(await asyncio.gather(*asked, return_exceptions=True))

    found = asyncio.run(crowd())
    engine.close()
    refused = [one for one in found if isinstance(one, QueryError)]
    assert [one.status for one in refused] == [503] * 3


@pytest.mark.parametrize("gib", [0.5, 1, 2, 4, 8, 15, 16, 24, 512])
def test_the_limits_fit_the_memory_and_are_at_most_the_usual_ones(gib: float) -> None:
    memory_bytes, most = int(gib * GIB), QueryLimits()
    found = QueryLimits.fitting(memory_bytes)

    assert found.max_running * found.max_memory_bytes <= memory_bytes / 4
    assert found.max_held_bytes <= memory_bytes / 8
    assert found.max_resident_bytes <= memory_bytes * 7 / 8
    assert found.max_memory_bytes <= most.max_memory_bytes
    assert (found == most) == (gib >= 20)


def test_the_memory_is_that_of_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine_bytes()
    for controllers, (_, name) in CGROUP_LIMITS.items():
        monkeypatch.setitem(CGROUP_LIMITS, controllers, (tmp_path, name))
        (tmp_path / name).write_text("max\n")
    assert machine_bytes() >= whole

    for _, name in CGROUP_LIMITS.values():
        (tmp_path / name).write_text(f"{whole // 3}\n")
    assert machine_bytes() == whole // 3


def test_rows_that_are_stored_twice_are_read_once(store: Store, ask: Ask) -> None:
    # GIVEN a sample that was stored twice
    row = {
        "run_id": "", "host": "twice", "device": -1, "at_ns": 1, "name": "cpu-busy-ratio",
        "value": 0.5,
    }  # fmt: skip
    for _ in range(2):
        store.insert_rows("samples", [row])

    # WHEN it is counted through the gateway
    counted = ask("SELECT count() FROM samples WHERE host = 'twice'")

    # THEN the count is one
    assert counted.strip() == b"1"
