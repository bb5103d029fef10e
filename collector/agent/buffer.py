"""Bounded buffer of rows that wait to be sent; the oldest are dropped and counted."""

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
"""Samples of some ten minutes of a host with eight devices."""

UNPACKED_ROWS = 1_000
"""More rows are packed: a sample takes 345 bytes as a dict and 23 packed."""

PACK_LEVEL = 1


@dataclass(frozen=True, slots=True)
class _Pack:
    num_rows: int
    data: bytes

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        return cls(len(rows), zlib.compress(json.dumps(rows).encode(), PACK_LEVEL))

    def rows(self) -> list[Row]:
        found: list[dict[str, Any]] = json.loads(zlib.decompress(self.data))
        return found


class RowBuffer:
    """A buffer that one thread fills and another empties.

    Usually all rows go with the next request. In an outage they are packed, so that an hour takes
    little more memory than a second.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._packs: deque[_Pack] = deque()
        self._unpacked: deque[Row] = deque()
        self._num_rows = 0
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self.num_dropped = 0
        """Number of rows that were dropped in favor of newer ones."""

    def __len__(self) -> int:
        return self._num_rows

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows."""
        with self._lock:
            for row in rows:
                self._unpacked.append(row)
                if len(self._unpacked) >= UNPACKED_ROWS:
                    self._packs.append(_Pack.of(list(self._unpacked)))
                    self._unpacked.clear()
            self._num_rows += len(rows)
            self._drop_excess()

    def send(self, send: Callable[[Sequence[Row]], object], *, rows_per_call: int) -> None:
        """Send all rows, the oldest first; rows on which ``send`` raised stay.

        Args:
            send: Returns once the rows are stored.
            rows_per_call: Largest number of rows in one call of ``send``.
        """
        for _ in range(-(-self._num_rows // rows_per_call)):
            with self._lock:
                batch = self._take(rows_per_call)
            try:
                send(batch)
            except BaseException:
                with self._lock:
                    self._put_back(batch)
                    self._drop_excess()
                raise

    def _take(self, num_rows: int) -> list[Row]:
        taken: list[Row] = []
        while len(taken) < num_rows and self._packs:
            taken += self._packs.popleft().rows()
        while len(taken) < num_rows and self._unpacked:
            taken.append(self._unpacked.popleft())
        self._num_rows -= len(taken)
        if len(taken) > num_rows:
            self._put_back(taken[num_rows:])
            del taken[num_rows:]
        return taken

    def _put_back(self, rows: Sequence[Row]) -> None:
        for end in range(len(rows), 0, -UNPACKED_ROWS):
            self._packs.appendleft(_Pack.of(rows[max(end - UNPACKED_ROWS, 0) : end]))
        self._num_rows += len(rows)

    def _drop_excess(self) -> None:
        excess = self._num_rows - self._max_rows
        if excess > 0:
            self.num_dropped += excess
            while excess > 0:
                excess -= len(self._take(min(excess, UNPACKED_ROWS)))
