"""Allowed statements, and the canonical form in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.gateway.allowlist import allowed_functions, may_name, may_read
from rankscope.collector.gateway.statement import escaped

if TYPE_CHECKING:
    from tests.collector.gateway.conftest import Ask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "answer"),
    [
        ("SELECT host FROM clock", b"node-1\n"),
        ("select host from default.clock format CSV", b'"node-1"\n'),
        ("SELECT host FROM clock FINAL WHERE at_ns > 0;", b"node-1\n"),
        ("WITH t AS (SELECT host FROM clock) SELECT * FROM t", b"node-1\n"),
        ("(SELECT 1)", b"1\n"),
        ("-- who\nSELECT /* what */ 'a -- b'", b"a -- b\n"),
        ("SELECT 'file(''x'') function_name: file'", b"file(\\'x\\') function_name: file\n"),
        ("SELECT 1 AS `Excess time, ms: (x)`", b"1\n"),
        ("SELECT countIf(number > 1), quantileIf(0.5)(number, 1) FROM numbers(4)", b"2\t1.5\n"),
        ("SELECT COUNT(*), Max(number) FROM numbers(4)", b"4\t3\n"),
        ("SELECT toStartOfMinute(toDateTime(60, 'UTC')) AS t", b"1970-01-01 00:01:00\n"),
        ("SELECT row_number() OVER (ORDER BY number DESC) FROM numbers(2)", b"1\n2\n"),
        ("DESCRIBE TABLE schema_version", b"version\tUInt32\t\t\tNumber of the migration\t\t\n"),
        ("SHOW DATABASES LIKE 'def%'", b"default\n"),
        ("SHOW TABLES LIKE 'clock'", b"clock\n"),
        ("SELECT name FROM system.tables WHERE name = 'spans'", b"spans\n"),
    ],
)
def test_a_plain_read_is_answered(ask: Ask, statement: str, answer: bytes) -> None:
    assert ask(statement).startswith(answer)


def test_bound_values_are_not_changed(ask: Ask) -> None:
    text = "it's\ta \\ 'quoted'\nline; DROP TABLE clock -- "

    assert ask("SELECT {a:String} FORMAT TSVRaw", a=escaped(text)).decode() == text + "\n"
    assert ask("SELECT {a:Array(String)}[1]", a="['it\\'s','b']") == b"it\\'s\n"
    assert ask("SELECT host FROM clock WHERE host = {h:String}", h="' OR 1 = 1 --") == b""


def test_a_function_is_allowed_in_all_spellings_or_in_none() -> None:
    def row(name: str, *, category: str = "", alias_to: str = "", is_aggregate: int = 0) -> object:
        return {
            "name": name,
            "categories": category,
            "alias_to": alias_to,
            "is_aggregate": is_aggregate,
        }

    rows = [
        row("plus", category="Arithmetic"),
        row("ADD", alias_to="plus"),
        row("file", category="Other"),
        row("READ", alias_to="file"),
        row("url", category="Arithmetic"),
        row("URL", category="Other"),
        row("sum", category="Aggregate Functions", is_aggregate=1),
        row("new", category="Of the future"),
    ]
    found = allowed_functions(rows, combinators=["If", "Array"])  # type: ignore[arg-type]

    assert all(map(found.allows, ("plus", "PLUS", "add", "sum", "sumIf", "sumArrayIf")))
    assert not any(map(found.allows, ("file", "FILE", "read", "url", "new", "plusIf", "If", "")))


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("spans", True),
        ("default.spans", True),
        ("system.tables", True),
        ("system.users", False),
        ("SYSTEM.tables", False),
        ("other.spans", False),
        ("information_schema.tables", False),
    ],
)
def test_only_the_stores_tables_and_listed_system_tables_are_allowed(
    name: str, *, is_allowed: bool
) -> None:
    assert may_read(name) is is_allowed


def test_a_column_may_not_have_the_name_of_a_system_table() -> None:
    assert may_name("t.name")
    assert may_name("system.tables.name")
    assert not may_name("system.users")
    assert not may_name("system")
    assert not may_name("INFORMATION_SCHEMA.TABLES")
