"""Rows of a matrix (ranks, links, ...) that stand out for a while, told from noise.

Each row holds, step by step, how much longer something took than expected
(0.1 for 10 %). What is looked for are *phases*: runs of steps in which a row
lies clear of the noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from .noise import DEVIATION_PER_MAD, required_deviations, robust_deviation, step_deviation

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_EXCESS_RATIO = 0.09
"""A measured excess from which a finding is due in even one step: what is 10 % (design.md section
5) may be measured a point lower."""

PERSISTENT_RATIO = 0.05
"""An excess below which not even a persistent one is told: healthy devices of one kind differ by
a few percent. Source: arXiv 2402.15627 calls machines slow from about 10 % on."""

FEW_PEERS_PERSISTENT_RATIO = 0.075
"""The same where there is little to compare with."""

MIN_PERSISTENT_STEPS = 5
"""Steps that an excess below `MIN_EXCESS_RATIO` must last; `MIN_LASTING_STEPS` where it stands
clear of what all other rows ever showed."""

MIN_LASTING_STEPS = 3
"""A phase shorter than this must also stand clear of what all other rows ever showed."""

PEER_PEAK_FACTOR = 1.5

MAX_FAULTY_SHARE = 0.005
"""Share of many rows that may be at fault at once: arXiv 2402.15627 saw as many slow machines."""

PHASE_LEVELS = (0.06, 0.2, 0.6)
"""Excesses at which a phase is looked for: half of one parts slow steps from usual ones."""

MEDIAN_STANDARD_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A row's steps, columns ``first`` to ``last``, that lie clear of the noise."""

    row: int
    first: int
    last: int
    excess_ratio: float
    """Median over the phase."""

    deviation: float
    """One robust deviation of the excess when nothing is wrong."""

    threshold: float
    """What the excess had to exceed."""

    columns: tuple[int, ...] | None = None
    """Columns that lie clear, where those between them do not; None: all."""

    @property
    def num_steps(self) -> int:
        """Columns of the phase."""
        return self.last - self.first + 1

    @property
    def margin(self) -> float:
        """How far the excess lies above its threshold, as a factor."""
        return self.excess_ratio / self.threshold


def find_phases(
    excess: NDArray[np.float64],
    *,
    has_few_peers: NDArray[np.bool_] | None = None,
    min_steps: int = 1,
    deviation: float | None = None,
    may_vary: bool = False,
) -> tuple[Phase, ...]:
    """Find the rows that stand out, lastingly or in some steps; one phase a row.

    Lasting phases are looked for first. What remains of the other rows then
    tells how far a short phase must stand out.

    Args:
        excess: Shape (rows, steps); NaN where unknown.
        has_few_peers: Shape (rows,): rows with so little to compare with that only
            `MIN_EXCESS_RATIO` counts.
        min_steps: Phases of fewer steps are not told.
        deviation: Of the noise, where it is known; None: from the changes between steps.
        may_vary: Whether a phase's own changes are part of it, and no noise.

    Returns:
        By row, ascending.
    """
    if deviation is None:
        deviation = step_deviation(excess[~np.isnan(excess).all(axis=1)])
    lasting, short = _phases(
        excess,
        has_few_peers=np.zeros(len(excess), dtype=np.bool_)
        if has_few_peers is None
        else has_few_peers,
        deviation=deviation,
        may_vary=may_vary,
        partners=np.arange(len(excess)),
    )
    found = (*lasting, *(short if min_steps < MIN_LASTING_STEPS else ()))
    return tuple(
        sorted((each for each in found if each.num_steps >= min_steps), key=lambda each: each.row)
    )


def find_recurring_phases(
    excess: NDArray[np.float64],
    *,
    has_few_peers: NDArray[np.bool_],
    partners: NDArray[np.int64] | None = None,
) -> tuple[Phase, ...]:
    """Find what `find_phases` does; short phases of one row are one, from the first to the last.

    Args:
        excess: Shape (rows, steps); NaN where unknown.
        has_few_peers: Shape (rows,): as there.
        partners: Shape (rows,): rows of equal number show the same thing, so what one shows says as
            little of the others' noise as of its own; None: no two do.
    """
    lasting, short = _phases(
        excess,
        has_few_peers=has_few_peers,
        deviation=step_deviation(excess[~np.isnan(excess).all(axis=1)]),
        may_vary=False,
        partners=np.arange(len(excess)) if partners is None else partners,
    )
    found = (*lasting, *(_recurring(each, excess[each.row]) for each in short))
    return tuple(sorted(found, key=lambda each: each.row))


def _phases(
    excess: NDArray[np.float64],
    *,
    has_few_peers: NDArray[np.bool_],
    deviation: float,
    may_vary: bool,
    partners: NDArray[np.int64],
) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """Return the lasting phases, and the short ones of all other rows."""
    known = np.flatnonzero(~np.isnan(excess).all(axis=1))
    if np.isnan(deviation):
        return (), ()
    clear = required_deviations(excess[known].size)
    lasting = _lasting(
        excess[known],
        has_few_peers[known],
        (deviation, clear),
        may_vary=may_vary,
        partners=partners[known],
    )
    found = {int(known[place]): phase for place, phase in lasting.items()}
    calm = np.array([row for row in known.tolist() if row not in found], dtype=np.int64)
    short = _short(excess, calm, (deviation, clear), partners)

    def phases(rows: dict[int, tuple[int, int, float, float]]) -> tuple[Phase, ...]:
        return tuple(
            Phase(
                row=row,
                first=first,
                last=last,
                excess_ratio=middle,
                deviation=deviation,
                threshold=threshold,
            )
            for row, (first, last, middle, threshold) in rows.items()
        )

    return phases(found), phases(short)


def _recurring(phase: Phase, excess: NDArray[np.float64]) -> Phase:
    """Return a short phase with all other steps of its row that lie as clear of the noise.

    What is slow in every seventh step began with the first and has not ended before the last.
    """
    known = np.nan_to_num(excess, nan=-np.inf)
    inside = np.arange(phase.first, phase.last + 1)
    if phase.excess_ratio < phase.threshold:
        # Steps far above the noise outweigh those between them, which do not show it.
        inside = inside[known[inside] >= phase.threshold / 2]
    shown = np.union1d(np.flatnonzero(known >= phase.threshold), inside)
    return replace(
        phase,
        first=int(shown[0]),
        last=int(shown[-1]),
        excess_ratio=float(np.nanmedian(excess[shown])),
        columns=None if len(shown) == shown[-1] - shown[0] + 1 else tuple(shown.tolist()),
    )


def _lasting(
    excess: NDArray[np.float64],
    has_few_peers: NDArray[np.bool_],
    noise: tuple[float, float],
    *,
    may_vary: bool,
    partners: NDArray[np.int64],
) -> dict[int, tuple[int, int, float, float]]:
    """Return (first, last, median, threshold) of each row's surest phase of several steps."""
    deviation, clear = noise
    between = _deviation_of_others(row_medians(excess))
    unseen = np.where(
        has_few_peers, np.inf, PEER_PEAK_FACTOR * _highest_of_others(excess, partners)
    )
    best: dict[int, tuple[int, int, float, float]] = {}
    for level in PHASE_LEVELS:
        first, last = max_subarrays(excess - level / 2)
        # Once more, at half of what was found: that is where it begins and ends.
        middle = row_medians(_inside(excess, first, last))
        first, last = max_subarrays(excess - middle[:, None] / 2)
        phase = _inside(excess, first, last)
        num = (~np.isnan(phase)).sum(axis=1)
        middle = row_medians(phase)
        spread = DEVIATION_PER_MAD * row_medians(np.abs(phase - middle[:, None]))
        if may_vary:
            spread = np.zeros_like(spread)
        error = MEDIAN_STANDARD_ERROR * np.maximum(spread, deviation) / np.sqrt(np.maximum(num, 1))
        # Unlike stages, or one rank's few first steps, are too thin a ground for little.
        least = np.where(has_few_peers, FEW_PEERS_PERSISTENT_RATIO, PERSISTENT_RATIO)
        brief = np.minimum(np.maximum(least, unseen), MIN_EXCESS_RATIO)
        least = np.where(num >= MIN_PERSISTENT_STEPS, least, brief)
        threshold = np.maximum(least, clear * error)
        threshold = np.maximum(threshold, clear * between)
        for row in np.flatnonzero((num >= MIN_LASTING_STEPS) & (middle >= threshold)).tolist():
            found = (int(first[row]), int(last[row]), float(middle[row]), float(threshold[row]))
            if row not in best or found[2] / found[3] > best[row][2] / best[row][3]:
                best[row] = found
    return best


def _short(
    excess: NDArray[np.float64],
    calm: NDArray[np.int64],
    noise: tuple[float, float],
    partners: NDArray[np.int64],
) -> dict[int, tuple[int, int, float, float]]:
    """Return (first, last, median, threshold) of the calm rows' steps that stand out of all."""
    if not len(calm):
        return {}
    deviation, clear = noise
    peak = np.nanmax(excess[calm], axis=1)
    others = _highest_of_others(excess[calm], partners[calm])
    threshold_of = np.maximum(max(MIN_EXCESS_RATIO, clear * deviation), PEER_PEAK_FACTOR * others)
    found = {}
    for place in np.flatnonzero(peak >= threshold_of).tolist():
        threshold = float(threshold_of[place])
        row = excess[calm[place]]
        (first,), (last,) = max_subarrays(row[None] - threshold / 2)
        middle = float(np.nanmedian(row[first : last + 1]))
        found[int(calm[place])] = (int(first), int(last), middle, threshold)
    return found


def _highest_of_others(
    excess: NDArray[np.float64], partners: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return what the other rows show at most in any step, but for a few that may be at fault.

    Args:
        excess: Shape (rows, steps).
        partners: Shape (rows,): rows of equal number are no others of each other.
    """
    if not len(excess):
        return np.zeros(0)
    _, number = np.unique(partners, return_inverse=True)
    if not number.any():
        number = np.arange(len(excess))  # All are partners: they have but each other.
    peak = np.full(int(number.max()) + 1, -np.inf)
    np.maximum.at(peak, number, np.nanmax(excess, axis=1))
    highest = np.sort(peak)[::-1]
    allowed = min(int(MAX_FAULTY_SHARE * len(peak)), len(peak) - 1)
    others: NDArray[np.float64] = np.where(
        peak >= highest[allowed], np.append(highest, 0.0)[allowed + 1], highest[allowed]
    )
    return others[number]


def max_subarrays(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each row, the (first, last) columns of the run with the largest sum.

    With values measured from a threshold this is where a slow phase begins
    and ends: a lone dip inside does not split it, a lone spike far away does
    not stretch it.

    Args:
        values: Shape (rows, steps), at least one step; NaN counts as 0.

    Source:
        Kadane's algorithm for the maximum-sum subarray, all rows at once.
    """
    num_rows, num_steps = values.shape
    known = np.nan_to_num(values)
    first = np.zeros(num_rows, dtype=np.int64)
    best_first, best_last = first.copy(), first.copy()
    running, best_sum = np.zeros(num_rows), np.full(num_rows, -np.inf)
    for step in range(num_steps):
        fresh = running <= 0.0
        first[fresh] = step
        running = np.where(fresh, 0.0, running) + known[:, step]
        better = running > best_sum
        best_first[better], best_last[better] = first[better], step
        best_sum = np.maximum(best_sum, running)
    return best_first, best_last


def _inside(
    values: NDArray[np.float64], first: NDArray[np.int64], last: NDArray[np.int64]
) -> NDArray[np.float64]:
    column = np.arange(values.shape[1])
    inside = (column >= first[:, None]) & (column <= last[:, None])
    return np.where(inside, values, np.nan)


def _deviation_of_others(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each row, the robust deviation between the other rows' levels.

    Among many rows one more or less changes neither median, so all rows share one.
    """
    few = 64
    if len(levels) > few:
        return np.full(len(levels), robust_deviation(levels))
    return np.array(
        [
            robust_deviation(np.delete(levels, row)) if len(levels) > 2 else 0.0  # noqa: PLR2004
            for row in range(len(levels))
        ]
    )
