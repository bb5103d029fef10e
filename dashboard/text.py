"""Escaping of text from outside, for pages and for plotly."""

from __future__ import annotations

import unicodedata

from rankscope.analysis.report.text import MIN_AXIS_S
from rankscope.tracer.span import NS_PER_MS, NS_PER_S

_MAX_CHARS = 256
_ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def escape(text: str) -> str:
    r"""Return the text on one line, with invisible characters written as ``\u{...}``.

    Control, zero-width and direction characters could otherwise reorder, hide or break the text
    around a run's or a span's name. A long text is cut.
    """
    return "".join(_escape_char(char) for char in cut(text, _MAX_CHARS))


def cut(text: str, max_chars: int) -> str:
    """Return the text, with an ellipsis in place of what is beyond so many characters."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def cut_middle(text: str, max_chars: int) -> str:
    """Return the text, with an ellipsis for its middle if it is longer: names differ at the end."""
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars // 2]}…{text[max_chars // 2 + 1 - max_chars :]}"


def escape_for_plotly(text: str) -> str:
    """Return the escaped text for plotly's labels, which interpret some HTML."""
    escaped = escape(text)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _escape_char(char: str) -> str:
    if unicodedata.category(char) in _ESCAPED_CATEGORIES:
        return f"\\u{{{ord(char):x}}}"
    return char


def format_place(at_ns: int) -> str:
    """Return a time since the step's first span, to the microsecond: "12.345 ms", "6.012345 s"."""
    if at_ns >= MIN_AXIS_S * NS_PER_S:
        return f"{at_ns / NS_PER_S:,.6f} s"
    return f"{at_ns / NS_PER_MS:,.3f} ms"
