"""Groups whose members take turns in entering a collective late."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind

from ..arrays.group_stats import MIN_ROWS_OF_KIND, row_medians
from ..replay.model import Place
from ..report.text import format_count, format_duration, format_percent, format_ranks, format_steps
from ..statistics.noise import deviation_of_distances, required_deviations, step_deviation
from ..statistics.phases import find_phases
from ..statistics.thresholds import THRESHOLDS
from . import host_stall
from .candidate import Candidate, explained_gaps, join_candidates, named_ranks
from .detector import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..statistics.phases import Phase
    from .detector import Case
    from .host_gaps import HostGaps

LATE_PLACES = (Place.LAUNCH, Place.OTHER)
"""Places after a step's compute: a rank that stops there enters its group's next collective late.
If reductions are launched inside the backward (DDP), only the second has gaps."""

LAUNCHED_AFTER_COMPUTE = frozenset({SpanKind.DP_COMM.value, SpanKind.OTHER.value})
"""Span kinds of collectives outside the layers."""

CAUSE = Cause(
    name="launch-skew",
    one="enters collectives late",
    several="take turns in entering collectives late",
    sentence="Ranks take turns in entering collectives late",
)


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add groups whose members enter a collective late in turn."""
    gaps, pauses = case.gaps, case.common_pauses
    explained = explained_gaps(found, len(gaps.gaps))
    explained |= pauses.covers_gap & gaps.is_at(Place.OTHER)
    groups = tuple(
        link.members
        for link in case.reading.transfers.links
        if not link.is_pair and link.kind in LAUNCHED_AFTER_COMPUTE
    )
    steps = ~pauses.places[Place.LAUNCH]
    blamed = named_ranks(found, {host_stall.CAUSE})
    return (*found, *find_launch_skews(gaps, groups, steps, blamed, explained))


def find_launch_skews(
    gaps: HostGaps,
    groups: tuple[tuple[int, ...], ...],
    steps: NDArray[np.bool_],
    blamed: frozenset[int],
    explained: NDArray[np.bool_] | None = None,
) -> tuple[Candidate, ...]:
    """Find groups whose members enter a collective late in turn.

    Args:
        gaps: The run's gaps.
        groups: Members of each group whose collectives are launched after compute.
        steps: Shape (steps,): steps that are searched.
        blamed: Ranks whose gaps another cause explains.
        explained: Shape (gaps,): gaps that another cause explains; None: none.
    """
    profile = gaps.profile
    total_ns = gaps.total_ns(*LATE_PLACES, excluding=explained)
    lag = total_ns / gaps.compute_ns[:, None]
    lag[np.isin(profile.ranks, list(blamed))] = np.nan
    lag[:, ~steps] = np.nan
    stage = dict(zip(profile.ranks.tolist(), profile.stage.tolist(), strict=True))
    members = [
        np.flatnonzero(np.isin(profile.ranks, group)) for group in _smallest_groups(groups, stage)
    ]
    members = [rows for rows in members if len(rows) > 1]
    if not members:
        return ()
    lateness = np.array([_lateness(lag[rows]) for rows in members])
    changes = step_deviation(lateness)
    phases = find_phases(
        lateness,
        has_few_peers=np.array([len(rows) < MIN_ROWS_OF_KIND for rows in members]),
        min_steps=THRESHOLDS.min_lasting_steps,
        deviation=min(changes, _noise_of_members(lag, members)),
        may_vary=True,
    )
    # If only late members stop there, the median of the recorded gaps would be the lateness itself.
    in_time_ns = total_ns.copy()
    for rows in members:
        in_time_ns[rows] = np.minimum(total_ns[rows], np.median(total_ns[rows], axis=0))
    chosen = gaps.is_at(*LATE_PLACES)
    if explained is not None:
        chosen &= ~explained
    found = []
    for phase in phases:
        rows = members[phase.row]
        extended = _extend_to_onset(phase, lateness[phase.row], deviation=changes)
        inside = lateness[phase.row, extended.inside]
        here = np.nan_to_num(lag[rows][:, extended.inside], nan=-1.0)
        last = here.argmax(axis=0)[inside >= phase.excess_ratio / 2]
        # The second latest counts as well: with the last one fixed, the group would wait for it.
        in_time = here.max(axis=0) - np.nan_to_num(inside)
        late = (here >= in_time + phase.excess_ratio / 2).any(axis=1)
        counts = np.bincount(last, minlength=len(rows))
        is_one_rank = bool(counts.max() > THRESHOLDS.one_rank_share * counts.sum())
        of_part = rows[[counts.argmax()]] if is_one_rank else rows
        found.append(
            _skew_candidate(
                gaps,
                extended,
                chosen & np.isin(gaps.row, of_part),
                in_time_ns,
                late=of_part if is_one_rank else rows[late],
                num_members=len(rows),
            )
        )
    return _merge_groups(found)


def _noise_of_members(lag: NDArray[np.float64], members: Sequence[NDArray[np.int64]]) -> float:
    """Return the noise of members that are in time; infinite if all groups are too small for it.

    With one or two groups, the lateness itself may change so much from step to step that it passes
    for noise. Most members are in time in each step, so their lag is the noise.

    Args:
        lag: Shape (ranks, steps).
        members: Rows of each group.
    """
    distances = [
        np.abs(lag[rows] - row_medians(lag[rows].T)).ravel()
        for rows in members
        if (~np.isnan(lag[rows])).sum(axis=0).max() >= MIN_ROWS_OF_KIND
    ]
    if not distances:
        return float("inf")
    known = np.concatenate(distances)
    return deviation_of_distances(known[~np.isnan(known)])


def _smallest_groups(
    groups: Sequence[tuple[int, ...]], stage: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Leave out groups that overlap a smaller one: a member late there is late in both.

    Groups within a stage come first. Members of a group across stages (of tied embeddings, say)
    come from different reductions, and one that was held up there would always be last.
    """
    kept: list[tuple[int, ...]] = []
    taken: set[int] = set()

    def order(group: tuple[int, ...]) -> tuple[int, int]:
        return len({stage.get(rank) for rank in group}), len(group)

    for group in sorted(groups, key=order):
        if not taken.intersection(group):
            kept.append(group)
            taken.update(group)
    return kept


def _extend_to_onset(phase: Phase, lateness: NDArray[np.float64], *, deviation: float) -> Phase:
    """Add the steps right before a phase in which the lag had begun to grow."""
    required = required_deviations(len(lateness)) * deviation
    first = phase.first
    while first > 0 and lateness[first - 1] > required:
        first -= 1
    return replace(phase, first=first)


def _lateness(lag: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how much later than the median member the last one is. Shape (steps,)."""
    known = (~np.isnan(lag)).sum(axis=0)
    ordered = np.sort(lag, axis=0)
    columns = np.arange(lag.shape[1])
    last = np.maximum(known - 1, 0)
    late: NDArray[np.float64] = ordered[last, columns] - ordered[last // 2, columns]
    return late


def _skew_candidate(
    gaps: HostGaps,
    phase: Phase,
    chosen: NDArray[np.bool_],
    in_time_ns: NDArray[np.float64],
    *,
    late: NDArray[np.int64],
    num_members: int,
) -> Candidate:
    """Return late members as a candidate: `host-stall` if nearly always the same one is last.

    If they take turns, the part is the lateness of all members: with the last one fixed, the group
    would wait for the next one.

    Args:
        gaps: The run's gaps.
        phase: The steps.
        chosen: Shape (gaps,): the gaps of the part.
        in_time_ns: Shape (ranks, steps): their sum if all members were in time.
        late: Rows of the late members.
        num_members: Size of the group.
    """
    ranks = tuple(gaps.profile.ranks[late].tolist())
    lag_ns = phase.excess_ratio * float(np.median(gaps.compute_ns[late]))
    at_launch, after_compute = (
        int(gaps.gaps.gap_ns[chosen & (gaps.gaps.place == place)].sum()) for place in LATE_PLACES
    )
    if len(late) == 1:
        verb = "launches" if at_launch >= after_compute else "stops after its compute and enters"
        who = f"{format_ranks(ranks)} {verb}"
    else:
        verb = "launching" if at_launch >= after_compute else "stopping after compute and entering"
        who = f"{format_count(len(ranks), 'rank')} take turns in {verb}"
    steps = phase.steps(gaps.profile.steps)
    return Candidate(
        cause=host_stall.CAUSE if len(late) == 1 else CAUSE,
        ranks=ranks,
        steps=steps,
        part=gaps.part(chosen),
        fixed_ns=gaps.fixed_ns(chosen, [(LATE_PLACES, in_time_ns)]),
        excess_ratio=phase.excess_ratio,
        threshold=phase.threshold,
        evidence=(
            f"{who} a collective of {num_members:,} members {format_duration(lag_ns)} after its"
            f" median member ({format_percent(phase.excess_ratio)} of the compute) in"
            f" {format_steps(steps)}; compute is as usual"
        ),
        on_host=True,
    )


def _merge_groups(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Merge the skews of several groups into one candidate: they share its reason."""
    several = [each for each in found if each.cause is CAUSE]
    alone = [each for each in found if each.cause is not CAUSE]
    if len(several) <= 1:
        return tuple(found)
    clearest = max(several, key=lambda each: each.excess_ratio / each.threshold)
    evidence = f"{clearest.evidence}; {format_count(len(several) - 1, 'more group')} alike"
    return (replace(join_candidates(several, clearest), evidence=evidence), *alone)
