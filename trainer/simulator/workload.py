"""Workload of micro-batches: sequence lengths and the tokens of experts.

Attention costs the square of a sequence's length, so compute varies with it. Expert-parallel
partners are neighbours on the dp axis: with ``ep`` of them, positions 0 to ep - 1 are one group,
the next ep positions another.
"""

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
"""Number of equal sequences in a typical micro-batch."""

MIN_FACTOR = 1 - SQUARED_SHARE + SQUARED_SHARE / 8
MAX_FACTOR = 1 - SQUARED_SHARE + SQUARED_SHARE * SEQUENCES_PER_MICROBATCH
"""A micro-batch of one sequence, which has the largest sum of squared lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Sequence lengths of the micro-batches of a step."""

    factor: NDArray[np.float64]
    """Shape (micro-batches, dp): compute over that of a typical micro-batch, in forward and
    backward, on all stages and partners."""

    sum_squared_lengths: NDArray[np.int64]
    """Of the same shape, tokens squared."""

    num_tokens: int
    """Tokens of each micro-batch of the step."""


def draw_lengths(scenario: Scenario, step: int, *, spread: float) -> Lengths:
    """Return random lengths for the micro-batches of a step, with equal tokens in each.

    ``spread`` is the standard deviation of the logarithm of::

        factor = (1 - SQUARED_SHARE + SQUARED_SHARE * squares / typical squares) * batch
    """
    shape = (scenario.num_microbatches, scenario.dp)
    typical = scenario.tokens_per_microbatch**2 / SEQUENCES_PER_MICROBATCH
    rng = stream(scenario.seed, Purpose.LENGTHS, step)
    drawn = np.exp(spread * rng.standard_normal(shape))
    factor = np.clip(drawn, MIN_FACTOR, MAX_FACTOR)
    squares = (factor - (1 - SQUARED_SHARE)) / SQUARED_SHARE * typical
    batch = _draw_batch(scenario, step)
    return Lengths(
        factor=factor * batch,
        sum_squared_lengths=np.rint(squares * batch).astype(np.int64),
        num_tokens=round(scenario.tokens_per_microbatch * batch),
    )


def _draw_batch(scenario: Scenario, step: int) -> float:
    """Return the tokens of a step over those of a typical one: more sequences, equally long."""
    noise = scenario.noise
    if not noise.token_spread:
        return 1.0
    rng = stream(scenario.seed, Purpose.TOKENS, step // noise.token_period_steps)
    return float(np.exp(noise.token_spread * rng.standard_normal()))


def draw_loads(scenario: Scenario, step: int) -> NDArray[np.float64] | None:
    """Return the random load of each expert-parallel rank in a step; 1.0 is an equal share.

    ::

        load = ep * weight * exp(spread * normal) / the group's sum of that

    Returns:
        Shape (pp, chunks, micro-batches, dp), equal in forward and backward and on all partners
        of a dp position; None without expert parallelism.
    """
    if scenario.ep == 1:
        return None
    ep = scenario.ep
    shape = (scenario.pp, scenario.vpp, scenario.num_microbatches, scenario.dp // ep, ep)
    drawn = np.broadcast_to(np.array(scenario.expert_weights or (1.0,) * ep), shape)
    if scenario.noise.expert_spread:
        rng = stream(scenario.seed, Purpose.EXPERTS, step)
        drawn = drawn * np.exp(scenario.noise.expert_spread * rng.standard_normal(shape))
    loads: NDArray[np.float64] = drawn / drawn.mean(axis=-1, keepdims=True)
    return loads.reshape(*shape[:3], scenario.dp)
