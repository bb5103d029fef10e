"""How much may be under way at once, counted before it is read or inflated."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from collector.service.trouble import BusyError

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRY_S = 1.0


class ByteBudget:
    """A number of bytes that requests take from and give back. One event loop uses it.

    Args:
        max_bytes: All that there is.
        what: What the bytes are, for the refusal.
    """

    def __init__(self, max_bytes: int, *, what: str) -> None:
        self.max_bytes = max_bytes
        self.taken_bytes = 0
        self.num_refused = 0
        self._what = what

    @contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        """Hold bytes for as long as the block runs.

        Raises:
            BusyError: 429; there are not so many left. A request that alone is larger than
                the budget waits for nothing: it is let in when nobody else is.
        """
        if self.taken_bytes and self.taken_bytes + num_bytes > self.max_bytes:
            self.num_refused += 1
            raise BusyError(
                f"too much is under way ({self._what})", retry_after_s=RETRY_S, status=429
            )
        self.taken_bytes += num_bytes
        try:
            yield
        finally:
            self.taken_bytes -= num_bytes
