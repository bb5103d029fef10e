"""Memory of the server while statements run, and the size of a statement's query tree."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.gateway.engine import QueryEngine, QueryRequest
from rankscope.collector.gateway.errors import QueryError
from rankscope.collector.gateway.session import purge_engine
from rankscope.collector.gateway.settings import QueryLimits, resident_bytes
from rankscope.collector.gateway.statement import MAX_NODES

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store
    from tests.collector.gateway.conftest import Ask

pytestmark = pytest.mark.slow

MIB = 1 << 20

GROWING = "SELECT uniqExact(number) FROM numbers(100000000000)"
"""Takes more memory the longer it runs, within the limit of a statement at first."""


def test_a_statement_is_ended_while_the_server_uses_too_much_memory(store: Store) -> None:
    # GIVEN an engine whose limit is slightly above what the process uses
    assert store.path is not None
    purge_engine(store.path)
    limits = replace(QueryLimits(), max_resident_bytes=resident_bytes() + 128 * MIB)
    engine = QueryEngine(store.path, limits)

    # WHEN a statement takes more
    with pytest.raises(QueryError, match=r"the server uses more than \d+ MiB") as caught:
        asyncio.run(engine.answer(QueryRequest(text=GROWING)))

    # THEN it is ended, its memory is free for others, and they are answered
    assert (caught.value.code, caught.value.status) == (241, 507)
    purge_engine(store.path)
    answer = asyncio.run(engine.answer(QueryRequest(text="SELECT sum(number) FROM numbers(10)")))
    assert bytes(answer.answer.view) == b"45\n"
    engine.close()


@pytest.mark.parametrize(
    "text",
    [
        "SELECT number, count() FROM numbers(1000000000) GROUP BY number FORMAT Null",
        "SELECT count() FROM numbers(1000000000) AS a JOIN numbers(1000000000) AS b USING (number)",
        "SELECT groupArray(number) FROM numbers(1000000000) FORMAT Null",
        "SELECT number FROM numbers(1000000000) ORDER BY cityHash64(number) FORMAT Null",
        "SELECT DISTINCT number FROM numbers(1000000000) FORMAT Null",
        "SELECT sum(number) OVER (ORDER BY number) FROM numbers(1000000000) FORMAT Null",
        "SELECT 1 IN (SELECT number FROM numbers(1000000000))",
    ],
)
def test_statements_of_a_small_server_end_within_their_share_of_its_memory(
    store: Store, text: str
) -> None:
    # GIVEN an engine with the limits of a server that has 1 GiB in all
    assert store.path is not None
    limits = replace(
        QueryLimits.fitting(1024 * MIB), max_resident_bytes=QueryLimits().max_resident_bytes
    )
    engine = QueryEngine(store.path, limits)
    purge_engine(store.path)
    before = peak = resident_bytes()

    # WHEN two statements at once would take tens of them
    async def crowd() -> list[object]:
        nonlocal peak
        asked = asyncio.gather(
            *(engine.answer(QueryRequest(text=text)) for _ in range(2)), return_exceptions=True
        )
        while not asked.done():
            peak = max(peak, resident_bytes())
            await asyncio.sleep(0.01)
        return list(await asked)

    found = asyncio.run(crowd())
    engine.close()

    # THEN both are ended at their own limits, and the server, which takes 170 MiB, would live
    assert [getattr(one, "code", None) for one in found] == [241, 241]
    assert peak - before < 768 * MIB


def test_memory_that_the_engine_keeps_for_reuse_ends_no_statement(store: Store, ask: Ask) -> None:
    # GIVEN an engine that has freed much memory, and whose limit is below what it keeps
    assert store.path is not None
    purge_engine(store.path)
    before = resident_bytes()
    ask("SELECT length(groupArray(number)) FROM numbers(30000000)")
    engine = QueryEngine(store.path, replace(QueryLimits(), max_resident_bytes=before + 64 * MIB))

    # WHEN a statement runs for longer than the pause between two checks
    text = "SELECT max(sipHash64(number)) > 0 FROM numbers(300000000)"
    answer = asyncio.run(engine.answer(QueryRequest(text=text)))

    # THEN it is answered
    assert bytes(answer.answer.view) == b"1\n"
    engine.close()


def test_a_query_tree_has_a_largest_size_and_a_long_list_is_one_node(ask: Ask) -> None:
    listed = ", ".join(map(str, range(5_000)))
    assert ask(f"SELECT number IN ({listed}) FROM numbers(1)") == b"1\n"
    assert ask(f"SELECT {', '.join(['1'] * (MAX_NODES - 10))}").count(b"1") == MAX_NODES - 10

    with pytest.raises(QueryError, match="more than 1000 nodes") as caught:
        ask(f"SELECT {', '.join(['1'] * MAX_NODES)}")
    assert (caught.value.code, caught.value.status) == (36, 400)


FORTY = f"greatest({', '.join(['number'] * 40)})"
"""An expression of 41 nodes."""


@pytest.mark.parametrize(
    "text",
    [
        "WITH {forty} AS a SELECT {a} FROM numbers(1)",
        "WITH {forty} AS `a, b` SELECT {`a, b`} FROM numbers(1)",
        "WITH {forty} AS `a b` SELECT {`a b`} FROM numbers(1)",
        "WITH {forty} AS `a.b` SELECT {`a.b`} FROM numbers(1)",
        "WITH {forty} AS `..` SELECT {`..`} FROM numbers(1)",
        "WITH {forty} AS `a, alias: b` SELECT {`a, alias: b`} FROM numbers(1)",
        "WITH {forty} AS `id: 7` SELECT {`id: 7`} FROM numbers(1)",
        "SELECT {forty} AS number, {number} FROM numbers(1)",
        "WITH x -> {forty} AS concat SELECT {concat(1)} FROM numbers(1)",
        "WITH x -> {forty} AS f SELECT {arrayMap(f, [1])} FROM numbers(1)",
        "WITH (SELECT {forty} FROM numbers(1)) AS a SELECT {a}",
        "WITH a AS (SELECT {forty} FROM numbers(1)) SELECT 1 FROM {a}",
        "WITH a AS (SELECT {forty} FROM numbers(1)) SELECT {1 IN a}",
        "WITH {forty} AS a SELECT (WITH [a, a, a, a, a] AS a SELECT [{a}]) FROM numbers(1)",
        "SELECT 1 FROM numbers(1) ORDER BY {forty} AS a, {a}",
        "SELECT {sum(number) OVER a} FROM numbers(1) WINDOW a AS (PARTITION BY {forty})",
    ],
)
def test_a_name_counts_as_its_expression_at_each_use(ask: Ask, text: str) -> None:
    before, use, after = re.split(r"\{(?!forty)(.*)\}", text.replace("{forty}", FORTY))

    with pytest.raises(QueryError, match="more than 1000 nodes"):
        ask(before + ", ".join([use] * 25) + after)


def test_columns_of_a_subquery_with_an_alias_count_once(ask: Ask) -> None:
    used = " + ".join(["t.number"] * 100)
    text = f"SELECT {used} AS n FROM (SELECT number FROM numbers(4) WHERE {FORTY} = 3) AS t"

    assert ask(text) == b"300\n"


@pytest.mark.parametrize("name", [" a", ",a", ""])
def test_a_name_that_the_count_cannot_see_is_refused(ask: Ask, name: str) -> None:
    with pytest.raises(QueryError, match=r"begins with a space|empty|Syntax|Expected"):
        ask(f"WITH 1 AS `{name}` SELECT `{name}`")


def test_a_tuple_cannot_be_expanded_into_columns(ask: Ask) -> None:
    with pytest.raises(QueryError, match="function untuple cannot be called"):
        ask("SELECT untuple((1, 2))")


def test_a_replacement_of_many_columns_is_refused(ask: Ask) -> None:
    with pytest.raises(QueryError, match="ColumnsReplaceTransformer"):
        ask("SELECT * REPLACE (1 AS rank) FROM ranks AS a JOIN ranks AS b USING (run_id)")
