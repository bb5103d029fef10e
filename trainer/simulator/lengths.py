"""What micro-batches hold: attention costs the square of a sequence's length, so compute varies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .chance import Purpose, stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .scenario import Scenario

SQUARED_SHARE = 0.5
"""Share of a typical micro-batch's compute that grows with the sum of squared lengths."""

SEQUENCES_PER_MICROBATCH = 4
"""Equal sequences of which a typical micro-batch is packed."""

LEAST_FACTOR = 1 - SQUARED_SHARE + SQUARED_SHARE / 8
MOST_FACTOR = 1 - SQUARED_SHARE + SQUARED_SHARE * SEQUENCES_PER_MICROBATCH
"""A micro-batch of one whole sequence: its squared length is the largest there can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The micro-batches of a step."""

    factor: NDArray[np.float64]
    """Shape (micro-batches, dp): how many times as long compute takes as for a typical one, in
    forward and backward alike, on all stages and partners."""

    sum_squared_lengths: NDArray[np.int64]
    """Of the same shape."""


def draw_lengths(scenario: Scenario, step: int, *, spread: float) -> Lengths:
    """Draw the lengths of a step's micro-batches, equal tokens in each.

    ::

        factor = 1 - SQUARED_SHARE + SQUARED_SHARE * squares / typical squares

    Args:
        scenario: Sizes and seed.
        step: The step.
        spread: Standard deviation of the factor's logarithm; 0: all are typical.
    """
    shape = (scenario.num_microbatches, scenario.dp)
    typical = scenario.tokens_per_microbatch**2 / SEQUENCES_PER_MICROBATCH
    rng = stream(scenario.seed, Purpose.LENGTHS, step)
    drawn = np.exp(spread * rng.standard_normal(shape))
    factor = np.clip(drawn, LEAST_FACTOR, MOST_FACTOR)
    squares = (factor - (1 - SQUARED_SHARE)) / SQUARED_SHARE * typical
    return Lengths(factor=factor, sum_squared_lengths=np.rint(squares).astype(np.int64))
