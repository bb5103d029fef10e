"""How long to leave a collector alone that failed, so that a thousand agents don't come at once."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

from .errors import RejectedError, RetryLaterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
LONGEST_ASKED_S = 300.0
"""A ``Retry-After`` beyond this is cut to it: an agent that sleeps for a day helps nobody."""

JITTER_RATIO = 0.25

T = TypeVar("T")

NUM_REFUSALS = 3

REFUSAL_PAUSE_S = 1.0

MAX_PARKED_IN_A_ROW = 8
"""Beyond this nothing is set aside until something is taken again: a collector that refuses
everything is what is wrong, and not what it is sent."""

ALL_REFUSED_PAUSE_S = 60.0


@dataclass(slots=True)
class Backoff:
    """Pauses that double with each failure in a row, each drawn anew between 0 and the bound.

    A pause that the collector asked for is kept, and up to a quarter more, so that those who
    were told the same time don't come back together.

    Args:
        uniform: Draws a number between two bounds.

    Source: "full jitter", M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog 2015.
    """

    uniform: Callable[[float, float], float] = random.uniform
    num_failures: int = 0
    """In a row."""

    def failed(self, asked_s: float | None = None) -> float:
        """Count a failure and return the pause in seconds."""
        bound_s = min(FIRST_PAUSE_S * 2.0 ** min(self.num_failures, 16), LONGEST_PAUSE_S)
        self.num_failures += 1
        if asked_s is None:
            return self.uniform(0.0, bound_s)
        kept_s = min(asked_s, LONGEST_ASKED_S)
        return kept_s + self.uniform(0.0, JITTER_RATIO * kept_s)

    def succeeded(self) -> None:
        """Begin again with the shortest pause."""
        self.num_failures = 0


class Delivery:
    """Sends batches; a batch that is refused three times is halved until one thing is left.

    Args:
        pause: Waits so many seconds, or less when the agent stops.
    """

    def __init__(self, pause: Callable[[float], object] | None = None) -> None:
        self._pause = pause or threading.Event().wait
        self._num_parked_in_a_row = 0

    def deliver(
        self,
        items: Sequence[T],
        *,
        post: Callable[[Sequence[T]], None],
        park: Callable[[T, RejectedError], None],
    ) -> None:
        """Send ``items``; what is refused for what it is goes to ``park``, alone.

        Args:
            items: What to send, in this order.
            post: Sends several in one request and returns when they are taken.
            park: Sets one aside for good.

        Raises:
            RetryLaterError: Some are still to be sent; ``items`` may all be given again.
        """
        todo = [(items, 0)]
        while todo:
            batch, num_refused = todo.pop()
            try:
                post(batch)
            except RejectedError as refusal:
                is_first_to_split = (
                    refusal.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and len(batch) > 1
                )
                if num_refused + 1 < NUM_REFUSALS and not is_first_to_split:
                    self._pause(REFUSAL_PAUSE_S)
                    todo.append((batch, num_refused + 1))
                elif len(batch) > 1:
                    middle = len(batch) // 2
                    # One more refusal is the third of its kind.
                    todo += [(batch[middle:], num_refused), (batch[:middle], num_refused)]
                else:
                    self._set_aside(batch[0], refusal, park)
            else:
                self._num_parked_in_a_row = 0

    def _set_aside(
        self, item: T, refusal: RejectedError, park: Callable[[T, RejectedError], None]
    ) -> None:
        if not refusal.is_of_collector:
            raise RetryLaterError(
                f"what stands before the collector does not let a batch of least length through"
                f" ({refusal}): let it take bodies of 32 MiB",
                pause_s=ALL_REFUSED_PAUSE_S,
            )
        if self._num_parked_in_a_row >= MAX_PARKED_IN_A_ROW:
            self._num_parked_in_a_row -= 1  # one more after the pause
            raise RetryLaterError(
                f"the collector refuses everything ({refusal})",
                pause_s=ALL_REFUSED_PAUSE_S,
            )
        park(item, refusal)
        self._num_parked_in_a_row += 1
