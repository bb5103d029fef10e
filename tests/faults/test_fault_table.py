"""Check of the table in `docs/faults.md`, which names the tests of each fault."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import TESTS

if TYPE_CHECKING:
    from pathlib import Path

TABLE = TESTS.parent / "docs" / "faults.md"
NUM_ROWS = {"B": 21, "C": 9, "D": 9, "E": 22}
NUM_CELLS = 5
ROW = re.compile(r"^\| (?P<row>[A-E][0-9]+) \|(?P<rest>.*)\|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
NEVER_RUN = {"skip", "xfail"}


@cache
def functions_of(path: Path) -> dict[str, set[str]]:
    """Return the functions of a file with their marks; none if there is no file."""
    if not path.is_file():
        return {}
    return {
        node.name: {
            part.attr
            for decorator in node.decorator_list
            for part in ast.walk(decorator)
            if isinstance(part, ast.Attribute)
        }
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def problems_of(page: str, tests: Path = TESTS) -> list[str]:
    """Return the problems of a page of faults, one line each.

    Args:
        page: Text of the page.
        tests: Root folder of the tests that it names.
    """
    wanted = [f"{group}{number + 1}" for group, most in NUM_ROWS.items() for number in range(most)]
    found = [match["row"] for match in ROW.finditer(page)]
    problems = [f"{row} is missing" for row in wanted if row not in found]
    problems += [f"{row} is there twice" for row in set(found) if found.count(row) > 1]
    problems += [f"{row} is no fault" for row in found if row not in wanted]
    for match in ROW.finditer(page):
        cells = [cell.strip() for cell in match["rest"].split("|")]
        if len(cells) != NUM_CELLS - 1 or not all(cells):
            problems.append(f"{match['row']} has an empty cell, or not {NUM_CELLS}")
            continue
        named = NAMED.findall(cells[2])
        if NAMED.sub("", cells[2]).replace(",", "").strip() or not named:
            problems.append(f"{match['row']} names tests in another form")
        for file, function in named:
            marks = functions_of(tests / file).get(function)
            if marks is None or not function.startswith("test_"):
                problems.append(f"{match['row']}: {file} has no test {function}")
            elif marks & NEVER_RUN:
                problems.append(f"{match['row']}: {function} is never run")
    return problems


def test_every_fault_is_in_the_table_and_its_tests_exist() -> None:
    assert problems_of(TABLE.read_text(encoding="utf-8")) == []


SAMPLE = """
def test_fine(): ...
@pytest.mark.skip(reason="some day")
def test_never_run(): ...
def fine(): ...
"""
GOOD = "".join(
    f"| {group}{number + 1} | a | b | `own/test_it.py::test_fine` | — |\n"
    for group, most in NUM_ROWS.items()
    for number in range(most)
)


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "test_it.py").write_text(SAMPLE)
    return tmp_path


def test_a_correct_table_has_no_problem(tests: Path) -> None:
    assert problems_of(GOOD, tests) == []


@pytest.mark.parametrize(
    ("right", "wrong", "problems"),
    [
        ("| B7 |", "| B70 |", ["B7 is missing", "B70 is no fault"]),
        ("| B2 |", "| B1 |", ["B2 is missing", "B1 is there twice"]),
        ("| a |", "| |", ["B1 has an empty cell, or not 5"]),
        ("test_fine", "test_gone", ["B1: own/test_it.py has no test test_gone"]),
        ("own/", "other/", ["B1: other/test_it.py has no test test_fine"]),
        ("::", ":", ["B1 names tests in another form"]),
        ("test_fine", "test_never_run", ["B1: test_never_run is never run"]),
        ("test_fine", "fine", ["B1: own/test_it.py has no test fine"]),
    ],
)
def test_a_broken_table_is_reported(
    tests: Path, right: str, wrong: str, problems: list[str]
) -> None:
    assert problems_of(GOOD.replace(right, wrong, 1), tests) == problems
