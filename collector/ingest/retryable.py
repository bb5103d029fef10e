"""Tell a store that can't take anything just now from rows that it will never take."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Any

from ..errors import StoreError, StoreQueryError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

TOO_MANY_PARTS = 252

DATA_FAULTS = frozenset({6, 26, 27, 33, 38, 41, 53, 69, 70, 72, 117, 128, 131, 190, 349, 1003})
"""Error numbers that speak of the rows: can't parse, type mismatch, argument out of bound, size
limit of an array or a string, incorrect data. All others speak of the store (too many parts,
read-only, memory, time, disk, a table that is being changed, no answer) and pass some day.

Source: ClickHouse, src/Common/ErrorCodes.cpp."""

MIN_FREE_BYTES = 256 << 20
"""Below this an embedded store is not written to: an insert that fills the disk takes the merges,
and whatever else lives on it, down too."""

RETRY_S = 2.0
MAX_RETRY_S = 30.0
ENDING_S = 1.0
"""When to ask a server again that is ending: another one, or the next, answers soon."""


class StoreFullError(StoreError):
    """The disk of an embedded store has too little room."""


class BusyError(Exception):
    """Nothing can be taken just now; the same request is welcome later.

    Args:
        reason: One plain line, without a path.
        retry_after_s: When to come again.
        status: 503, or 429 where it is the sender's haste.
    """

    def __init__(self, reason: str, *, retry_after_s: float, status: int = 503) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.status = status


def refuse(
    error: Exception,
    answers: Sequence[Future[Any]],
    *,
    trouble: StoreTrouble,
    one_by_one: Callable[[], None],
) -> None:
    """Answer requests whose common insert failed: no answer says that anything was stored.

    Where the rows are at fault, one request of several is: the others must not suffer with it.

    Args:
        error: Why it failed.
        answers: One a request.
        trouble: Is told, where the store is at fault.
        one_by_one: Tries each request alone.
    """
    if not is_data_fault(error):
        busy = trouble.failed(error)
        for answer in answers:
            answer.set_exception(BusyError(busy.reason, retry_after_s=busy.retry_after_s))
    elif len(answers) == 1:
        answers[0].set_exception(WireError(422, f"the store refuses the rows: {error}"))
    else:
        one_by_one()


def is_data_fault(error: Exception) -> bool:
    """Return whether an error speaks of the rows and not of the store."""
    if isinstance(error, StoreQueryError):
        return error.code in DATA_FAULTS
    return not isinstance(error, StoreError | OSError)


def free_bytes(path: Path) -> int:
    """Return the room on a folder's disk."""
    return shutil.disk_usage(path).free


def check_room(path: Path | None, *, free: Callable[[Path], int] = free_bytes) -> None:
    """Refuse where an embedded store's disk is nearly full.

    Raises:
        StoreFullError: It is.
    """
    if path is None:
        return
    left = free(path)
    if left < MIN_FREE_BYTES:
        raise StoreFullError(
            f"the store's disk has {left >> 20} MiB left, less than {MIN_FREE_BYTES >> 20}:"
            " make room; senders keep their rows until then"
        )


class StoreTrouble:
    """Whether the store failed last, and when it is worth another try.

    Args:
        monotonic_s: Clock for the pauses.
        say: Hears when trouble begins and when it ends.
    """

    def __init__(self, monotonic_s: Callable[[], float], *, say: Callable[[str], None]) -> None:
        self._monotonic_s = monotonic_s
        self._say = say
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._pause_s = 0.0
        self._until_s = 0.0
        self.num_failures = 0

    @property
    def reason(self) -> str | None:
        """Why the last write failed; None where it did not."""
        return self._reason

    def check(self) -> None:
        """Let one request through when the pause is over, and nobody before.

        Raises:
            BusyError: The store failed a moment ago.
        """
        with self._lock:
            if self._reason is None:
                return
            now_s = self._monotonic_s()
            if now_s < self._until_s:
                raise BusyError(
                    "the store can't be written to just now",
                    retry_after_s=self._until_s - now_s,
                )
            self._until_s = now_s + self._pause_s

    def failed(self, error: Exception) -> BusyError:
        """Note a failure; return what to answer with."""
        with self._lock:
            self.num_failures += 1
            is_new = self._reason is None
            self._reason = str(error)
            self._pause_s = min(max(RETRY_S, self._pause_s * 2), MAX_RETRY_S)
            self._until_s = self._monotonic_s() + self._pause_s
            pause_s = self._pause_s
        if is_new:
            self._say(f"ingest stands still: {error}")
        return BusyError("the store can't be written to just now", retry_after_s=pause_s)

    def succeeded(self) -> None:
        """Note that the store took something."""
        with self._lock:
            was, self._reason, self._pause_s = self._reason, None, 0.0
        if was is not None:
            self._say("ingest goes on")
