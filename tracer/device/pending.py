"""What waits for its events, in the order in which a stream comes to them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from .clock import DeviceClock
    from .mark import Mark


class Pending(Protocol):
    """Something that can be written down once the device has come to its last mark."""

    @property
    def last(self) -> Mark:
        """The mark that the device comes to last."""
        ...

    def is_done(self) -> bool:
        """Return whether the device has come to all marks."""
        ...

    def resolve(self, clock: DeviceClock) -> None:
        """Write it down."""
        ...

    def lose(self) -> None:
        """Let go of it: its times will never be known."""
        ...


class StreamQueue:
    """What is pending on one stream.

    A stream works in order, so only the oldest is asked whether it is done:
    while that one is not, no other can be. Any thread may push, one resolves.
    """

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def age_ns(self, now_ns: int) -> int:
        """Return how long ago the host marked the end of the oldest, 0 where there is none."""
        try:
            return now_ns - self._pending[0].last.launch_ns
        except IndexError:
            return 0

    def push(self, pending: Pending) -> None:
        """Add what the stream was given last."""
        self._pending.append(pending)

    def resolve(self, clock: DeviceClock, limit: int) -> int:
        """Write down what is done, ``limit`` at most; return how many that were."""
        for number in range(limit):
            if not self._pending or not self._pending[0].is_done():
                return number
            # Taken out last: where this raises, it is still there to be counted as lost.
            self._pending[0].resolve(clock)
            self._pending.popleft()
        return limit

    def lose_all(self) -> int:
        """Let go of everything; return how many that were."""
        for number in range(len(self._pending) + 1):
            if not self._pending:
                return number
            self._pending.popleft().lose()
        return 0


class PendingSpan:
    """A span between two marks of one thread."""

    __slots__ = ("_begin", "_lose", "_release", "_write", "last")

    def __init__(
        self,
        begin: Mark,
        end: Mark,
        *,
        write: Callable[[int, int], None],
        lose: Callable[[], None],
        release: Callable[[Mark], None],
    ) -> None:
        """Hold a span until it is known.

        Args:
            begin: Where it begins.
            end: Where it ends; on another stream where the job has changed streams inside.
            write: Takes begin (monotonic) and duration in ns.
            lose: Called instead where the times will never be known.
            release: Takes each mark that is no longer needed.
        """
        self._begin = begin
        self.last = end
        self._write = write
        self._lose = lose
        self._release = release

    def is_done(self) -> bool:
        """Return whether the device has come to both marks."""
        if not self.last.event.query():
            return False
        return self._begin.stream == self.last.stream or self._begin.event.query()

    def resolve(self, clock: DeviceClock) -> None:
        """Write the span down."""
        begin = clock.place(self._begin.event, self._begin.launch_ns)
        duration_ns = clock.between_ns(self._begin.event, self.last.event)
        self._release(self._begin)
        self._release(self.last)
        if duration_ns < 0:
            self._lose()
            return
        self._write(begin.at_ns, duration_ns)

    def lose(self) -> None:
        """Let go of it."""
        self._lose()
