"""What can be said of a communication's begin and end from the streams around it.

NCCL's own stream shows nobody its events, so nothing is read on it. What is read:
when the launching stream came to the launch (the communication begins no
earlier), and when the stream of a wait had got past it (it ends no later). Where
these bounds meet what a stream must do, they are the moment itself:

* a blocking call runs on the launching stream: both are exact;
* the communication stream was idle at the launch: it begins there and then;
* a stream stood still at the wait: the end is the moment at which it went on.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

STOOD_STILL_NS = 20_000
"""A stream that takes longer from one side of a wait to the other was held up by it."""

MAX_ENDS = 256


class Bounds(NamedTuple):
    """Begin and end of a communication, monotonic; each exact or a bound."""

    begin_ns: int
    """No later than the true begin."""

    end_ns: int
    """No earlier than the true end."""

    begin_known: bool
    end_known: bool


class CommStream:
    """The stream of one communicator, which works in the order of launches."""

    def __init__(self) -> None:
        self._numbers: Callable[[], int] = itertools.count().__next__
        self._ends: dict[int, tuple[int, bool]] = {}

    def launch(self) -> int:
        """Return the number of a new launch."""
        return self._numbers()

    def place(self, number: int, launched_ns: int, wait_ns: tuple[int, int]) -> Bounds:
        """Return what is known of a launch. Called by one thread.

        Args:
            number: From `launch`.
            launched_ns: When the launching stream came to it, monotonic.
            wait_ns: When a stream came to the wait for it and nothing else, and when it had
                got past that; the latter twice where it waited for several at once.
        """
        begin_ns, begin_known = self._begin(number, launched_ns)
        came_ns, went_on_ns = wait_ns
        end_known = went_on_ns - came_ns > STOOD_STILL_NS
        if went_on_ns < begin_ns:
            # The bounds contradict each other by the error of what was read: keep the weaker.
            begin_ns, begin_known = min(launched_ns, went_on_ns), False
        self._ends[number] = (went_on_ns, end_known)
        if len(self._ends) > MAX_ENDS:
            self._ends.pop(next(iter(self._ends)))
        return Bounds(begin_ns, went_on_ns, begin_known, end_known)

    def _begin(self, number: int, launched_ns: int) -> tuple[int, bool]:
        """Return when a launch begins: with its launch, or with the end of the one before it."""
        before = self._ends.get(number - 1)
        if before is None:
            return launched_ns, False
        end_ns, end_known = before
        if end_ns <= launched_ns:
            return launched_ns, True
        return (end_ns, True) if end_known else (launched_ns, False)
