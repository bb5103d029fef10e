"""Deliver a batch although one part of it may never be taken: find that part and set it aside."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from .answers import TOO_LARGE, RefusedError
from .errors import HeldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

NUM_REFUSALS = 3
REFUSAL_PAUSE_S = 1.0
MAX_PARKED_IN_A_ROW = 8
"""Beyond this nothing is set aside until something is taken again: a collector that refuses
everything is what is wrong, and not what it is sent."""

ALL_REFUSED_PAUSE_S = 60.0


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
        park: Callable[[T, RefusedError], None],
    ) -> None:
        """Send ``items``; what is refused for what it is goes to ``park``, alone.

        Args:
            items: What to send, in this order.
            post: Sends several in one request and returns when they are taken.
            park: Sets one aside for good.

        Raises:
            HeldError: Some are still to be sent; ``items`` may all be given again.
        """
        todo = [(items, 0)]
        while todo:
            batch, num_refused = todo.pop()
            try:
                post(batch)
            except RefusedError as refusal:
                is_first_to_split = refusal.status == TOO_LARGE and len(batch) > 1
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
        self, item: T, refusal: RefusedError, park: Callable[[T, RefusedError], None]
    ) -> None:
        if not refusal.is_of_collector:
            raise HeldError(
                f"what stands before the collector does not let a batch of least length through"
                f" ({refusal}): let it take bodies of 32 MiB",
                pause_s=ALL_REFUSED_PAUSE_S,
            )
        if self._num_parked_in_a_row >= MAX_PARKED_IN_A_ROW:
            self._num_parked_in_a_row -= 1  # one more after the pause
            raise HeldError(
                f"the collector refuses everything ({refusal})",
                pause_s=ALL_REFUSED_PAUSE_S,
            )
        park(item, refusal)
        self._num_parked_in_a_row += 1
