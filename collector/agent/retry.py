"""Retry: backoff after failures, and delivery of batches of which one part is rejected."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

from .errors import RejectedError, RetryLaterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
LONGEST_RETRY_AFTER_S = 300.0
"""A longer ``Retry-After`` is cut to this."""

JITTER_RATIO = 0.25

MAX_REJECTIONS = 3
"""A batch is split after so many rejections."""

REJECTION_PAUSE_S = 1.0
MAX_DEAD_LETTERS_IN_A_ROW = 8
"""After so many nothing is given up until something is accepted: if a collector rejects
everything, the fault is in the collector and not in the data."""

ALL_REJECTED_PAUSE_S = 60.0


@dataclass(slots=True)
class Backoff:
    """Exponential backoff with full jitter: each pause is random between 0 and a growing bound.

    A pause that the collector asks for is kept, plus up to a quarter, so that agents that were
    asked for the same pause do not return together.

    Source: "full jitter", M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog 2015.
    """

    uniform: Callable[[float, float], float] = random.uniform
    num_failures: int = 0
    """Failures in a row."""

    def failed(self, asked_s: float | None = None) -> float:
        """Count a failure; return the pause in seconds."""
        bound_s = min(FIRST_PAUSE_S * 2.0 ** min(self.num_failures, 16), LONGEST_PAUSE_S)
        self.num_failures += 1
        if asked_s is None:
            return self.uniform(0.0, bound_s)
        kept_s = min(asked_s, LONGEST_RETRY_AFTER_S)
        return kept_s + self.uniform(0.0, JITTER_RATIO * kept_s)

    def succeeded(self) -> None:
        """Reset to the shortest pause."""
        self.num_failures = 0


class Delivery:
    """Sends batches; a batch that is rejected three times is halved until one item is left.

    Args:
        pause: Sleeps for a number of seconds, or less if the agent stops.
    """

    def __init__(self, pause: Callable[[float], object] | None = None) -> None:
        self._pause = pause or threading.Event().wait
        self._num_dead_in_a_row = 0

    def deliver(
        self,
        items: Sequence[T],
        *,
        post: Callable[[Sequence[T]], None],
        give_up: Callable[[T, RejectedError], None],
    ) -> None:
        """Send ``items``; give up those that are rejected alone.

        Args:
            items: Items to send, in this order.
            post: Sends several in one request; returns when they are accepted.
            give_up: Keeps one rejected item as a dead letter.

        Raises:
            RetryLaterError: Some are not sent; all of ``items`` may be passed again.
        """
        todo = [(items, 0)]
        while todo:
            batch, num_rejected = todo.pop()
            try:
                post(batch)
            except RejectedError as rejection:
                is_too_large = rejection.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
                if num_rejected + 1 < MAX_REJECTIONS and not (is_too_large and len(batch) > 1):
                    self._pause(REJECTION_PAUSE_S)
                    todo.append((batch, num_rejected + 1))
                elif len(batch) > 1:
                    middle = len(batch) // 2
                    # The halves inherit the count: one more rejection is the third.
                    todo += [(batch[middle:], num_rejected), (batch[:middle], num_rejected)]
                else:
                    self._give_up(batch[0], rejection, give_up)
            else:
                self._num_dead_in_a_row = 0

    def _give_up(
        self, item: T, rejection: RejectedError, give_up: Callable[[T, RejectedError], None]
    ) -> None:
        if not rejection.is_from_collector:
            raise RetryLaterError(
                f"a proxy before the collector rejects even the shortest batch ({rejection}): let"
                " it accept bodies of 32 MiB",
                pause_s=ALL_REJECTED_PAUSE_S,
            )
        if self._num_dead_in_a_row >= MAX_DEAD_LETTERS_IN_A_ROW:
            self._num_dead_in_a_row -= 1  # one more after the pause
            raise RetryLaterError(
                f"the collector rejects everything ({rejection})", pause_s=ALL_REJECTED_PAUSE_S
            )
        give_up(item, rejection)
        self._num_dead_in_a_row += 1
