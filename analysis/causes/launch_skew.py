"""Groups that enter a collective late, now one member and now another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanKind

from ..arrays.group_stats import MIN_ROWS_OF_KIND, row_medians
from ..replay.model import Place
from ..report.text import format_count, format_duration, format_percent, format_ranks
from ..statistics.noise import NORMAL_90TH, NORMAL_MEDIAN, required_deviations, step_deviation
from ..statistics.phases import find_phases
from . import host_stall
from .candidate import Candidate, merge_parts, named_ranks
from .detector import Cause
from .thresholds import HOST_STALL_STEPS, ONE_RANK_SHARE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..statistics.phases import Phase
    from .detector import Case
    from .host_gaps import HostGaps

LATE_PLACES = (Place.LAUNCH, Place.OTHER)
"""Where a rank stops after its step's compute: whatever its group does next, it enters late. Where
reductions are launched inside the backward (DDP), the second is all there is."""


CAUSE = Cause(
    name="launch-skew",
    one="enters collectives late",
    several="take turns in entering collectives late",
    sentence="Ranks take turns in entering collectives late",
)

LAUNCHED_AFTER_COMPUTE = frozenset({SpanKind.DP_COMM.value, SpanKind.OTHER.value})
"""Span kinds of collectives outside the layers."""


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add groups that enter a collective late, now one member and now another."""
    pauses = case.common_pauses
    explained = pauses.in_gaps & case.gaps.among(Place.OTHER)
    for each in found:
        if each.gaps is not None:
            explained |= each.gaps
    groups = tuple(
        link.members
        for link in case.reading.transfers.links
        if not link.is_pair and link.kind in LAUNCHED_AFTER_COMPUTE
    )
    steps = ~pauses.places[Place.LAUNCH]
    blamed = named_ranks(found, {host_stall.CAUSE})
    return (*found, *find_launch_skews(case.gaps, groups, steps, blamed, explained))


def find_launch_skews(
    stalls: HostGaps,
    groups: tuple[tuple[int, ...], ...],
    usual: NDArray[np.bool_],
    blamed: frozenset[int],
    explained: NDArray[np.bool_] | None = None,
) -> tuple[Candidate, ...]:
    """Find groups that enter a collective late, now one member and now another.

    Args:
        stalls: The run's gaps.
        groups: Members of each group of collectives that are launched after compute.
        usual: Shape (steps,): steps that take part.
        blamed: Ranks whose gaps are explained already.
        explained: Shape (gaps,): gaps that something else explains, dips among them; None: none.
    """
    profile = stalls.profile
    lag = stalls.total(*LATE_PLACES, but=explained) / stalls.compute_ns[:, None]
    lag[np.isin(profile.ranks, list(blamed))] = np.nan
    lag[:, ~usual] = np.nan
    stage = dict(zip(profile.ranks.tolist(), profile.stage.tolist(), strict=True))
    members = [
        np.flatnonzero(np.isin(profile.ranks, group)) for group in _smallest_groups(groups, stage)
    ]
    members = [rows for rows in members if len(rows) > 1]
    if not members:
        return ()
    late = np.array([_lateness(lag[rows]) for rows in members])
    few = np.array([len(rows) < MIN_ROWS_OF_KIND for rows in members])
    of_all = _job_wide_skew(stalls, lag, members, late)
    if of_all is not None:
        return (of_all,)
    found = []
    changes = step_deviation(late)
    noise = min(changes, _noise_of_members(lag, members))
    phases = find_phases(
        late, has_few_peers=few, min_steps=HOST_STALL_STEPS, deviation=noise, may_vary=True
    )
    for phase in phases:
        rows = members[phase.row]
        grown = _extend_to_onset(phase, late[phase.row], deviation=changes)
        columns = np.arange(grown.first, grown.last + 1)
        columns = columns[late[phase.row, columns] >= phase.excess_ratio / 2]
        last = rows[np.nan_to_num(lag[rows][:, columns], nan=-1.0).argmax(axis=0)]
        found.append(_skew_candidate(stalls, grown, last, f"of {len(rows):,} members"))
    return _merge_groups(found)


def _noise_of_members(lag: NDArray[np.float64], members: Sequence[NDArray[np.int64]]) -> float:
    """Return by how much members are late that are not, infinite where no group is large enough.

    Of one or two groups the lateness itself may rise and fall so much from step to step that it
    passes for noise. Its members tell: most are in time in each step.

    Args:
        lag: Shape (ranks, steps).
        members: Rows of each group.
    """
    large = [
        lag[rows]
        for rows in members
        if (~np.isnan(lag[rows])).sum(axis=0).max() >= MIN_ROWS_OF_KIND
    ]
    far = [np.abs(each - row_medians(each.T))[~np.isnan(each)] for each in large]
    if not far:
        return float("inf")
    middle, high = np.quantile(np.concatenate(far), (0.5, 0.9))
    return float(max(middle / NORMAL_MEDIAN, high / NORMAL_90TH))


def _job_wide_skew(
    stalls: HostGaps,
    lag: NDArray[np.float64],
    members: Sequence[NDArray[np.int64]],
    late: NDArray[np.float64],
) -> Candidate | None:
    """Return that groups all over the job enter late, where more than one does."""
    phase = _job_wide_phase(late)
    if phase is None:
        return None
    of_groups = [
        _late_rows(lag, rows, each, phase) for rows, each in zip(members, late, strict=True)
    ]
    num = sum(len(rows) > 0 for rows in of_groups)
    if num <= 1:
        return None
    where = f"of one of {format_count(num, 'group')}, in the mean"
    return _skew_candidate(stalls, phase, np.concatenate(of_groups), where)


def _merge_groups(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Tell groups that enter late in turn as one finding: they share what does it."""
    several = [each for each in found if each.cause is CAUSE]
    alone = [each for each in found if each.cause is not CAUSE]
    if len(several) <= 1:
        return tuple(found)
    clearest = max(several, key=lambda each: each.excess_ratio / each.threshold)
    part, _ = merge_parts(several)
    whole = replace(
        clearest,
        ranks=tuple(sorted(rank for each in several for rank in each.ranks)),
        steps=(min(each.steps[0] for each in several), max(each.steps[1] for each in several)),
        part=part,
        evidence=f"{clearest.evidence}; so it is in {format_count(len(several) - 1, 'more group')}",
    )
    return (whole, *alone)


def _job_wide_phase(late: NDArray[np.float64]) -> Phase | None:
    """Return when groups all over the job enter late, each now and then.

    Where most groups do, their changes from step to step are no noise, but the thing itself. How
    sure the mean over the groups is, they tell by what they differ by within a step.

    Args:
        late: Shape (groups, steps): by how much the last member lags; NaN where unknown.
    """
    late = late[~np.isnan(late).all(axis=1)]
    if len(late) < MIN_ROWS_OF_KIND:
        return None
    level = late.mean(axis=0)
    error = float(np.nanmedian(late.std(axis=0, ddof=1))) / float(np.sqrt(len(late)))
    phases = find_phases(
        level[None],
        has_few_peers=np.ones(1, dtype=np.bool_),
        min_steps=HOST_STALL_STEPS,
        deviation=error,
        may_vary=True,
    )
    for phase in phases:
        inside = late[:, phase.first : phase.last + 1]
        inside = inside[:, ~np.isnan(inside).any(axis=0)]
        clear = required_deviations(len(level)) / np.sqrt(inside.size)
        if inside.size and inside.mean() >= clear * inside.std(ddof=1):
            return phase
    return None


def _late_rows(
    lag: NDArray[np.float64],
    rows: NDArray[np.int64],
    late: NDArray[np.float64],
    phase: Phase,
) -> NDArray[np.int64]:
    """Return which members of a group were late in a phase, once for each step in which they were.

    One that comes second is late as well: with the last one mended, the group would wait for it.
    """
    inside = slice(phase.first, phase.last + 1)
    here = np.nan_to_num(lag[rows][:, inside])
    middle = here.max(axis=0) - np.nan_to_num(late[inside])
    row, _ = np.nonzero(here >= middle + phase.excess_ratio / 2)
    found: NDArray[np.int64] = rows[row]
    return found


def _smallest_groups(
    groups: Sequence[tuple[int, ...]], stage: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Leave out the groups that hold a smaller one: who is late there is late in it too.

    Groups within a stage come first. In one across stages (of tied embeddings,
    say) the members come from different reductions, and one that was held up
    there would always be last.
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


def _extend_to_onset(phase: Phase, late: NDArray[np.float64], *, deviation: float) -> Phase:
    """Take in the steps right before a phase in which the lag had begun to grow."""
    clear = required_deviations(len(late)) * deviation
    first = phase.first
    while first > 0 and late[first - 1] > clear:
        first -= 1
    return replace(phase, first=first)


def _lateness(lag: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how much the last member of a group lags behind the middle one, in each step."""
    known = (~np.isnan(lag)).sum(axis=0)
    ordered = np.sort(lag, axis=0)
    columns = np.arange(lag.shape[1])
    last = np.maximum(known - 1, 0)
    late: NDArray[np.float64] = ordered[last, columns] - ordered[last // 2, columns]
    return late


def _skew_candidate(
    stalls: HostGaps,
    phase: Phase,
    find_late_rows: NDArray[np.int64],
    where: str,
) -> Candidate:
    profile = stalls.profile
    rows, counts = np.unique(find_late_rows, return_counts=True)
    alone = counts.max() > ONE_RANK_SHARE * counts.sum()
    if alone:
        rows = rows[[int(counts.argmax())]]
    ranks = tuple(profile.ranks[rows].tolist())
    chosen = stalls.among(*LATE_PLACES) & np.isin(stalls.row, rows)
    steps = (int(profile.steps[phase.first]), int(profile.steps[phase.last]))
    lag = phase.excess_ratio * float(np.median(stalls.compute_ns[rows]))
    lost_ns = [
        int(stalls.gaps.gap_ns[chosen & (stalls.gaps.place == place)].sum())
        for place in LATE_PLACES
    ]
    does = "launches" if lost_ns[0] >= lost_ns[1] else "stops after its compute and enters"
    who = (
        f"{format_ranks(ranks)} {does}"
        if alone
        else f"now one and now another of {format_count(len(ranks), 'rank')} {does}"
    )
    return Candidate(
        cause=host_stall.CAUSE if alone else CAUSE,
        ranks=ranks,
        steps=steps,
        part=stalls.part(chosen),
        excess_ratio=phase.excess_ratio,
        threshold=phase.threshold,
        evidence=(
            f"{who} a collective {where} {format_duration(lag)} after the middle one"
            f" ({format_percent(phase.excess_ratio)} of the compute) in steps {steps[0]} to"
            f" {steps[1]}, while compute is as usual"
        ),
        on_host=True,
    )
