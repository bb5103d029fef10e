"""One line at the bottom of a terminal, beneath the output of a job that knows nothing of it."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from ..terminal.lines import printable

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_S = 1.0
MIN_ROWS = 5
SAVE, RESTORE = "\x1b7", "\x1b8"
ERASE = "\x1b[2K"
UNLIMITED = "\x1b[r"


class LiveLine:
    """The last row of the terminal of stderr, drawn every second by a thread.

    The job writes to the terminal itself. The rows above are made the region that scrolls, so its
    output never meets the line (as `apt` does it). Each drawing is one write, which puts the cursor
    back. Without a terminal nothing is written.

    Args:
        text: Returns what to show, "" for nothing.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self.is_shown = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._size: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live line", daemon=True)

    def __enter__(self) -> Self:
        if self.is_shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the line for good."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.hide()

    def hide(self) -> None:
        """Remove the line until it is drawn again."""
        with self._lock:
            if self._size is not None:
                rows = self._size[1]
                _write(f"{SAVE}{UNLIMITED}\x1b[{rows};1H{ERASE}{RESTORE}")
                self._size = None

    def _run(self) -> None:
        while not self._closing.wait(PAUSE_S):
            text = self._text()
            with self._lock, suppress(OSError):
                if text:
                    self._draw(text, os.get_terminal_size(sys.stderr.fileno()))

    def _draw(self, text: str, size: os.terminal_size) -> None:
        columns, rows = size
        if rows < MIN_ROWS:
            return
        begin = ""
        if (columns, rows) != self._size:
            # A line further and back: the cursor may be in the row that is taken from the job.
            begin = f"\x1bD{SAVE}\x1b[1;{rows - 1}r{RESTORE}\x1b[1A"
            self._size = columns, rows
        shown = printable(text)
        if len(shown) >= columns:
            shown = f"{shown[: columns - 2]}…"
        _write(f"{begin}{SAVE}\x1b[{rows};1H{ERASE}{shown}{RESTORE}")


def _write(text: str) -> None:
    with suppress(OSError):
        os.write(sys.stderr.fileno(), text.encode(errors="replace"))
