"""Lines, tables and progress on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from textwrap import wrap
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.status import Status
    from rich.text import Text

GAP = "  "
MAX_WIDTH = 120
DEFAULT_WIDTH = 100
"""Columns if the output is not a terminal."""

MIN_COLUMN = 12
"""Columns below which no cell is wrapped: names and dates would be unreadable."""

MAX_WORD = 16
"""Columns of a word that is never broken: all causes have shorter ones; names of runs may not."""

_WORD = re.compile(r"[^\s-]+-?|$")

DEFAULT_TOP = 5
"""Rows of a list that are printed before the rest is counted."""

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[num]?s|[GMk]Hz|[KMGT]?i?B(?:/s)?)(?![a-z]))")
_NO_BREAK = "\u00a0"

COLOURS = {"red": 31, "yellow": 33, "green": 32}

LONG_S = 5
"""Seconds from which the progress shows how long one part of the work takes."""

REFRESHES_PER_S = 4
"""The demo's ranks need the cores more than a spinner does."""


def terminal_width() -> int:
    """Return the number of columns to fill: the terminal's, at most `MAX_WIDTH`."""
    return min(MAX_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def printable(text: str) -> str:
    """Return the text with each invisible character as its escape sequence.

    These are line ends, terminal escapes, zero-width and right-to-left marks, and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _write_line(line: str) -> None:
    sys.stderr.write(f"rankscope: {printable(line)}\n")
    sys.stderr.flush()


_WRITERS: list[Callable[[str], None]] = [_write_line]
"""The function that `say` calls; a server replaces it by its log."""


def say(line: str) -> None:
    """Write a line to stderr, or to the log of a server. Only results go to stdout."""
    _WRITERS[0](line)


def redirect_lines(write: Callable[[str], None]) -> Callable[[str], None]:
    """Let ``write`` take the lines of `say` from now on; return the function that did so before."""
    before, _WRITERS[0] = _WRITERS[0], write
    return before


class Progress:
    """Progress of long work on stderr: one changing line on a terminal, few lines elsewhere.

    Args:
        every: Elsewhere, the number of calls of `show` for one written line; 0 for none.
    """

    def __init__(self, *, every: int = 0) -> None:
        self._every = every
        self._num_calls = 0
        self._status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Show the text in place of the one before."""
        if not self.replace(text):
            if self._every and self._num_calls % self._every == 0:
                sys.stderr.write(text + "\n")
                sys.stderr.flush()
            self._num_calls += 1

    def replace(self, text: str) -> bool:
        """Show the text on a terminal alone; return whether stderr is one."""
        is_dumb = os.environ.get("TERM") == "dumb"
        is_shown = (sys.stderr.isatty() and not is_dumb) or self._status is not None
        if not is_shown:
            return False
        if self._status is None:
            from rich.console import Console
            from rich.status import Status

            console = Console(stderr=True)
            self._status = Status("", console=console, refresh_per_second=REFRESHES_PER_S)
            self._status.start()
        self._status.update(_Timed(printable(text)))
        return True


class _Timed:
    """A text of the progress, with the time for which it is shown: long work must not look dead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._begun_s = time.monotonic()

    def __rich__(self) -> Text:
        from rich.text import Text

        seconds = int(time.monotonic() - self._begun_s)
        return Text(f"{self._text}, {seconds} s" if seconds >= LONG_S else self._text)


def table_width() -> int | None:
    """Return the columns that a table may take: the terminal's; None if it is read by a program."""
    is_shown = sys.stdout.isatty()
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns if is_shown else None


def wrap_text(text: str, width: int, *, first: str = "") -> list[str]:
    """Return a text as lines of a width. A number stays on the line of its unit.

    A longer word, such as an address, is not broken: it can be copied whole.

    Args:
        text: A sentence or more.
        width: Columns.
        first: Prefix of the first line; the others are indented like it.
    """
    lines = wrap(
        _BEFORE_UNIT.sub(_NO_BREAK, text),
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


def emphasize(text: str, colour: str) -> str:
    """Return the text in bold and in a colour of `COLOURS` if stdout is a terminal that shows them.

    Source: https://no-color.org: no colour if NO_COLOR is set and not empty.
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if is_plain or not sys.stdout.isatty():
        return text
    lines = text.split("\n")
    return "\n".join(f"\x1b[1;{COLOURS[colour]}m{line}\x1b[0m" for line in lines)


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: str = "",
    width: int | None = None,
) -> list[str]:
    """Return a table as lines, the header first, each column as wide as its widest cell.

    Args:
        header: Names of the columns.
        rows: Cells; each row is as long as the header.
        right: One character for each column: ``r`` aligns it to the right. Others, and columns
            beyond the text's end, are aligned to the left; ``k`` keeps its cells on one line.
        width: Columns that the table may take: the widest left columns are wrapped. None: any.
    """
    blocks = format_rows(header, rows, right=right, width=width)
    return [line for block in blocks for line in block.split("\n")]


def format_rows(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: str = "",
    width: int | None = None,
) -> list[str]:
    """Return a table as one text for each row, which has several lines if a cell is wrapped.

    The arguments are those of `format_table`.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    if width is not None:
        widths = _fit(widths, header, rows, right=right, width=width)
    return [_table_row(row, widths, right) for row in (header, *rows)]


def _fit(
    widths: list[int],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: str,
    width: int,
) -> list[int]:
    """Return the widths of columns that take at most ``width`` together, if that is possible."""
    widths = list(widths)
    least = (
        [
            max(len(name), MIN_COLUMN, min(MAX_WORD, max(map(len, _WORD.findall(" ".join(cells))))))
            for name, *cells in zip(header, *rows, strict=True)
        ]
        if rows
        else [len(name) for name in header]
    )
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        flexible = [
            column
            for column in range(len(widths))
            if right[column : column + 1] not in {"r", "k"} and widths[column] > least[column]
        ]
        if not flexible:
            break
        widths[max(flexible, key=lambda column: widths[column])] -= 1
    return widths


def _table_row(cells: Sequence[str], widths: Sequence[int], right: str) -> str:
    parts = [
        wrap(cell, width) or [""] if len(cell) > width else [cell]
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = [
        [part[number] if number < len(part) else "" for part in parts]
        for number in range(max(map(len, parts)))
    ]
    return "\n".join(_table_line(line, widths, right) for line in lines)


def _table_line(cells: Sequence[str], widths: Sequence[int], right: str) -> str:
    padded = [
        cell.rjust(width) if right[column : column + 1] == "r" else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return GAP.join(padded).rstrip()
