"""Words and numbers for the screen, with everything that came from outside made inert."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import neighbours

if TYPE_CHECKING:
    from collections.abc import Sequence

UNKNOWN = "n/a"
"""How every unknown quantity reads."""

_MAX_NAME = 256
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))
_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


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


def time_text(duration_ns: float | None) -> str:
    """Return a duration in the unit that suits it, three significant digits."""
    if duration_ns is None:
        return UNKNOWN
    for unit, size in _UNITS:
        if abs(duration_ns) >= size:
            return f"{_three_digits(duration_ns / size)} {unit}"
    return f"{duration_ns:.0f} ns"


def seconds_text(seconds: float | None) -> str:
    """Return a duration given in seconds like `time_text`."""
    return UNKNOWN if seconds is None else time_text(seconds * 1e9)


def bytes_text(num_bytes: int) -> str:
    """Return a size in binary units."""
    for unit, size in _BYTE_UNITS:
        if num_bytes >= size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes} B"


def ratio_text(ratio: float | None, *, digits: int = 1) -> str:
    """Return a share of the whole in percent."""
    return UNKNOWN if ratio is None else f"{100 * ratio:z.{digits}f} %"


def slowdown_text(slowdown: float | None) -> str:
    """Return actual over ideal, as a factor."""
    return UNKNOWN if slowdown is None else f"{slowdown:.2f}x"


def ranks_text(ranks: Sequence[int], *, most: int = 8) -> str:
    """Return the ranks, runs of neighbours joined, cut with their number when there are many."""
    if not ranks:
        return "none"
    runs = neighbours(sorted(ranks), least=2)
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:most]]
    more = f" … ({len(ranks):,} ranks)" if len(runs) > most else ""
    return ", ".join(shown) + more


def steps_text(steps: tuple[int, int] | None) -> str:
    """Return the first and last step."""
    if steps is None:
        return "none"
    return f"{steps[0]}" if steps[0] == steps[1] else f"{steps[0]}-{steps[1]}"


def count_text(count: int, noun: str) -> str:
    """Return the number with its noun, in the plural where it is not one."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _three_digits(value: float) -> str:
    size = abs(value)
    digits = 2 if size < 10 else 1 if size < 100 else 0  # noqa: PLR2004
    return f"{value:,.{digits}f}"


def _spelled(char: str) -> str:
    if unicodedata.category(char) in _UNSEEN:
        return f"\\u{{{ord(char):x}}}"
    return char
