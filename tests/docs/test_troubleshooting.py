"""Each message of docs/troubleshooting.md is one that the product can print."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from rankscope.tracer.spool import DropReason, drop_name
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PRODUCT = ("tracer", "collector", "analysis", "dashboard", "src/rankscope")
MESSAGES = re.findall(r"^\| `([^`|]+)` \|", PAGE, re.MULTILINE)
REASONS = re.findall(r"^\| dropped: `([^`|]+)` \|", PAGE, re.MULTILINE)
VALUE = "\0"
"""In place of what is filled in when the product runs."""


def text_of(node: ast.expr) -> str:
    """Return the text of an expression, with `VALUE` for what is not written in it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case _:
            return VALUE


@cache
def texts() -> str:
    """Return all texts in the sources of the product, one on each line."""
    paths = sorted(
        path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if path.is_file()
    )
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_bytes())))
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    found = {text_of(node).replace("\n", " ") for node in nodes if isinstance(node, kinds)}
    return "\n".join(sorted(found))


@pytest.mark.parametrize("message", MESSAGES)
def test_the_product_has_this_message(message: str) -> None:
    pieces = [piece for piece in message.split("...") if piece.strip(" ;:")]

    assert re.search(".*".join(re.escape(piece) for piece in pieces), texts())


def test_the_reasons_of_lost_records_exist() -> None:
    assert REASONS
    assert set(REASONS) <= {drop_name(reason) for reason in DropReason}


def test_the_page_has_messages_of_each_kind() -> None:
    sections = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)

    assert len(sections) >= 7
    assert len(set(MESSAGES)) == len(MESSAGES) >= 35
