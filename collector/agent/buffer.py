"""Rows that wait to be sent, a bounded number of them: the oldest make room, and are counted."""

from __future__ import annotations

import json
import threading
import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..identity import Row

MAX_ROWS = 100_000
"""Some ten minutes of a host with eight devices."""

FRESH_ROWS = 1_000
"""Beyond these, rows are packed: a sample takes 345 bytes as it comes and 23 packed."""

PACK_LEVEL = 1


@dataclass(frozen=True, slots=True)
class _Pack:
    """Rows that nobody looks at for a while."""

    num_rows: int
    data: bytes

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        return cls(len(rows), zlib.compress(json.dumps(rows).encode(), PACK_LEVEL))

    def rows(self) -> list[Row]:
        found: list[dict[str, Any]] = json.loads(zlib.decompress(self.data))
        return found


class RowBuffer:
    """Filled by one thread, emptied by another.

    In steady work what comes goes with the next request; in an outage it is packed, so that an
    hour of waiting takes little more memory than a second.

    Args:
        max_rows: How many may wait.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._packs: deque[_Pack] = deque()
        self._fresh: deque[Row] = deque()
        self._num_rows = 0
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self.num_dropped = 0
        """Rows that made room for newer ones."""

    def __len__(self) -> int:
        return self._num_rows

    def add(self, rows: Sequence[Row]) -> None:
        """Let rows wait."""
        with self._lock:
            for row in rows:
                self._fresh.append(row)
                if len(self._fresh) >= FRESH_ROWS:
                    self._packs.append(_Pack.of(list(self._fresh)))
                    self._fresh.clear()
            self._num_rows += len(rows)
            self._make_room()

    def ship(self, send: Callable[[Sequence[Row]], None], *, num_at_once: int) -> None:
        """Send all that waits, the oldest first; what ``send`` raised on still waits.

        Args:
            send: Returns once it has them.
            num_at_once: Most rows of one call of ``send``.
        """
        for _ in range(-(-self._num_rows // num_at_once)):
            with self._lock:
                batch = self._taken(num_at_once)
            try:
                send(batch)
            except BaseException:
                with self._lock:
                    self._put_back(batch)
                    self._make_room()
                raise

    def _taken(self, num_rows: int) -> list[Row]:
        """Take the oldest rows out."""
        taken: list[Row] = []
        while len(taken) < num_rows and self._packs:
            taken += self._packs.popleft().rows()
        while len(taken) < num_rows and self._fresh:
            taken.append(self._fresh.popleft())
        self._num_rows -= len(taken)
        if len(taken) > num_rows:
            self._put_back(taken[num_rows:])
            del taken[num_rows:]
        return taken

    def _put_back(self, rows: Sequence[Row]) -> None:
        """Let rows wait before all others."""
        for end in range(len(rows), 0, -FRESH_ROWS):
            self._packs.appendleft(_Pack.of(rows[max(end - FRESH_ROWS, 0) : end]))
        self._num_rows += len(rows)

    def _make_room(self) -> None:
        """Drop the oldest rows of those that are too many."""
        excess = self._num_rows - self._max_rows
        if excess > 0:
            self.num_dropped += excess
            while excess > 0:
                excess -= len(self._taken(min(excess, FRESH_ROWS)))
