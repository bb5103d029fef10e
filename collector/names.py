"""Texts that are safe to store and to show."""

from __future__ import annotations

import hashlib
import unicodedata

MAX_NAME_BYTES = 256
HASH_BYTES = 4
INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that a screen does not show as they are: controls, format characters
(bidirectional overrides, zero-width), lone surrogates, line and paragraph separators."""


def storable_name(text: str) -> str:
    r"""Return ``text`` with invisible characters escaped, in at most `MAX_NAME_BYTES` of UTF-8.

    A text that is cut ends in ``~`` and a hash of the whole, so that two long names stay
    distinct. A harmless text is returned unchanged.
    """
    if text.isascii() and text.isprintable() and len(text) <= MAX_NAME_BYTES:
        return text
    shown = escape_invisible(text[: MAX_NAME_BYTES + 1])
    encoded = shown.encode()
    if len(encoded) <= MAX_NAME_BYTES and len(text) <= MAX_NAME_BYTES:
        return shown
    whole = text.encode("utf-8", "surrogatepass")
    suffix = f"~{hashlib.blake2b(whole, digest_size=HASH_BYTES).hexdigest()}"
    kept = encoded[: MAX_NAME_BYTES - len(suffix)].decode("utf-8", "ignore")
    return kept + suffix


def escape_invisible(text: str) -> str:
    r"""Return ``text`` with each invisible character as its escape (``\x1b``, ``\u202e``)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in INVISIBLE
        else letter
        for letter in text
    )
