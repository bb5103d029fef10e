from __future__ import annotations

from tests.lint.retired_words import Words, uses_in_python, uses_in_text

TABLE = {
    "words": {"told": "declared"},
    "identifiers": {"sheet": "table"},
    "docstring_starts": {"what": "name the thing"},
    "phrases": {"by hand": "manual"},
}

MODULE = '''"""What a sheet is."""

TOLD_RANKS = 3  # counted by hand
"""A toldword, and a sheet of paper."""


def read_sheet(rank: int) -> str:
    return f"rank {rank} told it"
'''


def test_words_are_found_in_identifiers_comments_docstrings_and_messages() -> None:
    uses = sorted((use.line, use.word) for use in uses_in_python("m.py", MODULE, Words(TABLE)))

    assert uses == [
        (1, "docstring begins with 'What'"),
        (3, "by hand"),
        (3, "told (in TOLD_RANKS)"),
        (7, "sheet (in read_sheet)"),
        (8, "told"),
    ]


def test_a_document_is_searched_line_by_line_without_words_in_backticks() -> None:
    text = "The layout is told.\n`told` is a key.\nMade by hand.\n"

    uses = [(use.line, use.word, use.plain) for use in uses_in_text("d.md", text, Words(TABLE))]

    assert uses == [(1, "told", "declared"), (3, "by hand", "manual")]


def test_the_words_that_the_glossary_advises_against_are_not_uses() -> None:
    text = "| `declared` | said of a layout | told |\n| `table` | told of rows | |\nIt is told.\n"

    found = uses_in_text("docs/glossary.md", text, Words(TABLE))

    assert [(use.line, use.word) for use in found] == [(2, "told"), (3, "told")]
