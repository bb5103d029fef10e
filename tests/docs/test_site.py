"""Navigation and files of the site, without building it: `make site` checks links and anchors."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

import rankscope
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

NAVIGATION = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
SECTIONS = ["Start", "Use", "Understand", "Operate", "Reference", "Decisions"]
ON_THE_SITE = re.compile(
    r"(?:[^/]+\.md|LICENSE|docs/.*|notebooks/.*\.ipynb|benchmarks/results/.*|examples.*)"
)
"""What the target `site` of the Makefile copies."""
MAX_PICTURE_BYTES = 64_000


def pages_of(entry: Any) -> Iterator[str]:  # noqa: ANN401 - the type of a document
    """Yield the pages below an entry of the navigation."""
    match entry:
        case str():
            yield entry
        case dict():
            yield from pages_of(list(entry.values()))
        case _:
            for one in entry:
                yield from pages_of(one)


def test_the_navigation_has_each_page_once_and_no_other() -> None:
    # Decisions are in the list of decisions, which tests/lint/test_documents.py compares.
    there = {
        path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    }
    named = list(pages_of(NAVIGATION))

    assert [next(iter(entry)) for entry in NAVIGATION] == SECTIONS
    assert sorted(named) == sorted(there | {"docs/decisions/README.md"})


def test_links_lead_to_files_that_are_on_the_site() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md")]
    outside = {
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not ON_THE_SITE.fullmatch((page.parent / link).resolve().relative_to(ROOT).as_posix())
    }

    assert len(pages) > 100
    assert outside - {("README.md", "docs/decisions/")} == set()


def test_pictures_are_small_and_shown() -> None:
    pictures = {
        path for path in (ROOT / "docs" / "images").rglob("*") if path.suffix in {".png", ".svg"}
    }
    shown = {
        (page.parent / link).resolve()
        for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }

    assert {path.name for path in pictures if path.stat().st_size > MAX_PICTURE_BYTES} == set()
    assert pictures == shown & pictures


def test_the_reference_has_each_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}

    assert set(rankscope.__all__) - {"tracer"} <= named  # its functions are named
