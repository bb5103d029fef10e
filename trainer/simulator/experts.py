"""Where tokens go: the router sends some experts more of them than others, so these compute longer.

Expert-parallel partners are neighbours on the dp axis: with ``ep`` of them,
positions 0 to ep - 1 are one group, the next ep positions another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .chance import Purpose, stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .scenario import Scenario


def draw_loads(scenario: Scenario, step: int) -> NDArray[np.float64] | None:
    """Draw the tokens that each expert-parallel rank gets in a step, 1.0 an equal share.

    ::

        load = ep * weight * exp(spread * normal) / the group's sum of that

    Args:
        scenario: Sizes, lasting weights, spread and seed.
        step: The step.

    Returns:
        Shape (pp, chunks, micro-batches, dp), alike in forward and backward and on
        all partners of a dp position; None without expert parallelism.
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
