"""The person at the terminal: its width, lines on stderr, and one line of progress."""

from __future__ import annotations

import shutil
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from rankscope.analysis.report.text import UNKNOWN
from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GAP = "  "
MAX_WIDTH = 120
WIDTH_OF_NONE = 100


def terminal_width() -> int:
    """Return how many columns to fill: the terminal's, at most `MAX_WIDTH`."""
    return min(MAX_WIDTH, shutil.get_terminal_size((WIDTH_OF_NONE, 24)).columns)


def printable(text: str) -> str:
    """Return the text with everything that is no visible letter as its escape.

    Line ends, escape sequences, zero-width and right-to-left marks, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _say_on_stderr(line: str) -> None:
    sys.stderr.write(f"rankscope: {printable(line)}\n")
    sys.stderr.flush()


_SAYING: list[Callable[[str], None]] = [_say_on_stderr]
"""One place, so that a server's log can take over whoever speaks."""


def say(line: str) -> None:
    """Tell a line on stderr, which leaves stdout to the result."""
    _SAYING[0](line)


def said_by(speaker: Callable[[str], None]) -> Callable[[str], None]:
    """Let ``speaker`` tell the lines of `say` from now on; return who told them before."""
    before, _SAYING[0] = _SAYING[0], speaker
    return before


class Progress:
    """One line that tells how far the work is: rewritten on a terminal, sparse elsewhere.

    Args:
        stream: Where to.
        every: Off a terminal, one line for each this many calls.
    """

    def __init__(self, stream: TextIO, *, every: int) -> None:
        self._stream = stream
        self._every = every
        self._is_terminal = stream.isatty()
        self._num_calls = 0
        self._width = 0

    def show(self, text: str) -> None:
        """Show ``text`` in place of what stood there."""
        if self._is_terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif self._num_calls % self._every == 0:
            self._stream.write(text + "\n")
        self._num_calls += 1
        self._stream.flush()

    def end(self) -> None:
        """Leave the line standing; what follows begins on a new one."""
        if self._is_terminal and self._width:
            self._stream.write("\n")
            self._stream.flush()
        self._width = 0


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Return one line for the header and one a row, all columns as wide as their widest cell.

    Args:
        header: The columns' names.
        rows: The cells, as many a row as the header has.
        right: One character a column: ``r`` for right-aligned; left where it is missing.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [_line(row, widths, right) for row in (header, *rows)]


def _line(cells: Sequence[str], widths: Sequence[int], right: str) -> str:
    padded = [
        cell.rjust(width) if right[column : column + 1] == "r" else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return GAP.join(padded).rstrip()


def format_time(at_ns: int | None) -> str:
    """Return a Unix time in UTC to the second, or "n/a" if it is unknown."""
    if at_ns is None:
        return UNKNOWN
    return datetime.fromtimestamp(at_ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M:%S")
