"""Search of the whole source for SQL that is built from values (fault E5)."""

from __future__ import annotations

import ast
import textwrap
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collector.errors import StoreQueryError
from rankscope.collector.read.runs import read_run
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

PACKAGES = ("analysis", "collector", "dashboard", "rankscope", "trainer")

TAKES_SQL = frozenset(
    {
        "query", "rows", "arrow", "command", "raw_query", "query_df", "query_arrow", "query_np",
        "send_query", "run", "answer",
    }
)  # fmt: skip
"""Methods of stores, clients and engine sessions whose first argument is a statement."""

ALLOWED = {
    # SET cannot bind values: names are from our own tables, values are quoted.
    ("collector/gateway.py", "_session"),
    # CHECK TABLE cannot bind the name of a part; it is the engine's own, and matches PART_NAME.
    ("src/rankscope/server/upkeep.py", "check_part"),
}
"""Places that build a statement on purpose, with the reason."""


PUTS_TOGETHER = frozenset({"format", "format_map", "join", "replace"})


def made_up(node: ast.expr | None, made: set[str]) -> bool:
    """Return whether an expression builds text from other parts than our constants."""
    if isinstance(node, ast.JoinedStr):
        shown = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return not all(isinstance(part, ast.Name) and part.id.isupper() for part in shown)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add | ast.Mod)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in PUTS_TOGETHER
    if isinstance(node, ast.IfExp):
        return made_up(node.body, made) or made_up(node.orelse, made)
    if isinstance(node, ast.NamedExpr):
        return made_up(node.value, made)
    return isinstance(node, ast.Name) and node.id in made


def names_made_up(scope: ast.AST) -> set[str]:
    """Return the variables of a scope with text that was built from values."""
    made: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            made.add(node.target.id)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and made_up(node.value, made):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            made.update(target.id for target in targets if isinstance(target, ast.Name))
    return made


def problems_in(source: str, name: str) -> list[str]:
    """Return the calls with SQL that is built from values, as ``name:line``."""
    found: list[str] = []
    for scope in ast.walk(ast.parse(source)):
        if isinstance(scope, ast.Module):
            nodes = [part for part in scope.body if not is_definition(part)]
        elif isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes = [] if (name, scope.name) in ALLOWED else scope.body
        else:
            continue
        made = names_made_up(scope)
        calls = [inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        found += [f"{name}:{call.lineno}" for call in calls if is_given_sql(call, made)]
    return found


def is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def is_given_sql(call: ast.Call, made: set[str]) -> bool:
    """Return whether a call is a store's and has a statement that is built from values."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in TAKES_SQL):
        return False
    given = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "sql")]
    return any(made_up(value, made) for value in given)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.slow
def test_no_statement_is_built_from_values() -> None:
    assert len(sources()) > 150
    found = [
        problem
        for path in sources()
        for problem in problems_in(path.read_text(), str(path.relative_to(ROOT)))
    ]

    assert sorted(set(found)) == []


@pytest.mark.parametrize(
    "body",
    [
        'store.rows(f"SELECT {column} FROM runs")',
        'store.arrow("SELECT * FROM " + table)',
        'store.command("DROP TABLE %s" % table)',
        'store.rows("SELECT {}".format(column))',
        'client.query(" ".join(["SELECT", column]))',
        'sql = f"SELECT {column}"\n    store.rows(sql)',
        'sql = "SELECT 1"\n    sql += column\n    store.rows(sql)',
        'store.rows(sql=TEXT.replace("$1", column))',
        'store.rows("SELECT 1" if column else f"SELECT {column}")',
        'store.rows(text := f"SELECT {column}")',
    ],
)
def test_the_check_finds_statements_that_are_built_from_values(body: str) -> None:
    source = textwrap.dedent(f"def read(store, client, column, table):\n    {body}\n")

    assert len(problems_in(source, "x.py")) >= 1


def test_the_check_accepts_constants_and_bound_values() -> None:
    source = (
        'def read(store, run):\n    store.rows(SELECT, {"run": run})\n    store.rows("SELECT 1")'
    )

    assert problems_in(textwrap.dedent(source), "x.py") == []


NAUGHTY = [
    "' OR 1 = 1 --", "'; DROP TABLE runs; --", "\\' OR 1 = 1 --", "known' UNION SELECT * FROM runs",
    "{run_id:String}", "%(run_id)s", "known\\", "`known`", '"known"', "known/**/", "0x6b6e6f776e",
    "known\x00", "known\t", "known\n", "$$known$$", "\u02bc OR 1=1",
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.one_of(st.sampled_from(NAUGHTY), st.text(max_size=40)))
def test_a_runs_name_is_matched_exactly(filled: Store, name: str) -> None:
    try:
        found = read_run(filled, name).epochs
    except StoreQueryError:
        assert "\0" in name or not name.isprintable()  # the engine refuses such text
    else:
        assert [row["run_id"] for row in found] == ([name] if name == "known" else [])
    assert [row["run_id"] for row in filled.rows("SELECT run_id FROM runs")] == ["known"]


@pytest.fixture(scope="module")
def filled(store: Store) -> Store:
    store.insert_rows("runs", [{"run_id": "known", "epoch": 0, "revision": 1}])
    return store
