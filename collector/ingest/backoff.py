"""Backoff while the store cannot be written to, and the errors that request it."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING

from ..errors import StoreError, StoreQueryError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOO_MANY_PARTS = 252

ROW_ERRORS = frozenset({6, 26, 27, 33, 38, 41, 53, 69, 70, 72, 117, 128, 131, 190, 349, 1003})
"""Error numbers that the rows cause: can't parse, type mismatch, argument out of bound, size limit
of an array or a string, incorrect data. The store causes all others (too many parts, read-only,
memory, time, disk, a table that is being changed, no answer), and they pass.

Source: ClickHouse, src/Common/ErrorCodes.cpp."""

MIN_FREE_BYTES = 256 << 20
"""Free disk space below which an embedded store is not written to: an insert that fills the disk
would also stop the merges, and everything else on that disk."""

MIN_PAUSE_S = 2.0
MAX_PAUSE_S = 30.0
SHUTDOWN_RETRY_S = 1.0
"""Another collector, or the next one, answers soon."""


class StoreFullError(StoreError):
    """The disk of an embedded store is nearly full."""


class BusyError(Exception):
    """Nothing can be taken now; the same request may succeed later.

    Args:
        reason: One plain line, without a path.
        status: 503, or 429 if the sender sends too fast.
    """

    def __init__(self, reason: str, *, retry_after_s: float, status: int = 503) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.status = status


def is_row_error(error: Exception) -> bool:
    """Return whether the rows caused an error, not the store."""
    if isinstance(error, StoreQueryError):
        return error.code in ROW_ERRORS
    return not isinstance(error, StoreError | OSError)


def free_bytes(path: Path) -> int:
    """Return the free space of a folder's disk."""
    return shutil.disk_usage(path).free


def check_disk_space(path: Path | None, *, free: Callable[[Path], int] = free_bytes) -> None:
    """Check that an embedded store's disk has room for an insert.

    Args:
        path: The store's folder; None for a server.

    Raises:
        StoreFullError: Less than `MIN_FREE_BYTES` are free.
    """
    if path is None:
        return
    left = free(path)
    if left < MIN_FREE_BYTES:
        raise StoreFullError(
            f"the store's disk has {left >> 20} MiB free, less than {MIN_FREE_BYTES >> 20}:"
            " free some space; senders keep their rows until then"
        )


class StoreBackoff:
    """Pauses after failed writes, doubling from `MIN_PAUSE_S` to `MAX_PAUSE_S`.

    Args:
        say: Takes a line when failures begin and when they end.
    """

    def __init__(self, monotonic_s: Callable[[], float], *, say: Callable[[str], None]) -> None:
        self._monotonic_s = monotonic_s
        self._say = say
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._pause_s = 0.0
        self._until_s = 0.0

    @property
    def reason(self) -> str | None:
        """Reason of the last write's failure; None if it succeeded."""
        return self._reason

    def check(self) -> None:
        """Let one request pass after each pause, and none during it.

        Raises:
            BusyError: The last write failed, and its pause is not over.
        """
        with self._lock:
            if self._reason is None:
                return
            now_s = self._monotonic_s()
            if now_s < self._until_s:
                raise BusyError(
                    "the store cannot be written to now", retry_after_s=self._until_s - now_s
                )
            self._until_s = now_s + self._pause_s

    def failed(self, error: Exception) -> BusyError:
        """Record a failed write; return the error to answer with."""
        with self._lock:
            is_new = self._reason is None
            self._reason = str(error)
            self._pause_s = min(max(MIN_PAUSE_S, self._pause_s * 2), MAX_PAUSE_S)
            self._until_s = self._monotonic_s() + self._pause_s
            pause_s = self._pause_s
        if is_new:
            self._say(f"ingest is paused: {error}")
        return BusyError("the store cannot be written to now", retry_after_s=pause_s)

    def succeeded(self) -> None:
        """Record a successful write."""
        with self._lock:
            was, self._reason, self._pause_s = self._reason, None, 0.0
        if was is not None:
            self._say("ingest has resumed")
