"""Links and paths in the documents, and mentions of documents in code, lead somewhere."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
TOP_FOLDERS = (
    "analysis", "benchmarks", "collector", "dashboard", "deploy", "docs", "notebooks", "src",
    "tests", "tracer", "trainer",
)  # fmt: skip
PATH = re.compile(rf"(?:{'|'.join(TOP_FOLDERS)})/[\w./-]*\w/?")
DOCUMENT = re.compile(r"\bdocs/[\w/-]+\.md")
NOT_TRACKED = {"deploy/secrets"}
"""Folders that a command of the documents makes."""
OTHER_PATHS = {"docs/extending.md", "docs/faults.md"}
"""One shows files that a reader would add; `tests/faults/test_fault_table.py` checks the other."""


@cache
def tracked() -> tuple[str, ...]:
    """Return the files of the checkout, as paths below its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


DOCUMENTS = [name for name in tracked() if name.endswith(".md")]


def anchors(target: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them; none for other files."""
    if target.suffix != ".md":
        return set()
    text = FENCE.sub("", target.read_text(encoding="utf-8"))
    titles = (title.lower().replace("`", "") for title in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken_links(name: str) -> list[str]:
    """Return the relative links of a document that lead nowhere."""
    text = (ROOT / name).read_text(encoding="utf-8")
    folder = (ROOT / name).parent
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        path, _, anchor = link.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = folder / path if path else ROOT / name
        wanted = {anchor} - {""}
        if not target.exists() or wanted - anchors(target):
            broken.append(link)
    return broken


def missing_paths(name: str) -> list[str]:
    """Return the paths between backticks that no file or folder of the checkout has."""
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    return [
        path
        for code in CODE.findall(text)
        for path in [code.partition("::")[0].partition(":")[0]]
        if PATH.fullmatch(path)
        and not (ROOT / path).exists()
        and not path.startswith(tuple(NOT_TRACKED))
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_link_of_a_document_resolves(name: str) -> None:
    assert broken_links(name) == []


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in OTHER_PATHS])
def test_each_path_in_a_document_exists(name: str) -> None:
    assert missing_paths(name) == []


def test_each_document_that_code_mentions_exists() -> None:
    suffixes = (".py", ".c", ".h", ".toml", ".sql", ".yml", ".xml", ".conf", ".sh")
    mentioned = {
        (name, document)
        for name in tracked()
        if name.endswith(suffixes)
        for document in DOCUMENT.findall((ROOT / name).read_text(encoding="utf-8"))
    }

    assert {
        (name, document) for name, document in mentioned if not (ROOT / document).is_file()
    } == set()
    assert mentioned
