"""Groups whose members take turns in entering a collective late."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind

from ..arrays.group_stats import MIN_ROWS_OF_KIND, fast_quartile
from ..breakdown.waterfall import Part
from ..replay.model import Place
from ..report.text import format_count, format_duration, format_percent, format_ranks, format_steps
from ..statistics.noise import deviation_of_distances, required_deviations, step_deviation
from ..statistics.phases import find_period, find_phases
from ..statistics.thresholds import THRESHOLDS
from . import host_stall
from .candidate import Candidate, explained_gaps, merge_alike, merge_recurring, shows_in
from .detector import Cause, HostTime, ProofForm
from .host_stall import find_host_stalls

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
    shown_in=HostTime("gaps of the host before a launch", (Part.HOST_GAP,)),
    proof_form=ProofForm.HOST,
)


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add groups whose members enter a collective late in turn, and hosts that do so at times."""
    gaps, pauses = case.gaps, case.common_pauses
    explained = explained_gaps(candidates, len(gaps.gaps))
    explained |= pauses.covers_gap & gaps.is_at(Place.OTHER)
    groups = tuple(
        link.members
        for link in case.reading.transfers.links
        if not link.is_pair and link.kind in LAUNCHED_AFTER_COMPUTE
    )
    steps = ~pauses.places[Place.LAUNCH]
    skews = find_launch_skews(gaps, groups, steps, explained)
    in_turn = [candidate for candidate in skews if candidate.cause is CAUSE]
    explained |= explained_gaps(in_turn, len(gaps.gaps))
    stalls = find_host_stalls(gaps, steps, explained, searches=((True, LATE_PLACES),))
    recurring = merge_recurring(
        [candidate for candidate in stalls if candidate.shown_steps is not None],
        len(gaps.profile.ranks),
    )
    # A rank may be last for a while or at times: a period decides, else what costs more counts.
    late = [*recurring, *(candidate for candidate in skews if candidate.cause is not CAUSE)]
    numbers = gaps.profile.steps.tolist()

    def order(candidate: Candidate) -> tuple[bool, float]:
        has_period = find_period(np.array(candidate.shown_steps or ()))
        return not has_period, -candidate.excess_ratio * float(shows_in(candidate, numbers).sum())

    late.sort(key=order)
    named: set[int] = set()
    for candidate in late:
        if named.isdisjoint(candidate.ranks):
            in_turn.append(candidate)
            named.update(candidate.ranks)
    return (*candidates, *in_turn)


def find_launch_skews(
    gaps: HostGaps,
    groups: tuple[tuple[int, ...], ...],
    steps: NDArray[np.bool_],
    explained: NDArray[np.bool_],
) -> tuple[Candidate, ...]:
    """Find groups whose members enter a collective late in turn.

    A member is late if it is later than the group's median member. With all members in time, they
    would be as the first one is.

    Args:
        groups: Members of each group whose collectives are launched after compute.
        steps: Shape (steps,): steps that are searched.
        explained: Shape (gaps,): gaps that another cause explains.
    """
    profile = gaps.profile
    lost_ns = gaps.total_ns(*LATE_PLACES, excluding=explained)
    lag = lost_ns / gaps.compute_ns[:, None]
    stage = dict(zip(profile.ranks.tolist(), profile.stage.tolist(), strict=True))
    members = [
        np.flatnonzero(np.isin(profile.ranks, group)) for group in _smallest_groups(groups, stage)
    ]
    members = [rows for rows in members if len(rows) > 1]
    if not members or not steps.any():
        return ()
    in_time = np.array([np.sort(lag[rows], axis=0)[(len(rows) - 1) // 2] for rows in members])
    lateness = np.array([lag[rows].max(axis=0) for rows in members]) - in_time
    lateness[:, ~steps] = np.nan
    # The lateness may change so much from step to step that it passes for noise. Most members of a
    # group are in time in each step, so how much they differ is the noise as well.
    changes = noise = step_deviation(lateness)
    in_large_groups = [
        np.abs(lag[rows] - np.median(lag[rows], axis=0))[:, steps].ravel()
        for rows in members
        if len(rows) >= MIN_ROWS_OF_KIND
    ]
    if in_large_groups:
        noise = min(changes, deviation_of_distances(np.concatenate(in_large_groups)))
    phases = find_phases(
        lateness,
        has_few_peers=np.array([len(rows) < MIN_ROWS_OF_KIND for rows in members]),
        min_steps=THRESHOLDS.min_lasting_steps,
        deviation=noise,
        may_vary=True,
    )
    allowed = gaps.is_at(*LATE_PLACES) & ~explained
    candidates = []
    for peak in phases:
        rows, phase = members[peak.row], _extend_to_onset(peak, lateness[peak.row], changes)
        here = lag[rows][:, phase.inside]
        least = in_time[phase.row, phase.inside] + phase.excess_ratio / 2
        # The second latest counts as well: with the last one fixed, the group would wait for it.
        late = here >= least
        last = here.argmax(axis=0)[late.any(axis=0)]
        counts = np.bincount(last, minlength=len(rows))
        is_one_rank = bool(counts.max() > THRESHOLDS.one_rank_share * counts.sum())
        of_part = rows[[counts.argmax()]] if is_one_rank else rows
        expected_ns = np.zeros_like(lost_ns)
        # The fault adds time to several members at once: the median one may be late, and in a small
        # group the first one too.
        soonest = lag[rows].min(axis=0)[None]
        usual_ns = np.minimum(soonest, fast_quartile(soonest)) * gaps.compute_ns[rows, None]
        expected_ns[rows] = np.minimum(lost_ns[rows], usual_ns)
        candidates.append(
            _skew_candidate(
                gaps,
                phase,
                allowed & np.isin(gaps.row, of_part),
                expected_ns,
                late=of_part if is_one_rank else rows[late.any(axis=1)],
                num_members=len(rows),
            )
        )
    in_turn = [candidate for candidate in candidates if candidate.cause is CAUSE]
    if len(in_turn) > 1:
        # They share the reason, and each alone would save little: the others would still wait.
        merged = merge_alike(in_turn, f", in {format_count(len(in_turn), 'group')}")
        candidates = [
            merged,
            *(candidate for candidate in candidates if candidate.cause is not CAUSE),
        ]
    return tuple(candidates)


def _smallest_groups(
    groups: Sequence[tuple[int, ...]], stage: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Leave out groups that overlap a smaller one: a member late there is late in both.

    Groups within a stage come first. Members of a group across stages (of tied embeddings, say)
    come from different reductions, and one that was held up there would always be last.
    """
    kept: list[tuple[int, ...]] = []
    taken: set[int] = set()
    num_stages = {group: len({stage.get(rank) for rank in group}) for group in groups}
    for group in sorted(groups, key=lambda group: (num_stages[group], len(group))):
        if not taken.intersection(group):
            kept.append(group)
            taken.update(group)
    return kept


def _extend_to_onset(phase: Phase, lateness: NDArray[np.float64], deviation: float) -> Phase:
    """Add the steps right before a phase in which the lag had begun to grow."""
    required = required_deviations(len(lateness)) * deviation
    first = phase.first
    while first > 0 and lateness[first - 1] > required:
        first -= 1
    return replace(phase, first=first)


def _skew_candidate(
    gaps: HostGaps,
    phase: Phase,
    chosen: NDArray[np.bool_],
    expected_ns: NDArray[np.float64],
    *,
    late: NDArray[np.int64],
    num_members: int,
) -> Candidate:
    """Return late members as a candidate: `host-stall` if nearly always the same one is last.

    If they take turns, the part is the lateness of all members: with the last one fixed, the group
    would wait for the next one.
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
        gaps=chosen,
        fixed_ns=gaps.fixed_ns(chosen, [(LATE_PLACES, expected_ns)]),
        excess_ratio=phase.excess_ratio,
        threshold=phase.threshold,
        evidence=(
            f"{who} a collective of {num_members:,} members {format_duration(lag_ns)} after its"
            f" median member ({format_percent(phase.excess_ratio)} of the compute) in"
            f" {format_steps(steps)}; compute is as usual"
        ),
        on_host=True,
    )
