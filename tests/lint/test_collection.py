"""Every test is collected, and the tests mirror the tree."""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING

from tests.support.collected import COLLECTED
from tests.support.paths import ROOT, TESTS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PACKAGES = ("analysis", "collector", "dashboard", "tracer", "trainer")
WITHOUT_PRODUCT_FOLDER = {"browser", "cases", "faults", "integration", "lint", "support"}
"""Folders of tests that run several packages together, or that serve the tests."""

TEST_FILES = sorted(TESTS.rglob("test_*.py"))


def defined_tests(file: Path) -> list[str]:
    """Return the names of the test functions that a file defines."""
    return [
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]


def test_every_test_function_is_collected(request: pytest.FixtureRequest) -> None:
    # GIVEN a session over the whole tree, or over some folders or files of it
    collected = request.config.stash[COLLECTED]
    arguments = [ROOT / argument for argument in request.config.args]
    wanted = {
        file.relative_to(ROOT).as_posix(): set(defined_tests(file))
        for file in TEST_FILES
        if any(file.is_relative_to(argument) for argument in arguments)
    }

    missing = {
        f"{file}::{name}"
        for file, names in wanted.items()
        for name in names - collected.get(file, set())
    }

    assert missing == set()
    assert {file for file, names in wanted.items() if not names} == set()


def test_no_test_hides_another_of_its_name() -> None:
    hidden = [
        f"{file.relative_to(ROOT)}::{name}"
        for file in TEST_FILES
        for name, count in Counter(defined_tests(file)).items()
        if count > 1
    ]

    assert hidden == []


def test_no_test_is_in_a_file_that_pytest_does_not_read() -> None:
    others = [
        f"{file.relative_to(ROOT)}::{name}"
        for file in TESTS.rglob("*.py")
        if not file.name.startswith("test_")
        for name in defined_tests(file)
    ]

    assert others == []


def test_each_folder_of_tests_mirrors_a_folder_of_the_product() -> None:
    strangers = [
        folder.as_posix()
        for folder in {file.parent.relative_to(TESTS) for file in TEST_FILES}
        if folder.parts[0] not in WITHOUT_PRODUCT_FOLDER and not _product_folder(folder).is_dir()
    ]

    assert strangers == []


def test_each_folder_of_the_product_has_tests() -> None:
    folders = [ROOT / "src" / "rankscope", *(ROOT / package for package in PACKAGES)]
    rooms = [
        module.parent
        for folder in folders
        for module in folder.rglob("*.py")
        if module.name != "__init__.py"
    ]

    untested = {room.relative_to(ROOT).as_posix() for room in rooms if not _has_tests(room)}

    assert untested == set()


def _product_folder(folder: Path) -> Path:
    return ROOT / "src" / folder if folder.parts[0] == "rankscope" else ROOT / folder


def _has_tests(room: Path) -> bool:
    folder = room.relative_to(ROOT / "src") if "src" in room.parts else room.relative_to(ROOT)
    return any((TESTS / folder).glob("test_*.py"))
