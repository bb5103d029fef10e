"""What the hosts' clocks read: the true time, and an error that wanders within its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .chance import Purpose, stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .scenario import Scenario

NS_PER_S = 1e9
SHORTEST_PERIOD_S, LONGEST_PERIOD_S = 300.0, 1_800.0
"""Of the wandering: temperature and the agent's corrections, minutes."""


KNOT_NS = 10_000_000_000
"""Time between two moments at which the error is computed; between them it is a straight line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClocks:
    """The clocks' errors after alignment, which no analysis is told.

    ::

        offset(t) = clock_error / 2 * sin(2 pi (t / period + phase))
    """

    clock_error_ns: int
    """Most by which two clocks differ."""

    period_s: NDArray[np.float64]
    """Shape (hosts,)."""

    phase: NDArray[np.float64]

    def offset_ns(self, at_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return how far each host's clock is ahead, shape (times, hosts).

        Args:
            at_ns: Shape (times,): true time from the run's start.
        """
        turn = at_ns[:, None] / NS_PER_S / self.period_s + self.phase
        offset: NDArray[np.float64] = self.clock_error_ns / 2 * np.sin(2 * np.pi * turn)
        return offset

    def read_ns(self, true_ns: NDArray[np.int64], host: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return what the clocks of ``host`` read at true times, of equal shape."""
        if not self.clock_error_ns or not len(true_ns):
            return true_ns
        first, last = int(true_ns.min()) // KNOT_NS, int(true_ns.max()) // KNOT_NS + 1
        offset = self.offset_ns(np.arange(first, last + 1) * KNOT_NS)
        knot, since = np.divmod(true_ns, KNOT_NS)
        before, after = offset[knot - first, host], offset[knot - first + 1, host]
        ahead = np.rint(before + (after - before) * (since / KNOT_NS))
        read: NDArray[np.int64] = true_ns + ahead.astype(np.int64)
        return read


def make_clocks(scenario: Scenario) -> HostClocks:
    """Draw the clocks of a scenario's hosts."""
    rng = stream(scenario.seed, Purpose.CLOCKS)
    return HostClocks(
        clock_error_ns=scenario.noise.clock_error_ns,
        period_s=rng.uniform(SHORTEST_PERIOD_S, LONGEST_PERIOD_S, scenario.num_hosts),
        phase=rng.random(scenario.num_hosts),
    )
