"""Random numbers: one stream for each purpose.

Scenarios that differ only in their faults have equal noise, so the run without the fault shows what
the fault costs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .scenario import Noise

Shape = tuple[int, ...]


class Purpose(IntEnum):
    """Purposes of random numbers."""

    RANKS = 0
    ITEMS = 1
    LENGTHS = 2
    PAUSES = 3
    NETWORK = 4
    CLOCKS = 5
    SAMPLES = 6
    ENDING = 7
    EXPERTS = 8
    TOKENS = 9


def stream(seed: int, purpose: Purpose, *more: int) -> np.random.Generator:
    """Return the random generator of one purpose, fault and step; equal for equal arguments."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, purpose, *more))))


class ItemNoise:
    """Noise of the items and transfers of one step.

    Noise that is turned off draws no random numbers.
    """

    def __init__(self, noise: Noise, rng: np.random.Generator) -> None:
        self._noise = noise
        self._rng = rng

    def compute_ns(self, mean_ns: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return random durations of compute, by their means."""
        sigma = self._noise.compute_jitter_ratio
        if sigma:
            mean_ns = mean_ns * (1 + sigma * self._rng.standard_normal(mean_ns.shape))
        return np.rint(np.maximum(mean_ns, 0)).astype(np.int64)

    def transfer_ns(self, mean_ns: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return random durations of transfers, by their medians."""
        sigma = self._noise.transfer_jitter_ratio
        if sigma:
            mean_ns = mean_ns * np.exp(sigma * self._rng.standard_normal(mean_ns.shape))
        return np.rint(mean_ns).astype(np.int64)

    def launch_gap_ns(self, shape: Shape) -> NDArray[np.int64]:
        """Return random gaps before compute."""
        return self._exponential(self._noise.launch_gap_ns, shape)

    def end_ns(self, shape: Shape) -> NDArray[np.int64]:
        """Return the random delay of each member after the end of a transfer."""
        return self._exponential(self._noise.end_jitter_ns, shape)

    def _exponential(self, mean_ns: int, shape: Shape) -> NDArray[np.int64]:
        if not mean_ns:
            return np.zeros(shape, dtype=np.int64)
        return (mean_ns * self._rng.standard_exponential(shape)).astype(np.int64)
