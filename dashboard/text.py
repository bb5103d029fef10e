"""Escaping of text from outside, for pages and for plotly."""

from __future__ import annotations

import unicodedata

_MAX_NAME = 256
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    """Return the text on one line with control, zero-width and direction marks spelled out.

    A name of a span or run is shown as what it is: it cannot reorder, hide or
    break the words around it.
    """
    cut = text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…"
    return "".join(_spelled(char) for char in cut)


def plotly_text(text: str) -> str:
    """Return the text inert in plotly's labels, which read a little HTML of their own."""
    shown = visible(text)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _spelled(char: str) -> str:
    if unicodedata.category(char) in _UNSEEN:
        return f"\\u{{{ord(char):x}}}"
    return char
