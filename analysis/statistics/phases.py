"""Phases: consecutive steps in which a row of a matrix (a rank, a link, ...) is above the noise.

A row holds, step by step, how much longer something took than expected: 0.1 for 10 %. A *lasting*
phase has `min_lasting_steps` steps or more. A *short* one must also exceed what any other row ever
shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.group_stats import row_medians
from .noise import (
    DEVIATION_PER_MAD,
    are_usual,
    find_slow_together,
    required_deviations,
    required_t,
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


def find_phases(  # noqa: PLR0913  # a matrix, and what is known of its rows
    excess: NDArray[np.float64],
    *,
    has_few_peers: NDArray[np.bool_] | bool = False,
    partners: NDArray[np.int64] | None = None,
    min_steps: int = 1,
    deviation: float | None = None,
    may_vary: bool = False,
    may_recur: bool = False,
) -> tuple[Phase, ...]:
    """Find the rows that are above the noise, for long or in some steps; one phase a row.

    Lasting phases are searched first. The rows without one then show how high a short phase of
    another row must be.

    Args:
        excess: Shape (rows, steps); NaN if unknown.
        has_few_peers: Rows with so few peers that only a larger excess counts: shape (rows,), or
            the same for all.
        partners: Shape (rows,): rows of equal number show the same thing, so none of them is noise
            to another; None: no two do.
        min_steps: Leave out shorter phases.
        deviation: Robust deviation of the noise; None: estimate it from the changes between steps.
        may_vary: Whether changes within a phase belong to it, rather than to the noise.
        may_recur: Whether the short phases of a row are one: a row that is slow in every seventh
            step has one from the first of these steps to the last, with only these steps in
            `Phase.columns`.

    Returns:
        By row, ascending.
    """
    few = np.broadcast_to(has_few_peers, len(excess))
    rows = np.flatnonzero(~np.isnan(excess).all(axis=1))
    excess, few = excess[rows], few[rows]
    together = find_slow_together(excess)
    if deviation is None:
        # Rows with few peers share what no baseline takes off: a step that is longer for all of
        # them changes each of them twice.
        num_levels = 2 if few.all() else 0
        deviation = step_deviation(np.where(together, np.nan, excess), num_levels=num_levels)
    if np.isnan(deviation):
        return ()
    number = np.arange(len(rows)) if partners is None else partners[rows]
    # Steps in which rows are slow together are no noise to others.
    alone = np.where(together, -np.inf, excess)
    lasting = _lasting_phases(excess, few, deviation, _peer_peaks(alone, number), may_vary=may_vary)
    found = dict(lasting)
    if min_steps < THRESHOLDS.min_lasting_steps:
        others = np.array([row for row in range(len(rows)) if row not in lasting], dtype=np.int64)
        peaks = _peer_peaks(alone[others], number[others])
        deviations = required_deviations(excess.size)
        least = max(THRESHOLDS.min_excess_ratio, deviations * deviation)
        for row, threshold in zip(others.tolist(), np.maximum(least, peaks).tolist(), strict=True):
            if np.nanmax(excess[row]) >= threshold:
                found[row] = _short_phase(excess[row], deviation, threshold, may_recur=may_recur)
    return tuple(
        replace(found[row], row=int(rows[row]))
        for row in sorted(found)
        if found[row].num_steps >= min_steps
    )


def _short_phase(
    excess: NDArray[np.float64], deviation: float, threshold: float, *, may_recur: bool
) -> Phase:
    """Return the steps of one row that are above a threshold, and those around them."""
    (first,), (last,) = max_subarrays(excess[None] - threshold / 2)
    columns = np.arange(first, last + 1)
    if may_recur:
        known = np.nan_to_num(excess, nan=-np.inf)
        if np.nanmedian(excess[columns]) < threshold:
            # Steps far above the noise outweigh those between them, which are not above it.
            columns = columns[known[columns] >= threshold / 2]
        columns = np.union1d(np.flatnonzero(known >= threshold), columns)
    is_whole = len(columns) == columns[-1] - columns[0] + 1
    return Phase(
        row=0,
        first=int(columns[0]),
        last=int(columns[-1]),
        excess_ratio=float(np.nanmedian(excess[columns])),
        deviation=deviation,
        threshold=threshold,
        columns=None if is_whole else tuple(columns.tolist()),
    )


def _lasting_phases(
    excess: NDArray[np.float64],
    few: NDArray[np.bool_],
    deviation: float,
    peaks: NDArray[np.float64],
    *,
    may_vary: bool,
) -> dict[int, Phase]:
    """Return, by row, the lasting phase with the largest margin."""
    deviations = required_deviations(excess.size)
    between_rows = deviations * _deviation_of_others(row_medians(excess), excess.size)
    # Stages of unlike work, or a rank's own first steps, are too weak a baseline for less.
    persistent = np.where(few, THRESHOLDS.few_peers_persistent_ratio, THRESHOLDS.persistent_ratio)
    brief = np.maximum(persistent, np.where(few, np.inf, peaks))
    brief = np.minimum(brief, THRESHOLDS.min_excess_ratio)
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
        noise = np.maximum(0.0 if may_vary else spread, deviation)
        standard_error = MEDIAN_STANDARD_ERROR * noise / np.sqrt(np.maximum(num_steps, 1))
        threshold = np.where(num_steps >= THRESHOLDS.min_persistent_steps, persistent, brief)
        threshold = np.maximum(threshold, deviations * standard_error)
        threshold = np.maximum(threshold, between_rows)
        is_found = (num_steps >= THRESHOLDS.min_lasting_steps) & (middle >= threshold)
        for row in np.flatnonzero(is_found).tolist():
            found = Phase(
                row=row,
                first=int(first[row]),
                last=int(last[row]),
                excess_ratio=float(middle[row]),
                deviation=deviation,
                threshold=float(threshold[row]),
            )
            best[row] = max(best.get(row, found), found, key=lambda each: each.margin)
    return best


def _peer_peaks(excess: NDArray[np.float64], number: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `peer_peak_factor` times the highest excess of the other rows in any step.

    A few of them may be at fault and are left out. Rows of equal number are no others of each
    other, unless all are equal.

    Args:
        excess: Shape (rows, steps), without steps that do not count.
        number: Shape (rows,).
    """
    if not len(excess):
        return np.zeros(0)
    _, number = np.unique(number, return_inverse=True)
    if not number.any():
        number = np.arange(len(excess))
    peak = np.full(int(number.max()) + 1, -np.inf)
    np.maximum.at(peak, number, np.nanmax(excess, axis=1))
    highest = np.sort(peak)[::-1]
    allowed = min(int(THRESHOLDS.max_faulty_share * len(peak)), len(peak) - 1)
    others: NDArray[np.float64] = np.where(
        peak >= highest[allowed], np.append(highest, 0.0)[allowed + 1], highest[allowed]
    )
    return THRESHOLDS.peer_peak_factor * others[number]


def find_rank_phases(
    excess: NDArray[np.float64],
    *,
    has_few_peers: NDArray[np.bool_],
    **options: Any,  # noqa: ANN401
) -> tuple[Phase, ...]:
    """Find the ranks that are above the noise; see `find_phases`.

    Nothing is compared with a rank that is alone: what is around the job makes single steps longer
    too, and its level drifts. So its phase has `min_lasting_steps` consecutive steps, or as many at
    one distance, is significant, and leaves `min_persistent_steps` others to compare with.
    """
    phases = find_phases(excess, has_few_peers=has_few_peers, **options)
    if len(excess) > 1 or not phases:
        return phases
    (phase,) = phases
    columns = phase.columns or range(phase.first, phase.last + 1)
    is_shown = (
        len(columns) >= THRESHOLDS.min_lasting_steps
        and len(set(np.diff(columns).tolist())) == 1
        and int((~np.isnan(excess)).sum()) - len(columns) >= THRESHOLDS.min_persistent_steps
        and is_significant(excess[0], phase, num_series=1)
    )
    return phases if is_shown else ()


def is_significant(series: NDArray[np.float64], phase: Phase, *, num_series: int) -> bool:
    """Return whether a phase is slower than the other steps of its series, beyond chance.

    Two-sample t test with pooled variance. The critical value is raised for having tested every
    step of every series (Bonferroni), because some consecutive steps of a noisy series are always
    above its faster ones. Outliers widen the pooled deviation, so they only make the test stricter.

    Args:
        series: Shape (steps,): the value of one rank or link in each step; NaN if unknown.
        phase: The steps under test.
        num_series: Number of series that were searched for phases.

    Returns:
        False if fewer than `min_several` steps remain to compare with.

    Source:
        Student (1908); Bonferroni correction over ``num_series`` x steps tests.
    """
    columns = phase.inside if phase.columns is None else list(phase.columns)
    tested, baseline = series[columns], np.delete(series, columns)
    tested, baseline = tested[~np.isnan(tested)], baseline[~np.isnan(baseline)]
    if len(baseline) < THRESHOLDS.min_several:
        return False
    residuals = np.concatenate((tested - tested.mean(), baseline - baseline.mean()))
    standard_error = np.sqrt(1 / len(tested) + 1 / len(baseline))
    critical_t = required_t(num_series * len(series), degrees_of_freedom=len(residuals) - 2)
    threshold = critical_t * residuals.std(ddof=2)
    return bool(tested.mean() - baseline.mean() >= threshold * standard_error)


def max_subarrays(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each row, the (first, last) of the consecutive columns with the largest sum.

    Of values above a threshold, these are the steps of a slow phase: one fast step inside does not
    split it, and one slow step far away does not extend it.

    Args:
        values: Shape (rows, steps), at least one step; NaN counts as 0.

    Source:
        The maximum-sum subarray, as the largest rise of the cumulative sum.
    """
    after = np.cumsum(np.nan_to_num(values), axis=1)
    before = np.pad(after[:, :-1], ((0, 0), (1, 0)))
    last = np.argmax(after - np.minimum.accumulate(before, axis=1), axis=1)
    beyond = np.arange(values.shape[1]) > last[:, None]
    # The last of equal minima, so that nothing that sums to 0 comes first.
    lowest = np.argmin(np.where(beyond, np.inf, before)[:, ::-1], axis=1)
    return values.shape[1] - 1 - lowest, last


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
