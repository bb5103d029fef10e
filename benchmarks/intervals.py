"""95 % intervals: of medians by bootstrap, of a slope by least squares."""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def interval(values: Sequence[float], *, rounds: int = 2_000) -> list[float]:
    """Return the 95 % bootstrap interval of the median of independent values."""
    dice = random.Random(7)
    return _interval(lambda: statistics.median(dice.choices(values, k=len(values))), rounds)


def interval_of_rounds(by_round: Sequence[Sequence[float]], *, rounds: int = 4_000) -> list[float]:
    """Return the same where values of one round resemble each other.

    Rounds are drawn first, then values within each (a two-stage cluster bootstrap, A. C. Davison
    and D. V. Hinkley, Bootstrap Methods and their Application, 1997, section 3.8).
    """
    dice = random.Random(7)

    def once() -> float:
        drawn = dice.choices(by_round, k=len(by_round))
        return statistics.median(v for values in drawn for v in dice.choices(values, k=len(values)))

    return _interval(once, rounds)


def _interval(median_of_one_draw: Callable[[], float], rounds: int) -> list[float]:
    medians = sorted(median_of_one_draw() for _ in range(rounds))
    return [medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]]


def growth(values: Sequence[float]) -> list[float] | None:
    """Return the slope of values that were taken one step apart, and half its 95 % interval.

    None where there are fewer than four. Neighbours that are alike make the interval too narrow:
    it says whether a slope is to be looked into.
    """
    taken = np.array(values, dtype=float)
    if len(taken) < 4:
        return None
    place = np.arange(len(taken)) - (len(taken) - 1) / 2
    slope = float(place @ taken / (place @ place))
    rest = taken - taken.mean() - slope * place
    error = float(np.sqrt(rest @ rest / (len(taken) - 2) / (place @ place)))
    return [round(slope, 2), round(1.96 * error, 2)]
