"""Check for retired words: fails where the project's text uses a word that the field does not.

    python -m tests.lint.retired_words [PATH...]

Prints one line for each use, with the plain word; ends with status 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = Path(__file__).with_suffix(".toml")
SUFFIXES = (".py", ".md", ".c", ".h", ".js", ".css", ".toml", ".yml", ".yaml", ".sql", ".sh")
EXEMPT = (
    "tests/lint/",
    "docs/decisions/0000",
    "benchmarks/results/",
    "tests/collector/golden/",
    "tests/cases/jobs/",
)
GLOSSARY = "docs/glossary.md"
LAST_CELL = re.compile(r"[^|\n]*\|$", re.MULTILINE)
IDENTIFIER_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
FIRST_WORD = re.compile(r"\W*([A-Za-z]+)")


class Use(NamedTuple):
    """One use of a retired word."""

    path: str
    line: int
    word: str
    plain: str


class Words:
    """The table of retired words, compiled for searching."""

    def __init__(self, table: dict[str, dict[str, str]]) -> None:
        """Compile the table that ``retired_words.toml`` holds."""
        self._plain = {**table["words"], **table["phrases"]}
        self._parts = {**table["words"], **table["identifiers"]}
        self.starts = table["docstring_starts"]
        self._prose = re.compile(
            r"(?<![\w`.])(" + "|".join(map(re.escape, self._plain)) + r")(?![\w`])", re.IGNORECASE
        )

    def in_prose(self, text: str) -> Iterator[tuple[int, str, str]]:
        """Yield (line offset, word, plain word) for each retired word of a text."""
        for found in self._prose.finditer(text):
            word = found.group(1).lower()
            yield text.count("\n", 0, found.start()), word, self._plain[word]

    def in_identifier(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield (part, plain word) for each retired part of an identifier."""
        for part in IDENTIFIER_PARTS.findall(name):
            if part.lower() in self._parts:
                yield part.lower(), self._parts[part.lower()]


def uses_in_python(path: str, source: str, words: Words) -> Iterator[Use]:
    """Yield the uses in identifiers, strings, docstrings and comments of a module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        for name in _names(node):
            for part, plain in words.in_identifier(name):
                yield Use(path, line, f"{part} (in {name})", plain)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, word, plain in words.in_prose(node.value):
                yield Use(path, line + offset, word, plain)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from _docstring_start(path, node, words)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            for _, word, plain in words.in_prose(token.string):
                yield Use(path, token.start[0], word, plain)


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers that a node defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.arg(arg=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case _:
            return


def _docstring_start(
    path: str, node: ast.Module | ast.ClassDef | ast.FunctionDef, words: Words
) -> Iterator[Use]:
    text = ast.get_docstring(node)
    first = FIRST_WORD.match(text or "")
    if first and first.group(1).lower() in words.starts:
        word = first.group(1).lower()
        line = node.body[0].lineno
        yield Use(path, line, f"docstring begins with {first.group(1)!r}", words.starts[word])


def uses_in_text(path: str, text: str, words: Words) -> Iterator[Use]:
    """Yield the uses in a document.

    A word in backticks alone is a name and is not checked. In the glossary, the last cell of a row
    lists words not to use and is not checked.
    """
    if path == GLOSSARY:
        text = LAST_CELL.sub("", text)
    for offset, word, plain in words.in_prose(text):
        yield Use(path, 1 + offset, word, plain)


def tracked_files(arguments: list[str]) -> list[str]:
    """Return the files of the checkout that are checked, below ``arguments`` if there are any."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [
        name
        for name in listed
        if name.endswith(SUFFIXES) and not name.startswith(EXEMPT) and (ROOT / name).is_file()
    ]


def main(arguments: list[str]) -> int:
    """Print each use of a retired word; return 1 if there is any."""
    words = Words(tomllib.loads(TABLE.read_text(encoding="utf-8")))
    num_uses = 0
    for name in tracked_files(arguments):
        source = (ROOT / name).read_text(encoding="utf-8")
        find = uses_in_python if name.endswith(".py") else uses_in_text
        for use in sorted(set(find(name, source, words))):
            num_uses += 1
            sys.stdout.write(f"{use.path}:{use.line}: {use.word}: {use.plain}\n")
    return int(num_uses > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
