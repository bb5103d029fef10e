"""The changes that docs/extending.md shows work to the letter, each in a copy of the checkout.

Every run of the tests applies all of them, and tries the first one as a whole.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.lint.test_documents import tracked
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = re.compile(r"^```(python|sql|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HUNK = re.compile(r"^@@.*\n", re.MULTILINE)
BUILT = ("tracer/native", "analysis/replay")
"""Folders of the extension modules that this checkout built."""

LINKED = ROOT / "src" / "rankscope"
"""Folder of links to the packages; ruff checks these there."""


class Block(NamedTuple):
    """One file of a change."""

    path: str
    kind: str
    text: str


def blocks(section: str) -> list[Block]:
    """Return the blocks of a section that name a file: a whole new one, or a diff."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    named = []
    for kind, block in BLOCK.findall(body):
        first, _, rest = block.partition("\n")
        if kind == "diff":
            named.append(Block(first.removeprefix("--- a/"), kind, rest))
        else:
            named.append(Block(first.lstrip("#- "), kind, rest))
    return named


def patched(text: str, diff: str) -> str:
    """Return a file with the hunks of a diff applied, where their old lines are."""
    for hunk in HUNK.split(diff)[1:]:
        lines = [line or " " for line in hunk.splitlines()]
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert text.count(old) == 1, f"not once in the file:\n{old}"
        text = text.replace(old, new)
    return text


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of this checkout, with its extension modules."""
    built = [path.relative_to(ROOT).as_posix() for at in BUILT for path in (ROOT / at).glob("*.so")]
    links = [path.relative_to(ROOT).as_posix() for path in LINKED.iterdir() if path.is_symlink()]
    for name in (*tracked(), *built, *links):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return tmp_path


CAUSE, COLUMN, PAGE = "A new cause", "A new span column", "A new page of the dashboard"


@pytest.mark.parametrize("section", [CAUSE, COLUMN, PAGE])
def test_a_change_of_the_page_fits_the_files_of_this_checkout(section: str) -> None:
    changed = blocks(section)

    for path, kind, text in changed:
        is_there = (ROOT / path).is_file()
        assert is_there == (kind == "diff"), path
        after = patched((ROOT / path).read_text(encoding="utf-8"), text) if is_there else text
        if path.endswith(".py"):
            compile(after, path, "exec")
    assert len(changed) > sum(path.startswith("tests/") for path, *_ in changed) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("section", "tests"),
    [
        (CAUSE, ["tests/analysis/causes/test_order.py"]),
        (COLUMN, ["tests/analysis/trace", "tests/collector/wire"]),
        (PAGE, ["tests/dashboard/test_app.py"]),
    ],
)
def test_a_change_of_the_page_passes_its_test_and_the_lint(
    checkout: Path, section: str, tests: list[str]
) -> None:
    changed = blocks(section)
    for path, kind, text in changed:
        target = checkout / path
        target.parent.mkdir(parents=True, exist_ok=True)
        before = target.read_text(encoding="utf-8") if kind == "diff" else ""
        target.write_text(patched(before, text) if kind == "diff" else text, encoding="utf-8")
    own = [path for path, *_ in changed if path.startswith("tests/")]
    sources = [
        f"src/rankscope/{path}" if (LINKED / path.split("/")[0]).is_symlink() else path
        for path, *_ in changed
        if path.endswith(".py")
    ]
    environ = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'src'}"}

    for command in (
        ["ruff", "check", *sources],
        ["ruff", "format", "--check", *sources],
        ["pytest", "-q", "-p", "no:cacheprovider", *own, *tests, "tests/lint/test_documents.py"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=checkout, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
