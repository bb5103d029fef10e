"""Stages between which all links became slower together: nobody left there to compare with.

Links between the same two stages are held against each other. Where all of them share an uplink
that is slow, their median is as slow as they are. Two things still tell: what they take in their
other steps, and that links between other stages did not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import MATES_ENOUGH, row_medians
from ..statistics.baseline import LEAST_STEPS, usual_in_faster_steps
from ..statistics.noise import step_deviation
from ..statistics.phases import SHORT_STEPS, standing_out
from ..statistics.significance import error_of_level, stands_apart

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..statistics.phases import Phase

TOGETHER_SHARE = 0.8
"""Share of the links between two stages that must begin, and end, to be slow in the same step."""


def usual_where_risen(value: NDArray[np.float64], place: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return what links of one kind would take in steps in which all between two stages rose.

    That is the median of the links between these stages (one way) in its own faster steps, times
    what the links between other stages took over what they usually take. Where those rose as much,
    or fell instead, nothing of these links' own did; where they rose bit by bit, as the load of a
    shared network does, nothing became slow. So links that were slow from the first step
    on, and those of a job with one pair of stages, prove nothing.

    Args:
        value: Shape (links, steps): median transfer; NaN where unknown.
        place: Shape (links, 2): stages of the first and the last member.

    Returns:
        Same shape; NaN where nothing rose.
    """
    usual = np.full_like(value, np.nan)
    if value.shape[1] < SHORT_STEPS + LEAST_STEPS:
        return usual
    stages = np.sort(place, axis=1)
    ways, way = np.unique(place, axis=0, return_inverse=True)
    way = way.reshape(-1)
    for number, (low, high) in enumerate(np.sort(ways, axis=1).tolist()):
        rows = np.flatnonzero(way == number)
        others = np.flatnonzero((stages[:, 0] != low) | (stages[:, 1] != high))
        if len(rows) >= MATES_ENOUGH and len(others) >= MATES_ENOUGH:
            usual[rows] = _usual_of_one(value[rows], value[others], len(ways))
    return usual


def _usual_of_one(
    mine: NDArray[np.float64], others: NDArray[np.float64], num_ways: int
) -> NDArray[np.float64]:
    """Return what links between two stages, one way, should take; shape (steps,)."""
    relative = others / row_medians(others)[:, None]
    common = row_medians(relative.T)
    level = row_medians(mine.T)[None]
    even = level / common
    usual = usual_in_faster_steps(even)
    # Where the others fell, these links themselves did nothing.
    excess = np.minimum(even / usual, level / usual_in_faster_steps(level)) - 1.0
    # Links that change slowly, each by itself, lie close from step to step: that proves no level.
    own = error_of_level(mine / row_medians(mine)[:, None])
    error = float(np.hypot(own, error_of_level(relative)))
    phases = standing_out(
        excess,
        few=np.ones(1, dtype=np.bool_),
        shortest=SHORT_STEPS,
        deviation=max(step_deviation(relative / common - 1.0), error),
    )
    if (
        not phases
        or not _begin_and_end_together(mine / common, phases[0])
        or not stands_apart(excess[0], phases[0], num_rows=num_ways, least_deviation=error)
    ):
        return np.full(mine.shape[1], np.nan)
    column = np.arange(mine.shape[1])
    inside = (column >= phases[0].first) & (column <= phases[0].last)
    return np.where(inside, (usual * common)[0], np.nan)


def _begin_and_end_together(mine: NDArray[np.float64], phase: Phase) -> bool:
    """Tell links behind an uplink that became slow from those whose load rises and falls.

    Nearly all of them change by half of the excess, or more, from one step to the next.
    """
    relative = mine / usual_in_faster_steps(mine)
    for before in (phase.first - 1, phase.last):
        change = np.abs(relative[:, before + 1 : before + 2] - relative[:, before : before + 1])
        if before < 0 or not change.size or np.isnan(change).all():
            continue
        known = change[~np.isnan(change)]
        if (known >= phase.excess_ratio / 2).mean() < TOGETHER_SHARE:
            return False
    return True
