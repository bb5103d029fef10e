"""What is wrong in a run: factors and delays that a job asks for as it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    cause: str
    """As the diagnosis should name it."""

    how: str
    """Which of the ways below."""

    ranks: tuple[int, ...] = ()
    first: int = 0
    last: int = 10**9
    factor: float = 1.0
    ms: float = 0.0
    share: float = 0.0
    told: bool = True
    """Whether spans or samples tell it."""

    def is_on(self, step: int) -> bool:
        """Return whether a step shows it."""
        return self.first <= step <= self.last


class Plan:
    """All that is wrong in one run. Chance is drawn apart from the job's own noise."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self.faults = tuple(faults)
        self._chance = np.random.default_rng((seed, 99))

    def _of(self, step: int, *how: str) -> list[Fault]:
        return [each for each in self.faults if each.how in how and each.is_on(step)]

    def compute(self, rank: int, step: int) -> float:
        """Return by what factor a rank computes longer."""
        found = [each.factor for each in self._of(step, "compute") if rank in each.ranks]
        return float(np.prod(found)) if found else 1.0

    def experts(self, rank: int, step: int) -> float:
        """Return by what factor a rank's experts have more tokens."""
        found = [each.factor for each in self._of(step, "experts") if rank in each.ranks]
        return float(np.prod(found)) if found else 1.0

    def transfer(self, members: Sequence[int], *, crosses: bool, step: int) -> float:
        """Return by what factor a transfer among these ranks takes longer."""
        factor = 1.0
        for each in self._of(step, "pair"):
            at = [members.index(rank) for rank in each.ranks if rank in members]
            # A ring uses the link if the two are neighbours on it.
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
        """Return how much later a rank's data come."""
        return sum(
            each.ms * 1e6 for each in self._of(step, "data") if not each.ranks or rank in each.ranks
        )

    def before_launch_ns(self, rank: int, step: int) -> float:
        """Return how long a rank's host stands before it launches a forward or backward."""
        return sum(each.ms * 1e6 for each in self._of(step, "host") if rank in each.ranks)

    def pause_ns(self, rank: int, step: int) -> tuple[float, bool]:
        """Return how long a rank's host pauses before a forward, and whether a span tells."""
        del rank
        for each in self._of(step, "gc"):
            if self._chance.random() < each.share:
                return each.ms * 1e6 * (0.7 + 0.6 * self._chance.random()), each.told
        return 0.0, False

    def before_reduce_ns(self, rank: int, step: int) -> float:
        """Return how late a rank launches the gradients' reduction."""
        total = 0.0
        for each in self._of(step, "skew"):
            if rank in each.ranks and self._chance.random() < 0.5:
                growth = (step - each.first + 1) / 10
                total += each.ms * 1e6 * min(growth, 1.0) * self._chance.random()
        return total
