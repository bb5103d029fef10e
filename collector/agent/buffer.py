"""Rows that wait to be sent, a bounded number of them: the oldest make room, and are counted."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from collector.store import Row

MAX_ROWS = 100_000
"""Some 50 MB, and some ten minutes of a host with eight devices."""


class RowBuffer:
    """Filled by one thread, emptied by another.

    Args:
        max_rows: How many may wait.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._rows: deque[Row] = deque()
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self.num_dropped = 0
        """Rows that made room for newer ones."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Let rows wait."""
        with self._lock:
            self._rows.extend(rows)
            while len(self._rows) > self._max_rows:
                self._rows.popleft()
                self.num_dropped += 1

    def ship(self, send: Callable[[Sequence[Row]], None], *, num_at_once: int) -> None:
        """Send all that waits, the oldest first; what ``send`` raised on still waits.

        Args:
            send: Returns once it has them.
            num_at_once: Most rows of one call of ``send``.
        """
        for _ in range(-(-len(self._rows) // num_at_once)):
            with self._lock:
                batch = [self._rows.popleft() for _ in range(min(num_at_once, len(self._rows)))]
            try:
                send(batch)
            except BaseException:
                self._put_back(batch)
                raise

    def _put_back(self, batch: list[Row]) -> None:
        with self._lock:
            room = max(self._max_rows - len(self._rows), 0)
            self.num_dropped += max(len(batch) - room, 0)
            self._rows.extendleft(reversed(batch[max(len(batch) - room, 0) :]))
