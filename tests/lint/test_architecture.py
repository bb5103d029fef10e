"""docs/architecture.md names every room, and only files that exist."""

from __future__ import annotations

import re
import tomllib

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?P<left>.+?) \| (?P<right>.*?) \|$", re.MULTILINE)
PATH = re.compile(r"`([\w/]+(?:\.\w+|/))`")
MOST_MODULES = 40
FEWEST_QUESTIONS = 30


def section(title: str) -> str:
    """Return the text of a section with its subsections."""
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[tuple[str, str]]:
    """Return the rows of the tables in a text, without their heads."""
    found = [(match["left"], match["right"]) for match in ROW.finditer(text)]
    return [row for row in found if row[0] not in {"---", "room", "module", "what"}]


def test_each_question_has_one_existing_answer() -> None:
    answers = {what: where for what, where in rows(section("Where is ...?")) if where}

    assert len(answers) >= FEWEST_QUESTIONS
    assert [where for where in answers.values() if not PATH.fullmatch(where)] == []
    assert [where for where in answers.values() if not (ROOT / where.strip("`")).exists()] == []


def test_a_span_passes_at_most_forty_modules() -> None:
    modules = [left.strip("`") for left, _ in rows(section("The life of a span"))]

    assert len(modules) == len(set(modules)) <= MOST_MODULES
    assert [module for module in modules if not (ROOT / module).is_file()] == []


def test_the_rooms_are_those_of_the_import_contracts_in_the_same_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    rooms = section("The rooms")
    for contract in contracts["contracts"]:
        if not contract.get("exhaustive"):
            continue
        package = contract["containers"][0].removeprefix("rankscope").strip(".")
        wanted = [
            {_place(package, name.strip()) for name in layer.split("|")} - {None}
            for layer in contract["layers"]
        ]
        titles = rooms.split(f"\n### {package}\n")[1] if package else rooms
        table = titles.split("\n### ")[0]
        named = [{path.rstrip("/") for path in PATH.findall(left)} for left, _ in rows(table)]

        assert named == [layer for layer in wanted if layer]


def _place(package: str, name: str) -> str | None:
    """Return the path of a layer; None for the entry point of the command."""
    if (package, name) == ("", "__main__"):
        return None
    folders = [ROOT / package] if package else [ROOT, ROOT / "src" / "rankscope"]
    paths = [path for folder in folders for path in (folder / name, folder / f"{name}.py")]
    return next(path.relative_to(ROOT).as_posix() for path in paths if path.exists())
