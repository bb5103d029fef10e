"""Phases: consecutive steps in which a row of a matrix (a rank, a link, ...) is above the noise.

A row holds, step by step, how much longer something took than expected: 0.1 for 10 %. A *lasting*
phase has `min_lasting_steps` steps or more. A *short* one must also exceed what any other row ever
shows. A *recurring* one has slow steps between usual ones: at one distance, or too many for chance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.group_stats import lower_medians, row_medians
from ..report.text import format_ordinal, format_steps
from .baseline import clear_levels
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

    recurs: bool = False
    """Whether it is a recurring phase."""

    @property
    def num_steps(self) -> int:
        """Columns from the first to the last."""
        return self.last - self.first + 1

    @property
    def inside(self) -> slice:
        """Columns from the first to the last."""
        return slice(self.first, self.last + 1)

    @property
    def shown(self) -> list[int]:
        """Columns above the noise."""
        return list(self.columns or range(self.first, self.last + 1))

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

    def when(self, numbers: NDArray[np.int32]) -> str:
        """Return its steps in words: "in every 4th step (steps 12 to 56)"."""
        shown, steps = self.shown_steps(numbers), self.steps(numbers)
        if shown is None or len(shown) == self.num_steps:
            return f"in {format_steps(steps)}"
        period = find_period(np.array(shown))
        if period:
            return f"in every {format_ordinal(period)} step ({format_steps(steps)})"
        return f"in {len(shown)} of the {self.num_steps} {format_steps(steps)}"


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
        may_recur: Whether recurring phases are searched, first of all, and the short phases of a
            row are one: from the first of its slow steps to the last, with only these steps in
            `Phase.columns`.

    Returns:
        By row, ascending.
    """
    few = np.broadcast_to(has_few_peers, len(excess))
    partners = np.arange(len(excess)) if partners is None else partners
    recurring = _recurring_phases(excess, partners) if may_recur else ()
    if recurring:
        usual = excess.copy()
        for phase in recurring:
            usual[phase.row, phase.shown] = np.nan
        between = find_phases(
            usual,
            has_few_peers=few,
            partners=partners,
            min_steps=THRESHOLDS.min_lasting_steps,
            deviation=deviation,
            may_vary=may_vary,
        )
        recurring = tuple(phase for phase in recurring if not _lasts(phase, between, usual))
    if recurring:
        # What recurs on one row is no noise to the others.
        excess = excess.copy()
        excess[[phase.row for phase in recurring]] = np.nan
    rows = np.flatnonzero(~np.isnan(excess).all(axis=1))
    excess, few, number = excess[rows], few[rows], partners[rows]
    together = find_slow_together(excess)
    if deviation is None:
        # Rows with few peers share what no baseline takes off: a step that is longer for all of
        # them changes each of them twice.
        num_levels = 2 if few.all() else 0
        deviation = step_deviation(np.where(together, np.nan, excess), num_levels=num_levels)
    if np.isnan(deviation):
        return recurring
    # Steps in which rows are slow together are no noise to others.
    alone = np.where(together, -np.inf, excess)
    lasting = _lasting_phases(excess, few, deviation, _peer_peaks(alone, number), may_vary=may_vary)
    found = dict(lasting)
    if min_steps < THRESHOLDS.min_lasting_steps:
        others = np.array([row for row in range(len(rows)) if row not in lasting], dtype=np.int64)
        peaks = _peer_peaks(alone[others], number[others])
        deviations = required_deviations(excess.size)
        least = max(THRESHOLDS.min_excess_ratio, deviations * deviation)
        thresholds = np.maximum(least, peaks)
        for place in np.flatnonzero(np.nanmax(excess[others], axis=1) >= thresholds).tolist():
            row, threshold = int(others[place]), float(thresholds[place])
            found[row] = _short_phase(excess[row], deviation, threshold, may_recur=may_recur)
    others_found = (
        replace(phase, row=int(rows[row]))
        for row, phase in found.items()
        if phase.num_steps >= min_steps
    )
    return tuple(sorted((*recurring, *others_found), key=lambda phase: phase.row))


def _recurring_phases(
    excess: NDArray[np.float64], partners: NDArray[np.int64]
) -> tuple[Phase, ...]:
    """Return the rows whose steps have two levels in turn.

    A loader with one slow worker of four makes every fourth step long. The changes from step to
    step of few rows then are mostly that, so the noise is taken from the faster steps of each row.
    The slow steps belong to the row if they have one distance, or if alike rows that have them at
    random would leave so many to one of them with a chance of `chance_of_turns` at most, or if they
    cost `min_excess_ratio` over all steps and `peer_peak_factor` times what any other row loses so.
    Without one distance, they must also be above what half of the rows vary by: the faster steps of
    a row that is only noisy differ less than all of its steps do. Half of the rows may be at fault,
    each in steps of its own.
    """
    low, high, noise = clear_levels(excess)
    limit = (low + high) / 2
    is_slow = excess >= limit[:, None]
    if np.isnan(noise).all():
        return ()
    noise = np.fmax(noise, np.nanmedian(noise))
    threshold = required_deviations(excess.size) * noise
    threshold = np.maximum(threshold, THRESHOLDS.min_excess_ratio)
    is_far = np.minimum(high, high - low) >= threshold
    is_far &= is_slow.sum(axis=1) >= THRESHOLDS.min_lasting_steps
    spread = row_medians(np.abs(excess - row_medians(excess)[:, None])) * DEVIATION_PER_MAD
    clear = required_deviations(excess.size) * float(lower_medians(spread[:, None])[0])
    found = []
    for row in np.flatnonzero(is_far).tolist():
        columns = np.flatnonzero(is_slow[row])
        known = ~np.isnan(excess[row, columns[0] : columns[-1] + 1])
        if len(columns) > THRESHOLDS.whole_share * np.count_nonzero(known):
            continue  # a lasting phase
        alike = excess >= limit[row]
        if not find_period(columns) and (
            high[row] - low[row] < clear
            or not (
                _is_of_one_row(row, alike, partners)
                or _costs_most(row, np.where(alike, excess, 0.0), partners)
            )
        ):
            continue
        found.append(
            Phase(
                row=row,
                first=int(columns[0]),
                last=int(columns[-1]),
                excess_ratio=float(high[row]),
                deviation=float(noise[row]),
                threshold=float(threshold[row]),
                columns=tuple(columns.tolist()),
                recurs=True,
            )
        )
    return tuple(found)


def _lasts(recurring: Phase, between: tuple[Phase, ...], usual: NDArray[np.float64]) -> bool:
    """Return whether a row is slow between the steps of its recurring phase, too.

    Args:
        between: Phases of the matrix without the slow steps of recurring phases.
        usual: That matrix; NaN where they are.
    """
    known = ~np.isnan(usual[recurring.row, recurring.inside])
    columns = (
        slice(max(phase.first - recurring.first, 0), max(phase.last - recurring.first + 1, 0))
        for phase in between
        if phase.row == recurring.row
    )
    least = THRESHOLDS.majority_share * np.count_nonzero(known)
    return any(np.count_nonzero(known[slow]) > least for slow in columns)


def _costs_most(row: int, lost: NDArray[np.float64], partners: NDArray[np.int64]) -> bool:
    """Return whether slow steps of a row cost much over all steps, and those of others less."""
    total = lost.sum(axis=1)
    others = total[partners != partners[row]]
    least = max(
        THRESHOLDS.min_excess_ratio * lost.shape[1],
        THRESHOLDS.peer_peak_factor * float(others.max(initial=0.0)),
    )
    return bool(len(others) and total[row] >= least)


def _is_of_one_row(row: int, is_slow: NDArray[np.bool_], partners: NDArray[np.int64]) -> bool:
    """Return whether slow steps are too many on one row for chance.

    Source:
        Binomial distribution: each of the slow steps is on any of the rows with equal chance;
        Bonferroni correction over the rows.
    """
    _, number = np.unique(partners, return_inverse=True)
    count = np.zeros(int(number.max()) + 1, dtype=np.int64)
    np.maximum.at(count, number, is_slow.sum(axis=1))
    own, num = int(count[number[row]]), len(count)
    others = np.delete(count, number[row])
    also = int((2 * others > own).sum())
    if 2 * (1 + also) > num:
        return False
    total, alike = own + int(others[2 * others <= own].sum()), num - also
    more = sum(comb(total, k) * (alike - 1) ** (total - k) for k in range(own, total + 1))
    return bool(num * more <= THRESHOLDS.chance_of_turns * alike**total)


def find_period(numbers: NDArray[np.integer]) -> int:
    """Return the distance at which numbers come, 0 if they have none.

    All are multiples of it from the first one on, most multiples are there (`whole_share`), and
    three distances agree at least.

    Args:
        numbers: Ascending steps or columns.
    """
    distances = np.diff(numbers)
    if len(distances) < THRESHOLDS.min_lasting_steps:
        return 0
    period = int(np.sort(distances)[(len(distances) - 1) // 2])
    is_regular = not (distances % period).any() and period > 1
    num = (numbers[-1] - numbers[0]) // period + 1
    return period if is_regular and len(numbers) >= THRESHOLDS.whole_share * num else 0


def _short_phase(
    excess: NDArray[np.float64], deviation: float, threshold: float, *, may_recur: bool
) -> Phase:
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

    Nothing is compared with a rank that is alone: what is around the job makes its steps longer
    too. So its phase follows `min_persistent_steps` steady steps and lasts as long, or it has
    `min_lasting_steps` steps at one distance of two or more; it is significant; and nine of ten of
    its steps are above nine of ten of the others.
    """
    phases = find_phases(excess, has_few_peers=has_few_peers, **options)
    if len(excess) > 1 or not phases:
        return phases
    (phase,) = phases
    series, columns = excess[0], list(phase.shown)
    others = np.delete(series, columns)
    distances = set(np.diff(columns).tolist())
    if distances == {1}:
        is_shown = min(len(columns), phase.first) >= THRESHOLDS.min_persistent_steps
    else:
        is_shown = len(columns) >= THRESHOLDS.min_lasting_steps and len(distances) == 1
    is_above = np.nanquantile(series[columns], 0.1) > np.nanquantile(others, 0.9)
    is_shown &= bool(is_above) and is_significant(series, phase, num_series=1)
    return phases if is_shown else ()


def is_significant(series: NDArray[np.float64], phase: Phase, *, num_series: int) -> bool:
    """Return whether a phase is slower than the other steps of its series, beyond chance.

    Two-sample t test with pooled variance. The critical value is raised for having tested every
    step of every series (Bonferroni), because some consecutive steps of a noisy series are always
    above its faster ones. Outliers widen the pooled deviation, so they only make the test stricter.

    Args:
        series: Shape (steps,): the value of one rank or link in each step; NaN if unknown.
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
