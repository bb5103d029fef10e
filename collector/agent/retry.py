"""How long to leave a collector alone that failed, so that a thousand agents don't come at once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
LONGEST_ASKED_S = 300.0
"""A ``Retry-After`` beyond this is cut to it: an agent that sleeps for a day helps nobody."""

TOKEN_PAUSE_S = 60.0
JITTER_RATIO = 0.25


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
