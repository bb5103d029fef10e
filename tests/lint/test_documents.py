"""Links, paths and commands in the documents are right, and code mentions documents that exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from typing import TYPE_CHECKING

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from rankscope.analysis.causes.order import CAUSES
from rankscope.commands.app import app
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
    """Return the files of the checkout, as paths below its root; without git, all files there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return tuple(name for name in done.stdout.splitlines() if (ROOT / name).is_file())
    files = [*ROOT.glob("*.*"), *(path for top in TOP_FOLDERS for path in (ROOT / top).rglob("*"))]
    return tuple(path.relative_to(ROOT).as_posix() for path in files if path.is_file())


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


def test_the_index_of_decisions_lists_each_of_them_in_order() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    pages = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))

    assert re.findall(r"^\| \[\d+\]\((.*?)\)", index, re.MULTILINE) == pages


GROUPS = ("token", "alerts", "hosts")
"""Subcommands that have subcommands."""

COMMAND = re.compile(
    rf"\brankscope (?P<name>(?:{'|'.join(GROUPS)}) [a-z]+|[a-z]+)\b(?P<rest>[^\n#]*)"
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
JOB = re.compile(r"\b(?:torchrun|accelerate|python|srun)\b.*")
"""Command of a job, which has flags of its own."""


def known_flags() -> dict[str, set[str]]:
    """Return the flags of each subcommand of `rankscope`."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    subcommands = dict(group.commands)
    for group_name in GROUPS:
        inner = subcommands[group_name]
        assert isinstance(inner, TyperGroup)
        subcommands |= {f"{group_name} {name}": each for name, each in inner.commands.items()}
    return {
        name: {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
        for name, command in subcommands.items()
    }


def shown_commands(text: str) -> list[tuple[str, set[str]]]:
    """Return the subcommands of `rankscope` that a document shows as code, each with its flags."""
    code = [fence.replace("\\\n", " ") for fence in FENCE.findall(text)]
    code += CODE.findall(FENCE.sub("", text))
    found = [match for part in code for match in COMMAND.finditer(part)]
    return [(match["name"], set(FLAG.findall(JOB.sub("", match["rest"])))) for match in found]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_flag_of_a_command_in_a_document_exists(name: str) -> None:
    known = known_flags()
    shown = shown_commands((ROOT / name).read_text(encoding="utf-8"))

    unknown = [(command, flags - known[command]) for command, flags in shown if command in known]

    assert [(command, flags) for command, flags in unknown if flags] == []


def test_the_commands_of_the_readme_are_found() -> None:
    shown = dict(shown_commands((ROOT / "README.md").read_text(encoding="utf-8")))

    assert set(known_flags()) >= {"serve", "agent", "token create"}
    assert shown["token create"] == {"--role", "--holder", "--out"}
    assert {"--spool", "--collector", "--ca"} <= shown["agent"]


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_each_cause_has_a_section_that_says_what_to_do(cause: str) -> None:
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")

    section = text.split(f"\n## {cause}\n", 1)[1].split("\n## ", 1)[0]
    heads = re.findall(r"^\*\*([\w ]+):\*\*", section, re.MULTILINE)
    assert heads == ["Looks like", "Drain", "Confirm", "Do", "Call"]


def section_of_settings(title: str) -> str:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_table_of_environment_variables_has_exactly_those_of_the_code() -> None:
    table = section_of_settings("Environment variables")
    documented = re.findall(r"^\| `(RANKSCOPE_\w+)`", table, re.MULTILINE)
    product = ("tracer/", "collector/", "analysis/", "dashboard/", "trainer/", "src/")
    read = {
        name
        for path in tracked()
        if path.startswith(product) and path.endswith(".py")
        for name in re.findall(r"\bRANKSCOPE_[A-Z_]+\b", (ROOT / path).read_text(encoding="utf-8"))
    }

    assert sorted(documented) == sorted(read)


def test_each_constant_of_the_tables_of_periods_exists() -> None:
    table = section_of_settings("Periods and timeouts")
    named = re.findall(r"`([\w/]+\.py)` `(\w+)` \|$", table, re.MULTILINE)

    assert len(named) >= 20
    for path, name in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:class )?{name}\b", text, re.MULTILINE), f"{path} {name}"
