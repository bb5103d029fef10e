"""Faults of a run: factors and delays by rank and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault."""

    cause: str
    """Cause of the finding."""

    how: str
    """Effect: one of the methods of `Plan`."""

    ranks: tuple[int, ...] = ()
    first: int = 0
    last: int = 10**9
    factor: float = 1.0
    ms: float = 0.0
    share: float = 0.0
    has_spans: bool = True
    """Whether spans or samples show it."""

    def is_on(self, step: int) -> bool:
        """Return whether the fault acts in a step."""
        return self.first <= step <= self.last


class Plan:
    """All faults of a run. Their random numbers are separate from the noise of the job."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self.faults = tuple(faults)
        self._chance = np.random.default_rng((seed, 99))

    def _of(self, step: int, *how: str) -> list[Fault]:
        return [each for each in self.faults if each.how in how and each.is_on(step)]

    def compute(self, rank: int, step: int) -> float:
        """Return the factor on a rank's compute."""
        found = [each.factor for each in self._of(step, "compute") if rank in each.ranks]
        return float(np.prod(found)) if found else 1.0

    def experts(self, rank: int, step: int) -> float:
        """Return the factor on the tokens of a rank's experts."""
        found = [each.factor for each in self._of(step, "experts") if rank in each.ranks]
        return float(np.prod(found)) if found else 1.0

    def transfer(self, members: Sequence[int], *, crosses: bool, step: int) -> float:
        """Return the factor on a transfer among these ranks."""
        factor = 1.0
        for each in self._of(step, "pair"):
            at = [members.index(rank) for rank in each.ranks if rank in members]
            # A ring uses the link if both ranks are neighbours on it.
            if len(at) == 2 and abs(at[0] - at[1]) in (1, len(members) - 1):
                factor *= each.factor
        for each in self._of(step, "nic"):
            if crosses and set(each.ranks) & set(members):
                factor *= each.factor
        for each in self._of(step, "network"):
            if crosses:
                factor *= each.factor
        return factor

    def input_ns(self, rank: int, step: int) -> float:
        """Return the delay of a rank's data."""
        return sum(
            each.ms * 1e6 for each in self._of(step, "data") if not each.ranks or rank in each.ranks
        )

    def before_launch_ns(self, rank: int, step: int) -> float:
        """Return the stall of a rank's host before it launches a forward or backward."""
        return sum(each.ms * 1e6 for each in self._of(step, "host") if rank in each.ranks)

    def pause_ns(self, rank: int, step: int) -> tuple[float, bool]:
        """Return the pause of a rank's host before a forward, and whether it has a span."""
        del rank
        for each in self._of(step, "gc"):
            if self._chance.random() < each.share:
                return each.ms * 1e6 * (0.7 + 0.6 * self._chance.random()), each.has_spans
        return 0.0, False

    def before_reduce_ns(self, rank: int, step: int) -> float:
        """Return the delay of a rank's launch of the gradient reduction."""
        total = 0.0
        for each in self._of(step, "skew"):
            if rank in each.ranks and self._chance.random() < 0.5:
                growth = (step - each.first + 1) / 10
                total += each.ms * 1e6 * min(growth, 1.0) * self._chance.random()
        return total
