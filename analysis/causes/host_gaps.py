"""Host gaps as matrices over ranks and steps: the evidence for causes on hosts.

A host gap is time of a rank outside its compute in which it waited for no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import (
    BASELINE_QUANTILE,
    fast_quartile,
    lower_medians,
    row_medians,
    sum_cells,
)
from ..arrays.grouping import sorted_unique
from ..arrays.sorting import find_positions
from ..replay.model import Place
from ..report.text import format_duration, format_percent, format_ranks
from ..statistics.phases import find_phases
from ..statistics.thresholds import THRESHOLDS
from .candidate import ALONE, Candidate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..replay.model import GapItems
    from ..statistics.peers import ComputeProfile
    from ..statistics.phases import Phase
    from .detector import Cause

INPUT_PLACES = (Place.INPUT, Place.DATA)
WORKING_PLACES = (Place.FORWARD, Place.BACKWARD, Place.LAUNCH, Place.OTHER, Place.SPAN)

_NO_SAVES = np.zeros(0, dtype=np.int64)

Expected = Sequence[tuple[tuple[Place, ...], "NDArray[np.float64]"]]
"""Places in a step, and what a rank loses there: shape (ranks, steps), ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGaps:
    """The host gaps of a run, and where each is in the matrices over ranks and steps."""

    profile: ComputeProfile
    """Gives the matrices their rows (ranks) and columns (steps)."""

    gaps: GapItems
    row: NDArray[np.int64]
    """Shape (gaps,): row of the matrices; -1 if the rank has no compute in that step."""

    column: NDArray[np.int64]
    """Shape (gaps,)."""

    compute_ns: NDArray[np.float64]
    """Shape (ranks,): median own compute in a step, with the idle time inside of it, the unit in
    which gaps are judged."""

    duration_ns: NDArray[np.float64]
    """Shape (ops,): recorded durations of the replay's operations."""

    def total_ns(
        self, *places: Place, excluding: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Return the time lost in some places, shape (ranks, steps).

        Args:
            excluding: Shape (gaps,): gaps left out; None: none.
        """
        chosen = self.is_at(*places)
        if excluding is not None:
            chosen &= ~excluding
        shape = self.profile.total_ns.shape
        return sum_cells(shape, self.row[chosen], self.column[chosen], self.gaps.gap_ns[chosen])

    def is_at(self, *places: Place) -> NDArray[np.bool_]:
        """Return which gaps are in some places. Shape (gaps,)."""
        return np.isin(self.gaps.place, places) & (self.row >= 0)

    def part(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """Return the operations that hold chosen gaps, ascending; None if none does."""
        operation = self.gaps.operation[chosen]
        operation = operation[operation >= 0]
        return sorted_unique(operation) if len(operation) else None

    def fixed_ns(self, chosen: NDArray[np.bool_], expected: Expected = ()) -> NDArray[np.float64]:
        """Return the durations of the operations if chosen gaps were as long as expected.

        Args:
            chosen: Shape (gaps,).
            expected: What a rank loses in some places of a step; in all others nothing.

        Returns:
            Shape (ops,), ns: as recorded, except for operations that are a chosen gap.
        """
        fixed = self.duration_ns.copy()
        chosen = chosen & (self.gaps.operation >= 0) & (self.row >= 0)
        # An operation that holds the gap before a step has a duration of its own besides.
        chosen &= self.duration_ns[self.gaps.operation] == self.gaps.gap_ns
        fixed[self.gaps.operation[chosen]] = 0.0
        for places, level in expected:
            mine = chosen & self.is_at(*places)
            row, column, gap = self.row[mine], self.column[mine], self.gaps.gap_ns[mine]
            whole = np.maximum(sum_cells(level.shape, row, column, gap)[row, column], 1.0)
            fixed[self.gaps.operation[mine]] = level[row, column] * gap / whole
        return fixed


def tabulate_gaps(
    profile: ComputeProfile, gaps: GapItems, duration_ns: NDArray[np.float64]
) -> HostGaps:
    """Arrange a run's host gaps by the ranks and steps of its compute profile.

    Args:
        duration_ns: Shape (ops,): recorded durations of the replay's operations.
    """
    at = np.minimum(find_positions(gaps.rank, profile.ranks), len(profile.ranks) - 1)
    column = np.minimum(find_positions(gaps.step, profile.steps), len(profile.steps) - 1)
    is_known = (profile.ranks[at] == gaps.rank) & (profile.steps[column] == gaps.step)
    row = np.where(is_known, at, -1)
    in_compute = is_known & (False if gaps.in_compute is None else gaps.in_compute)
    idle_ns = sum_cells(
        profile.total_ns.shape, row[in_compute], column[in_compute], gaps.gap_ns[in_compute]
    )
    return HostGaps(
        profile=profile,
        gaps=gaps,
        row=row,
        column=column,
        compute_ns=row_medians(profile.total_ns + idle_ns),
        duration_ns=duration_ns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonPauses:
    """Steps in which nearly all ranks pause at once: checkpoints, evaluations, missing input."""

    columns: NDArray[np.int64]
    """Columns of these steps, ascending."""

    is_planned: NDArray[np.bool_]
    """Shape (pauses,): whether it is a checkpoint or an evaluation, not missing input."""

    is_saved: NDArray[np.bool_]
    """Shape (pauses,): whether a ``checkpoint`` span or event was recorded in it."""

    in_evaluation: NDArray[np.bool_]
    """Shape (pauses,): whether most of it is around forwards without gradients."""

    lost_ns: NDArray[np.float64]
    """Shape (ranks, steps): time lost beyond the rank's median."""

    other_steps: NDArray[np.bool_]
    """Shape (steps,): steps without a common pause."""

    places: NDArray[np.bool_]
    """Shape (places, steps): where in its step a common pause is."""

    covers_gap: NDArray[np.bool_]
    """Shape (gaps,): gaps that are part of a common pause."""


def find_common_pauses(gaps: HostGaps, saves: NDArray[np.int64] = _NO_SAVES) -> CommonPauses:
    """Find the steps in which nearly all ranks pause at once.

    Pauses in ``checkpoint`` spans, pauses around an evaluation or after a step's compute, and
    pauses of one length at equal distances are planned. The others are missing input.

    Args:
        saves: Numbers of the steps with a ``checkpoint`` event.
    """
    inside, evaluating, data = (
        gaps.total_ns(place) for place in (Place.CHECKPOINT, Place.EVALUATION, Place.DATA)
    )
    before, after = gaps.total_ns(*INPUT_PLACES), gaps.total_ns(*WORKING_PLACES)
    unusual = _above_median(before) + _above_median(after)
    lost = inside + evaluating + unusual

    def is_common(lost_ns: NDArray[np.float64]) -> NDArray[np.bool_]:
        late = lost_ns / gaps.compute_ns[:, None] >= THRESHOLDS.min_excess_ratio
        steps: NDArray[np.bool_] = late.mean(axis=0) >= THRESHOLDS.whole_share
        return steps

    columns = np.flatnonzero(is_common(lost))

    def median_of_ranks(value: NDArray[np.float64]) -> NDArray[np.float64]:
        return row_medians(value[:, columns].T)

    in_evaluation = median_of_ranks(evaluating) > median_of_ranks(inside + unusual)
    in_data = median_of_ranks(_above_median(data)) > median_of_ranks(lost) / 2
    # One rank may save for all: its spans are as long as the pause. But if the others are in their
    # loaders then, they wait for these: an epoch ends with a save, and the next one starts them.
    is_saved = inside[:, columns].max(axis=0, initial=0.0) >= median_of_ranks(lost) / 2
    is_saved |= np.isin(gaps.profile.steps[columns], saves)
    is_saved &= ~in_data
    planned = is_saved | in_evaluation | (median_of_ranks(after) > median_of_ranks(before))
    is_alone = len(lost) == 1  # It can only pause on its own, unless that is planned.
    kept = is_saved | in_evaluation | (not is_alone)
    for chosen in _split_by_length(median_of_ranks(lost), (~planned | is_alone) & ~in_data):
        is_series = len(chosen) >= THRESHOLDS.min_lasting_steps or not is_alone
        planned[chosen] = _is_regular(columns[chosen]) and is_series
        kept[chosen] |= planned[chosen]
    columns, planned, is_saved, in_evaluation = (
        values[kept] for values in (columns, planned, is_saved, in_evaluation)
    )
    whole = _above_median(before + after + inside + evaluating)
    other_steps = ~is_common(whole) | (len(columns) == 0)
    if is_alone:
        other_steps = ~np.isin(np.arange(lost.shape[1]), columns)
    places = _find_places(gaps, other_steps)
    return CommonPauses(
        columns=columns,
        is_planned=planned,
        is_saved=is_saved,
        in_evaluation=in_evaluation,
        lost_ns=lost,
        other_steps=other_steps,
        places=places,
        covers_gap=places[gaps.gaps.place, gaps.column],
    )


def _above_median(value: NDArray[np.float64]) -> NDArray[np.float64]:
    return value - row_medians(value)[:, None]


def _split_by_length(
    lost_ns: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> list[NDArray[np.int64]]:
    """Return the chosen pauses in classes of one length (`peer_peak_factor`), as indices."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return []
    rows = rows[np.argsort(lost_ns[rows])]
    is_longer = lost_ns[rows[1:]] > THRESHOLDS.peer_peak_factor * lost_ns[rows[:-1]]
    return [np.sort(part) for part in np.split(rows, np.flatnonzero(is_longer) + 1)]


def _is_regular(columns: NDArray[np.int64]) -> bool:
    """Return whether pauses come at equal distances of two steps or more.

    One or two pauses may belong to such a series, so they count as regular.
    """
    distances = np.unique(np.diff(columns))
    return len(distances) <= 1 and bool((distances > 1).all())


def _find_places(gaps: HostGaps, other_steps: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where in their steps the common pauses are; other places remain evidence.

    Returns:
        Shape (places, steps): True if the median rank loses at least half of `min_excess_ratio`
        there; True everywhere in a step in which no single place loses as much.
    """
    has_pause = np.zeros((len(Place), len(other_steps)), dtype=np.bool_)
    for place in Place:
        lost = gaps.total_ns(place)
        lost -= fast_quartile(lost)
        has_pause[place] = (
            lower_medians(lost / gaps.compute_ns[:, None]) >= THRESHOLDS.min_excess_ratio / 2
        )
    has_pause[:, other_steps] = False
    has_pause[:, ~other_steps & ~has_pause.any(axis=0)] = True
    return has_pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Time that ranks lose for one reason, and where."""

    cause: Cause
    activity: str
    """As in "loses 20.0 ms per step waiting for input"."""

    lost_ns: NDArray[np.float64]
    """Shape (ranks, steps)."""

    chosen: NDArray[np.bool_]
    """Shape (gaps,): the gaps that a fix would shorten, of all ranks and steps."""

    expected: Expected
    """What a rank loses in time that is not late."""

    steps: NDArray[np.bool_]
    """Shape (steps,): steps that are searched."""

    is_zero_usual: bool
    """Whether a healthy rank loses nothing, so that what all stages lose in every step counts."""


def late_candidates(
    gaps: HostGaps, loss: Loss, single: Sequence[Phase], activities: Mapping[int, str] | None = None
) -> tuple[Candidate, ...]:
    """Return late ranks, and stages most of whose ranks are late, as candidates.

    Args:
        single: Phases of late ranks, whose rows are those of the matrices. They are not named with
            their stage again.
        activities: By row, what it does, if not the loss's activity.
    """
    candidates = []
    for phase in single:
        activity = (activities or {}).get(phase.row, loss.activity)
        of_rank = replace(loss, activity=activity)
        candidates.append(_late_candidate(gaps, of_rank, phase, [phase.row], loss.expected))
    named = {phase.row for phase in single}
    for phase, late in _late_stages(gaps, loss) if len(gaps.profile.ranks) > 1 else ():
        rows = [row for row in late if row not in named]
        if rows:
            candidates.append(_late_candidate(gaps, loss, phase, rows))
    return tuple(candidates)


def _late_stages(gaps: HostGaps, loss: Loss) -> Iterator[tuple[Phase, list[int]]]:
    """Yield the phases of stages most of whose ranks lose time, with the rows of these ranks.

    Those are the ranks that lose at least half of what the stage does. If a healthy rank loses time
    too, a stage is compared with the other stages, and the last one with its own faster steps: it
    may compute a loss outside its spans.
    """
    if not loss.steps.any():
        return
    ratio = loss.lost_ns / gaps.compute_ns[:, None]
    stages = np.unique(gaps.profile.stage)
    level = np.array([lower_medians(ratio[gaps.profile.stage == stage]) for stage in stages])
    excess = level.copy()
    if not loss.is_zero_usual:
        for index in range(len(stages) - 1):
            excess[index] -= lower_medians(np.delete(level, index, axis=0))
        excess[-1] -= np.quantile(level[-1], BASELINE_QUANTILE)
    excess[:, ~loss.steps] = np.nan
    for phase in find_phases(excess, has_few_peers=True, min_steps=THRESHOLDS.min_lasting_steps):
        is_late = row_medians(ratio[:, phase.inside]) >= phase.excess_ratio / 2
        is_late &= gaps.profile.stage == stages[phase.row]
        yield phase, np.flatnonzero(is_late).tolist()


def _usual_ns(
    gaps: HostGaps,
    expected: Expected,
    rows: NDArray[np.int64],
    columns: list[int],
    *,
    lost_ns: float,
) -> float:
    """Return what peers lose in the places in which some ranks lose more than they."""
    peers = np.setdiff1d(
        np.flatnonzero(np.isin(gaps.profile.stage, gaps.profile.stage[rows])), rows
    )
    if not len(peers):
        return 0.0
    usual_ns = 0.0
    for places, _ in expected:
        total_ns = gaps.total_ns(*places)[:, columns]
        own, usual = (float(lower_medians(total_ns[chosen].ravel())) for chosen in (rows, peers))
        if own - usual >= THRESHOLDS.min_excess_ratio * lost_ns:
            usual_ns += usual
    return usual_ns


def _late_candidate(
    gaps: HostGaps, loss: Loss, phase: Phase, rows: list[int], expected: Expected = ()
) -> Candidate:
    profile = gaps.profile
    columns = phase.shown
    steps = phase.steps(profile.steps)
    chosen = loss.chosen & np.isin(gaps.row, rows) & np.isin(gaps.column, columns)
    compute_ns = float(np.median(gaps.compute_ns[rows]))
    lost_ns, peers = phase.excess_ratio * compute_ns, ALONE
    usual_ns = _usual_ns(gaps, expected, np.array(rows), columns, lost_ns=lost_ns)
    if usual_ns >= THRESHOLDS.min_excess_ratio * lost_ns:
        lost_ns, peers = lost_ns + usual_ns, f"; its peers lose {format_duration(usual_ns)}"
    share = format_percent(lost_ns / compute_ns)
    ranks = tuple(sorted(profile.ranks[rows].tolist()))
    several = len(rows) > 1
    return Candidate(
        cause=loss.cause,
        ranks=ranks,
        steps=steps,
        part=gaps.part(chosen),
        gaps=chosen,
        excess_ratio=phase.excess_ratio,
        threshold=max(phase.threshold, THRESHOLDS.min_excess_ratio if several else 0.0),
        evidence=(
            f"{format_ranks(ranks)} {'lose' if several else 'loses'} {format_duration(lost_ns)}"
            f"{'' if phase.recurs else ' per step'} {loss.activity} ({share} of the compute)"
            f" {phase.when(profile.steps)}"
            f"{'' if several or len(profile.ranks) == 1 else peers}"
        ),
        on_host=True,
        fixed_ns=gaps.fixed_ns(chosen, expected),
        is_everywhere=several,
        shown_steps=phase.shown_steps(profile.steps),
    )
