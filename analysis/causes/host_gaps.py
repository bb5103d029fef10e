"""Host gaps as matrices over ranks and steps: what host causes are looked for in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import BASELINE_QUANTILE, fast_quartile, row_medians, sum_cells
from ..arrays.sorting import find_positions
from ..replay.model import Place
from ..report.text import format_duration, format_percent, format_ranks
from ..statistics.noise import deviation_without_jumps
from ..statistics.phases import MIN_EXCESS_RATIO, find_phases
from .candidate import Candidate
from .thresholds import ALL_RANKS_SHARE, HOST_STALL_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..replay.model import GapItems
    from ..statistics.peers import ComputeProfile
    from ..statistics.phases import Phase
    from .detector import Cause

INPUT_PLACES = (Place.INPUT, Place.DATA)

WORKING_PLACES = (Place.FORWARD, Place.BACKWARD, Place.LAUNCH, Place.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGaps:
    """Host gaps as matrices over the ranks and steps of a profile."""

    profile: ComputeProfile
    gaps: GapItems
    row: NDArray[np.int64]
    """Shape (gaps,): row of the profile, -1 for a rank or a step without compute."""

    column: NDArray[np.int64]
    compute_ns: NDArray[np.float64]
    """Shape (ranks,): usual own compute in a step, what gaps are measured against."""

    duration_ns: NDArray[np.float64]
    """Shape (ops,): the replay's operations, as recorded."""

    def total(self, *places: Place, but: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Return the gaps in these places, shape (ranks, steps), in ns.

        Args:
            places: Where in the step.
            but: Shape (gaps,): gaps left out.
        """
        chosen = self.among(*places)
        if but is not None:
            chosen &= ~but
        shape = self.profile.total_ns.shape
        return sum_cells(shape, self.row[chosen], self.column[chosen], self.gaps.gap_ns[chosen])

    def among(self, *places: Place) -> NDArray[np.bool_]:
        """Tell which gaps lie in these places."""
        return np.isin(self.gaps.place, places) & (self.row >= 0)

    def part(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Return the operations that hold these gaps, shape (ops,); None where none does."""
        operation = self.gaps.operation[chosen]
        operation = operation[operation >= 0]
        if not len(operation):
            return None
        part = np.zeros(len(self.duration_ns), dtype=np.bool_)
        part[operation] = True
        return part

    def usual(
        self, chosen: NDArray[np.bool_], expected: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """Return what operations would take if chosen gaps were as expected, in ns.

        Args:
            chosen: Shape (gaps,).
            expected: Shape (ranks, steps): what the chosen gaps of a rank should sum to in a
                step; None: nothing.

        Returns:
            Shape (ops,): as recorded but for operations that are a chosen gap.
        """
        usual = self.duration_ns.copy()
        chosen = chosen & (self.gaps.operation >= 0) & (self.row >= 0)
        # The gap before a step is held by an operation, but is not that operation's own time.
        chosen &= self.duration_ns[self.gaps.operation] == self.gaps.gap_ns
        operation, gap = self.gaps.operation[chosen], self.gaps.gap_ns[chosen].astype(np.float64)
        if expected is None:
            usual[operation] = 0.0
            return usual
        row, column = self.row[chosen], self.column[chosen]
        whole = sum_cells(expected.shape, row, column, gap)[row, column]
        usual[operation] = expected[row, column] * np.divide(
            gap, whole, out=np.zeros_like(gap), where=whole > 0
        )
        return usual

    def usual_at(
        self,
        chosen: NDArray[np.bool_],
        expected: Sequence[tuple[tuple[Place, ...], NDArray[np.float64]]],
    ) -> NDArray[np.float64]:
        """Return what operations would take if chosen gaps were as expected at their places, in ns.

        Args:
            chosen: Shape (gaps,).
            expected: By places, shape (ranks, steps): as of `usual`.

        Returns:
            Shape (ops,): as recorded but for operations that are a chosen gap at these places.
        """
        usual = self.duration_ns.copy()
        for places, level in expected:
            mine = chosen & self.among(*places)
            found = self.usual(mine, level)
            operation = self.gaps.operation[mine & (self.gaps.operation >= 0)]
            usual[operation] = found[operation]
        return usual


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonPauses:
    """Steps in which nearly all ranks pause at once: checkpoints, evaluations, missing input."""

    columns: NDArray[np.int64]
    """Columns of these steps, ascending."""

    is_planned: NDArray[np.bool_]
    """Shape (pauses,): whether it is a checkpoint or an evaluation, not missing input."""

    in_spans: NDArray[np.bool_]
    """Shape (pauses,): whether most of it lies in ``checkpoint`` spans."""

    lost_ns: NDArray[np.float64]
    """Shape (ranks, steps): time lost beyond what the rank usually loses."""

    other_steps: NDArray[np.bool_]
    """Shape (steps,): steps that no common pause explains."""

    places: NDArray[np.bool_]
    """Shape (places, steps): where in its steps a common pause lies."""

    in_gaps: NDArray[np.bool_]
    """Shape (gaps,): gaps that a common pause explains."""


def common_pauses(stalls: HostGaps) -> CommonPauses:
    """Find the steps in which nearly all ranks pause at once.

    Planned are those in ``checkpoint`` spans, those after a step's compute, and those of one
    length that come at equal distances. The others are missing input.
    """
    inside = stalls.total(Place.CHECKPOINT)
    data = stalls.total(Place.DATA)
    before, after = stalls.total(*INPUT_PLACES), stalls.total(*WORKING_PLACES)
    unusual = before - row_medians(before)[:, None] + after - row_medians(after)[:, None]
    lost = inside + unusual
    dips = np.flatnonzero(
        (lost / stalls.compute_ns[:, None] >= MIN_EXCESS_RATIO).mean(axis=0) >= ALL_RANKS_SHARE
    )

    def middle(gap: NDArray[np.float64]) -> NDArray[np.float64]:
        level: NDArray[np.float64] = np.median(gap[:, dips], axis=0)
        return level

    in_spans = middle(inside) >= middle(unusual)
    planned = in_spans | (middle(after) > middle(before))
    in_data = middle(data - row_medians(data)[:, None]) > middle(lost) / 2
    for chosen in _of_one_length(middle(lost), ~planned & ~in_data):
        planned[chosen] = _is_regular(dips[chosen])
    other_steps = _other_steps(stalls) if len(dips) else np.ones(len(lost[0]), dtype=np.bool_)
    places = _places_of_pauses(stalls, other_steps)
    return CommonPauses(
        columns=dips,
        is_planned=planned,
        in_spans=in_spans,
        lost_ns=lost,
        other_steps=other_steps,
        places=places,
        in_gaps=places[stalls.gaps.place, stalls.column],
    )


def tabulate_gaps(
    profile: ComputeProfile, gaps: GapItems, duration_ns: NDArray[np.float64]
) -> HostGaps:
    """Lay a run's host gaps out over the ranks and steps of its profile."""
    at = np.minimum(find_positions(gaps.rank, profile.ranks), len(profile.ranks) - 1)
    column = np.minimum(find_positions(gaps.step, profile.steps), len(profile.steps) - 1)
    known = (profile.ranks[at] == gaps.rank) & (profile.steps[column] == gaps.step)
    return HostGaps(
        profile=profile,
        gaps=gaps,
        row=np.where(known, at, -1),
        column=column,
        compute_ns=row_medians(profile.total_ns),
        duration_ns=duration_ns,
    )


def find_late_stages(
    stalls: HostGaps, gap: NDArray[np.float64], usual: NDArray[np.bool_], *, always: bool
) -> tuple[Phase, ...]:
    """Find stages most of whose ranks lose time; the phases' rows are stages.

    Args:
        stalls: The run's gaps.
        gap: Shape (ranks, steps), in ns.
        usual: Shape (steps,): steps that take part.
        always: Whether time that all stages always lose counts too. Where it does not, the last
            stage is held against its own faster steps: it may compute a loss outside its spans.
    """
    ratio = gap / stalls.compute_ns[:, None]
    stages = np.unique(stalls.profile.stage)
    level = np.array([np.median(ratio[stalls.profile.stage == stage], axis=0) for stage in stages])
    excess = level.copy()
    if not always:
        own = np.quantile(level, BASELINE_QUANTILE, axis=1)[:, None]
        for place in range(len(stages)):
            others = np.delete(level, place, axis=0)
            is_last = place == len(stages) - 1
            excess[place] -= own[place] if is_last else np.median(others, axis=0)
    excess[:, ~usual] = np.nan
    if not usual.any():
        return ()
    return find_phases(
        excess,
        has_few_peers=np.ones(len(stages), dtype=np.bool_),
        min_steps=HOST_STALL_STEPS,
        deviation=deviation_without_jumps(excess),
    )


def find_late_rows(stalls: HostGaps, gap: NDArray[np.float64], phase: Phase) -> list[int]:
    """Return the rows of the phase's stage that lose at least half of what it does."""
    stages = np.unique(stalls.profile.stage)
    inside = row_medians(gap[:, phase.first : phase.last + 1]) / stalls.compute_ns
    late = (stalls.profile.stage == stages[phase.row]) & (inside >= phase.excess_ratio / 2)
    rows: list[int] = np.flatnonzero(late).tolist()
    return rows


def stall_candidate(
    cause: Cause,
    stalls: HostGaps,
    phase: Phase,
    rows: Sequence[int],
    places: tuple[tuple[Place, ...], str],
    expected: Sequence[tuple[tuple[Place, ...], NDArray[np.float64]]] | None = None,
) -> Candidate:
    """Turn late ranks into a candidate.

    Args:
        cause: What it is.
        stalls: The run's gaps.
        phase: When they are late.
        rows: The ranks, as rows of the profile.
        places: Where in the step, and in words.
        expected: By places, shape (ranks, steps), ns: what peers lose there; None: the ranks have
            no peers that lose nothing, and would lose nothing themselves.
    """
    profile = stalls.profile
    chosen = stalls.among(*places[0]) & np.isin(stalls.row, rows)
    chosen &= (stalls.column >= phase.first) & (stalls.column <= phase.last)
    when = f"in steps {int(profile.steps[phase.first])} to {int(profile.steps[phase.last])}"
    if phase.columns is not None:
        chosen &= np.isin(stalls.column, phase.columns)
        when = f"in {len(phase.columns)} of the {phase.num_steps} {when.removeprefix('in ')}"
    extra = phase.excess_ratio * float(np.median(stalls.compute_ns[rows]))
    ranks = tuple(sorted(profile.ranks[rows].tolist()))
    first, last = int(profile.steps[phase.first]), int(profile.steps[phase.last])
    several = len(rows) > 1
    return Candidate(
        cause=cause,
        ranks=ranks,
        steps=(first, last),
        part=stalls.part(chosen),
        excess_ratio=phase.excess_ratio,
        threshold=max(phase.threshold, MIN_EXCESS_RATIO if several else 0.0),
        evidence=(
            f"{format_ranks(ranks)}: {format_duration(extra)} a step"
            f" {places[1]}{'' if several else ' that its peers do not lose'},"
            f" {format_percent(phase.excess_ratio)} of its compute, {when}; nobody held it up"
        ),
        on_host=True,
        fixed_ns=(
            stalls.usual(chosen, None) if expected is None else stalls.usual_at(chosen, expected)
        ),
        is_everywhere=several,
        shown_steps=None
        if phase.columns is None
        else tuple(profile.steps[list(phase.columns)].tolist()),
    )


def _of_one_length(
    lost_ns: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> list[NDArray[np.int64]]:
    """Part chosen dips where one is longer than the next shorter one by `SAME_LENGTH_FACTOR`."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return []
    rows = rows[np.argsort(lost_ns[rows])]
    apart = lost_ns[rows[1:]] > SAME_LENGTH_FACTOR * lost_ns[rows[:-1]]
    return [np.sort(part) for part in np.split(rows, np.flatnonzero(apart) + 1)]


def _is_regular(dips: NDArray[np.int64]) -> bool:
    """Tell whether dips come at equal distances, not one after the other.

    One alone, or two, may be part of such a series: nothing speaks against it.
    """
    distances = np.unique(np.diff(dips))
    return len(distances) <= 1 and bool((distances > 1).all())


def _places_of_pauses(stalls: HostGaps, usual: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell where in its steps a common dip lies: elsewhere they tell as much as any other.

    Args:
        stalls: The run's gaps.
        usual: Shape (steps,): steps that no common dip explains.

    Returns:
        Shape (places, steps): where the middle rank loses half of what is due or more; everywhere
        in a dip that no one place holds.
    """
    found = np.zeros((len(Place), len(usual)), dtype=np.bool_)
    for place in Place:
        lost = stalls.total(place)
        lost -= fast_quartile(lost)
        found[place] = np.median(lost / stalls.compute_ns[:, None], axis=0) >= MIN_EXCESS_RATIO / 2
    found[:, usual] = False
    found[:, ~usual & ~found.any(axis=0)] = True
    return found


def _other_steps(stalls: HostGaps) -> NDArray[np.bool_]:
    """Return which steps no common pause explains, if there is any. Shape (steps,)."""
    before, rest = stalls.total(*INPUT_PLACES), stalls.total(*WORKING_PLACES, Place.CHECKPOINT)
    total = before + rest
    unusual = (total - row_medians(total)[:, None]) / stalls.compute_ns[:, None]
    usual: NDArray[np.bool_] = (unusual >= MIN_EXCESS_RATIO).mean(axis=0) < ALL_RANKS_SHARE
    return usual


SAME_LENGTH_FACTOR = 1.5
"""Dips of one sort, all checkpoints or all evaluations, differ by less than this."""
