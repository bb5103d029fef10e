"""Phases: consecutive steps in which a row of a matrix (a rank, a link, ...) is above the noise.

A row holds, step by step, how much longer something took than expected: 0.1 for 10 %. A *lasting*
phase has `min_lasting_steps` steps or more. A *short* one must also exceed what any other row ever
shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from .noise import (
    DEVIATION_PER_MAD,
    are_usual,
    find_slow_together,
    required_deviations,
    robust_deviation,
    step_deviation,
)
from .thresholds import THRESHOLDS

if TYPE_CHECKING:
    from numpy.typing import NDArray


PHASE_LEVELS = (0.06, 0.2, 0.6)
"""Excesses for which phases are searched: half of each separates slow steps from usual ones."""

MEDIAN_STANDARD_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps of a row, columns ``first`` to ``last``, that are above the noise."""

    row: int
    first: int
    last: int
    excess_ratio: float
    """Median over the phase."""

    deviation: float
    """Robust deviation of the excess while nothing is wrong."""

    threshold: float
    """The excess that was required."""

    columns: tuple[int, ...] | None = None
    """The columns above the noise, if those between them are not; None: all of the phase."""

    @property
    def num_steps(self) -> int:
        """Columns from the first to the last."""
        return self.last - self.first + 1

    @property
    def inside(self) -> slice:
        """Columns from the first to the last."""
        return slice(self.first, self.last + 1)

    @property
    def margin(self) -> float:
        """The excess over its threshold, as a factor."""
        return self.excess_ratio / self.threshold

    def steps(self, numbers: NDArray[np.int32]) -> tuple[int, int]:
        """Return the first and the last step, given the number of each column."""
        return int(numbers[self.first]), int(numbers[self.last])

    def shown_steps(self, numbers: NDArray[np.int32]) -> tuple[int, ...] | None:
        """Return the steps above the noise, if those between them are not; None: all."""
        return None if self.columns is None else tuple(numbers[list(self.columns)].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """A matrix and what is known of its noise."""

    excess: NDArray[np.float64]
    """Shape (rows, steps); NaN if unknown."""

    has_few_peers: NDArray[np.bool_]
    """Shape (rows,)."""

    partners: NDArray[np.int64]
    """Shape (rows,)."""

    deviation: float
    deviations: float
    """Deviations that are significant in a matrix of this size."""

    slow_together: NDArray[np.bool_]
    """Shape (rows, steps)."""

    def phase(self, row: int, first: int, last: int, *, excess: float, threshold: float) -> Phase:
        return Phase(
            row=row,
            first=first,
            last=last,
            excess_ratio=excess,
            deviation=self.deviation,
            threshold=threshold,
        )


def find_phases(
    excess: NDArray[np.float64],
    *,
    has_few_peers: NDArray[np.bool_] | None = None,
    min_steps: int = 1,
    deviation: float | None = None,
    may_vary: bool = False,
) -> tuple[Phase, ...]:
    """Find the rows that are above the noise, for long or in some steps; one phase a row.

    Lasting phases are searched first. The rows without one then show how high a short phase of
    another row must be.

    Args:
        excess: Shape (rows, steps); NaN if unknown.
        has_few_peers: Shape (rows,): rows with so few peers that only `min_excess_ratio` counts.
        min_steps: Leave out shorter phases.
        deviation: Robust deviation of the noise; None: estimate it from the changes between steps.
        may_vary: Whether changes within a phase belong to it, rather than to the noise.

    Returns:
        By row, ascending.
    """
    lasting, short = _search(
        excess, has_few_peers=has_few_peers, deviation=deviation, may_vary=may_vary
    )
    found = (*lasting, *(short if min_steps < THRESHOLDS.min_lasting_steps else ()))
    return tuple(
        sorted((each for each in found if each.num_steps >= min_steps), key=lambda each: each.row)
    )


def find_recurring_phases(
    excess: NDArray[np.float64],
    *,
    has_few_peers: NDArray[np.bool_],
    partners: NDArray[np.int64] | None = None,
) -> tuple[Phase, ...]:
    """Find phases as `find_phases` does, and join the short ones of a row into one.

    A row that is slow in every seventh step has one phase from the first of these steps to the
    last, with only these steps in `Phase.columns`.

    Args:
        excess: Shape (rows, steps); NaN if unknown.
        has_few_peers: Shape (rows,): rows with so few peers that only `min_excess_ratio` counts.
        partners: Shape (rows,): rows of equal number show the same thing, so none of them is noise
            to another; None: no two do.
    """
    lasting, short = _search(excess, has_few_peers=has_few_peers, partners=partners)
    found = (*lasting, *(_joined(each, excess[each.row]) for each in short))
    return tuple(sorted(found, key=lambda each: each.row))


def _search(
    excess: NDArray[np.float64],
    *,
    has_few_peers: NDArray[np.bool_] | None = None,
    partners: NDArray[np.int64] | None = None,
    deviation: float | None = None,
    may_vary: bool = False,
) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """Return the lasting phases, and the short ones of all other rows."""
    known = np.flatnonzero(~np.isnan(excess).all(axis=1))
    slow_together = np.zeros(excess.shape, np.bool_)
    slow_together[known] = find_slow_together(excess[known])
    if deviation is None:
        deviation = step_deviation(np.where(slow_together, np.nan, excess)[known])
    if np.isnan(deviation):
        return (), ()
    num_rows = len(excess)
    search = _Search(
        excess=excess,
        has_few_peers=np.zeros(num_rows, np.bool_) if has_few_peers is None else has_few_peers,
        partners=np.arange(num_rows) if partners is None else partners,
        deviation=deviation,
        deviations=required_deviations(excess[known].size),
        slow_together=slow_together,
    )
    lasting = _lasting_phases(search, known, may_vary=may_vary)
    others = np.array([row for row in known.tolist() if row not in lasting], dtype=np.int64)
    return tuple(lasting.values()), _short_phases(search, others)


def _joined(phase: Phase, excess: NDArray[np.float64]) -> Phase:
    """Return a short phase with all other steps of its row that are as far above the noise."""
    known = np.nan_to_num(excess, nan=-np.inf)
    inside = np.arange(phase.first, phase.last + 1)
    if phase.excess_ratio < phase.threshold:
        # Steps far above the noise outweigh those between them, which are not above it.
        inside = inside[known[inside] >= phase.threshold / 2]
    columns = np.union1d(np.flatnonzero(known >= phase.threshold), inside)
    is_whole = len(columns) == columns[-1] - columns[0] + 1
    return replace(
        phase,
        first=int(columns[0]),
        last=int(columns[-1]),
        excess_ratio=float(np.nanmedian(excess[columns])),
        columns=None if is_whole else tuple(columns.tolist()),
    )


def _lasting_phases(
    search: _Search, rows: NDArray[np.int64], *, may_vary: bool
) -> dict[int, Phase]:
    """Return, by row, the lasting phase with the largest margin."""
    excess, few = search.excess[rows], search.has_few_peers[rows]
    between_rows = search.deviations * _deviation_of_others(row_medians(excess), excess.size)
    peer_peak = THRESHOLDS.peer_peak_factor * _highest_of_others(search, rows)
    best: dict[int, Phase] = {}
    for level in PHASE_LEVELS:
        first, last = max_subarrays(excess - level / 2)
        # Again at half of the excess that was found: that is where the phase begins and ends.
        middle = row_medians(_inside(excess, first, last))
        first, last = max_subarrays(excess - middle[:, None] / 2)
        phase = _inside(excess, first, last)
        num_steps = (~np.isnan(phase)).sum(axis=1)
        middle = row_medians(phase)
        spread = DEVIATION_PER_MAD * row_medians(np.abs(phase - middle[:, None]))
        if may_vary:
            spread = np.zeros_like(spread)
        standard_error = (
            MEDIAN_STANDARD_ERROR
            * np.maximum(spread, search.deviation)
            / np.sqrt(np.maximum(num_steps, 1))
        )
        # Stages of unlike work, or a rank's own first steps, are too weak a baseline for less.
        persistent = np.where(
            few, THRESHOLDS.few_peers_persistent_ratio, THRESHOLDS.persistent_ratio
        )
        above_peers = np.maximum(persistent, np.where(few, np.inf, peer_peak))
        brief = np.minimum(above_peers, THRESHOLDS.min_excess_ratio)
        threshold = np.where(num_steps >= THRESHOLDS.min_persistent_steps, persistent, brief)
        threshold = np.maximum(threshold, search.deviations * standard_error)
        threshold = np.maximum(threshold, between_rows)
        for k in np.flatnonzero(
            (num_steps >= THRESHOLDS.min_lasting_steps) & (middle >= threshold)
        ).tolist():
            row = int(rows[k])
            found = search.phase(
                row,
                int(first[k]),
                int(last[k]),
                excess=float(middle[k]),
                threshold=float(threshold[k]),
            )
            if row not in best or found.margin > best[row].margin:
                best[row] = found
    return best


def _short_phases(search: _Search, rows: NDArray[np.int64]) -> tuple[Phase, ...]:
    """Return the phases, of any length, that exceed what all other of these rows ever show."""
    if not len(rows):
        return ()
    excess = search.excess[rows]
    peak = np.nanmax(excess, axis=1)
    peer_peak = THRESHOLDS.peer_peak_factor * _highest_of_others(search, rows)
    least = max(THRESHOLDS.min_excess_ratio, search.deviations * search.deviation)
    thresholds = np.maximum(least, peer_peak)
    found = []
    for k in np.flatnonzero(peak >= thresholds).tolist():
        threshold = float(thresholds[k])
        (first,), (last,) = max_subarrays(excess[k][None] - threshold / 2)
        middle = float(np.nanmedian(excess[k][first : last + 1]))
        found.append(
            search.phase(int(rows[k]), int(first), int(last), excess=middle, threshold=threshold)
        )
    return tuple(found)


def _highest_of_others(search: _Search, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the highest excess of the other rows in any step, except a few that may be at fault.

    Rows of equal `partners` are no others of each other, unless all rows are partners. Steps in
    which rows are slow together do not count.

    Args:
        search: The matrix.
        rows: Shape (rows,): the rows to compare.
    """
    excess, partners = search.excess[rows], search.partners[rows]
    if not len(excess):
        return np.zeros(0)
    _, number = np.unique(partners, return_inverse=True)
    if not number.any():
        number = np.arange(len(excess))
    peak = np.full(int(number.max()) + 1, -np.inf)
    alone = np.where(search.slow_together[rows], -np.inf, excess)
    np.maximum.at(peak, number, np.nanmax(alone, axis=1))
    highest = np.sort(peak)[::-1]
    allowed = min(int(THRESHOLDS.max_faulty_share * len(peak)), len(peak) - 1)
    others: NDArray[np.float64] = np.where(
        peak >= highest[allowed], np.append(highest, 0.0)[allowed + 1], highest[allowed]
    )
    return others[number]


def max_subarrays(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each row, the (first, last) of the consecutive columns with the largest sum.

    Of values above a threshold, these are the steps of a slow phase: one fast step inside does not
    split it, and one slow step far away does not extend it.

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
    """Return the values between two columns of each row, and NaN outside."""
    column = np.arange(values.shape[1])
    inside = (column >= first[:, None]) & (column <= last[:, None])
    return np.where(inside, values, np.nan)


def _deviation_of_others(levels: NDArray[np.float64], num_samples: int) -> NDArray[np.float64]:
    """Return, for each row, the robust deviation between the levels of the other usual rows."""
    is_usual = are_usual(levels, num_samples=num_samples)
    usual = levels[is_usual]
    deviation = np.full(len(levels), robust_deviation(usual))
    if len(usual) <= THRESHOLDS.max_exact_rows:
        for place, row in enumerate(np.flatnonzero(is_usual).tolist()):
            others = np.delete(usual, place)
            deviation[row] = robust_deviation(others) if len(others) > 1 else 0.0
    if not is_usual.all():
        deviation[~is_usual] = np.maximum(deviation[~is_usual], usual.std(ddof=1))
    return deviation
