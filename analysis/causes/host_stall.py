"""Ranks that neither compute nor wait for anybody: missing input, and hosts that launch late."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import EARLIER_QUANTILE, MATES_ENOUGH, median_by_kind, row_medians, summed
from ..replay.model import Place
from ..report.text import format_duration, format_percent, format_ranks
from ..statistics.noise import level_deviation
from ..statistics.phases import DUE_RATIO, standing_out, standing_out_now_and_then
from .candidate import Candidate, joined_parts
from .host_gaps import HOST_STALL_STEPS, INPUT_PLACES, ONE_RANK_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..statistics.phases import Phase
    from .host_gaps import Stalls

STALL_PLACES = (Place.FORWARD, Place.BACKWARD, Place.OTHER)
"""Where a host that launches late loses time; before collectives see `launch_skew`."""

LATE_PLACES = (*STALL_PLACES, Place.LAUNCH, Place.INPUT)
"""All that a host makes late that launches late throughout."""


def data_stalls(
    stalls: Stalls, usual: NDArray[np.bool_], explained: NDArray[np.bool_]
) -> tuple[Candidate, ...]:
    """Find ranks that wait for their input: alone, or all those of a stage.

    Args:
        stalls: The run's gaps.
        usual: Shape (steps,): steps that take part.
        explained: Shape (gaps,): gaps that something else explains.
    """
    gap = stalls.total(*INPUT_PLACES, but=explained)
    expected, enough = median_by_kind(gap, stalls.profile.stage)
    expected[~enough] = _usual_of_few(gap, stalls.profile.stage)[~enough]
    excess = (gap - expected) / stalls.compute_ns[:, None]
    excess[:, ~usual] = np.nan
    where = "before its first compute or in data"
    usual_ns = [(INPUT_PLACES, expected)]
    stages = [
        (phase, _late_rows(stalls, gap, phase))
        for phase in _late_stages(stalls, gap, usual, always=True)
    ]
    found = [
        _stall("data-stall", stalls, phase, [phase.row], (INPUT_PLACES, where), usual_ns)
        for phase in _apart_from_dips(excess, usual, few=~enough)
        if not _is_but_part(stalls, gap, phase, stages)
    ]
    named = {rank for candidate in found for rank in candidate.ranks}
    for phase, late in stages:
        rows = [row for row in late if int(stalls.profile.ranks[row]) not in named]
        if rows:
            found.append(_stall("data-stall", stalls, phase, rows, (INPUT_PLACES, where)))
    return _joined_stages(found)


def _usual_of_few(gap: NDArray[np.float64], stage: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return what a rank with one or two peers, or none, loses anyway, shape (ranks, steps).

    Ranks of other stages may load nothing: its own faster steps tell, or the peer that loses most
    in that step where that is less. No peers agree on what compute should take; but who need not
    wait for input loses nothing, so one peer shows that a gap is not due.
    """
    own = np.quantile(gap, EARLIER_QUANTILE, axis=1)
    usual = np.broadcast_to(own[:, None], gap.shape).copy()
    for row in range(len(gap)):
        mates = np.flatnonzero(stage == stage[row])
        mates = mates[mates != row]
        if 0 < len(mates) < MATES_ENOUGH - 1:
            usual[row] = np.minimum(own[row], gap[mates].max(axis=0))
    return usual


def _apart_from_dips(
    excess: NDArray[np.float64], usual: NDArray[np.bool_], *, few: NDArray[np.bool_]
) -> tuple[Phase, ...]:
    """Return what stands out, but for single steps after one in which all ranks stood still.

    They come back one after the other: what the last of them loses there is the rest of its
    checkpoint, not its input.
    """
    after = np.zeros(len(usual), dtype=np.bool_)
    after[1:] = ~usual[:-1]
    kept = []
    for phase in standing_out_now_and_then(excess, few=few):
        if phase.shown is None:
            if phase.num_steps > 1 or not after[phase.first]:
                kept.append(phase)
            continue
        shown = tuple(column for column in phase.shown if not after[column])
        if shown:
            whole = len(shown) == shown[-1] - shown[0] + 1
            kept.append(
                replace(
                    phase,
                    first=shown[0],
                    last=shown[-1],
                    excess_ratio=float(np.nanmedian(excess[phase.row, list(shown)])),
                    shown=None if whole else shown,
                )
            )
    return tuple(kept)


def _is_but_part(
    stalls: Stalls,
    gap: NDArray[np.float64],
    phase: Phase,
    stages: Sequence[tuple[Phase, Sequence[int]]],
) -> bool:
    """Tell the worse steps of a rank that always misses its input, as its stage tells."""
    return any(
        phase.row in rows
        and 2 * phase.excess_ratio * stalls.compute_ns[phase.row]
        < np.median(gap[phase.row, stage.first : stage.last + 1])
        for stage, rows in stages
    )


def host_stalls(
    stalls: Stalls, usual: NDArray[np.bool_], in_dips: NDArray[np.bool_] | None = None
) -> tuple[Candidate, ...]:
    """Find ranks whose host launches late throughout.

    In `HOST_STALL_STEPS` steps, or before as many launches of each step: a host
    that runs ahead may hide its stall until the step in which it has to wait
    for its device.

    Args:
        stalls: The run's gaps.
        usual: Shape (steps,): steps that take part.
        in_dips: Shape (gaps,): gaps that a common dip explains; None: none.
    """
    gap = stalls.total(*STALL_PLACES, but=in_dips)
    expected, enough = _expected(stalls, gap)
    excess = (gap - expected) / stalls.compute_ns[:, None]
    excess[:, ~usual] = np.nan
    # An evaluation that all ranks wait for lies in one place: it is usual there, and nowhere else.
    usual_ns = [((place,), _expected(stalls, stalls.total(place))[0]) for place in LATE_PLACES]
    num_late = _num_late(stalls, in_dips)
    where = "between its launches"
    found = [
        _stall("host-stall", stalls, phase, [phase.row], (LATE_PLACES, where), usual_ns)
        for phase in standing_out(excess, few=~enough)
        if _recurs(excess[phase.row], num_late[phase.row], phase)
    ]
    named = {rank for candidate in found for rank in candidate.ranks}
    for phase in _late_stages(stalls, gap, usual, always=False):
        rows = _late_rows(stalls, gap, phase)
        # One of two ranks lifts its stage's median by half of what it loses.
        if not named.issuperset(stalls.profile.ranks[rows].tolist()):
            found.append(_stall("host-stall", stalls, phase, rows, (STALL_PLACES, where)))
    return tuple(found)


def _expected(
    stalls: Stalls, gap: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return what a rank of a healthy host loses, and which ranks have enough peers to tell."""
    expected, enough = median_by_kind(gap, stalls.profile.stage)
    others = np.median(gap, axis=0)
    expected[~enough] = np.minimum(others, row_medians(gap)[:, None])[~enough]
    return expected, enough


def _late_stages(
    stalls: Stalls, gap: NDArray[np.float64], usual: NDArray[np.bool_], *, always: bool
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
        own = np.quantile(level, EARLIER_QUANTILE, axis=1)[:, None]
        for place in range(len(stages)):
            others = np.delete(level, place, axis=0)
            is_last = place == len(stages) - 1
            excess[place] -= own[place] if is_last else np.median(others, axis=0)
    excess[:, ~usual] = np.nan
    if not usual.any():
        return ()
    return standing_out(
        excess,
        few=np.ones(len(stages), dtype=np.bool_),
        shortest=HOST_STALL_STEPS,
        deviation=level_deviation(excess),
    )


def _late_rows(stalls: Stalls, gap: NDArray[np.float64], phase: Phase) -> list[int]:
    """Return the rows of the phase's stage that lose at least half of what it does."""
    stages = np.unique(stalls.profile.stage)
    inside = row_medians(gap[:, phase.first : phase.last + 1]) / stalls.compute_ns
    late = (stalls.profile.stage == stages[phase.row]) & (inside >= phase.excess_ratio / 2)
    rows: list[int] = np.flatnonzero(late).tolist()
    return rows


def _joined_stages(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Tell stages that miss their input in the same steps as one: they share what is slow."""
    several = [each for each in found if len(each.ranks) > 1]
    alone = [each for each in found if len(each.ranks) == 1]
    if len(several) <= 1:
        return tuple(found)
    worst = max(several, key=lambda each: each.excess_ratio)
    part, usual_ns = joined_parts(several)
    ranks = tuple(sorted(rank for each in several for rank in each.ranks))
    whole = Candidate(
        cause=worst.cause,
        ranks=ranks,
        steps=(min(each.steps[0] for each in several), max(each.steps[1] for each in several)),
        part=part,
        excess_ratio=worst.excess_ratio,
        threshold=worst.threshold,
        evidence=f"{format_ranks(ranks)} miss their input together; {worst.evidence}",
        on_host=True,
        usual_ns=usual_ns,
        is_everywhere=True,
    )
    return (whole, *alone)


def _num_late(stalls: Stalls, in_dips: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Return before how many launches a rank's host was late. Shape (ranks, steps).

    ``(sum x)^2 / sum x^2`` of its gaps: their number where they are equal, 1 where
    one outweighs all others.

    Source:
        The participation ratio of statistical physics.
    """
    chosen = stalls.among(Place.FORWARD, Place.BACKWARD)
    if in_dips is not None:
        chosen &= ~in_dips
    where = (stalls.profile.total_ns.shape, stalls.row[chosen], stalls.column[chosen])
    gap = stalls.gaps.gap_ns[chosen].astype(np.float64)
    whole, squares = summed(*where, gap), summed(*where, gap**2)
    return np.divide(whole**2, squares, out=np.zeros_like(whole), where=squares > 0)


def _recurs(excess: NDArray[np.float64], num_late: NDArray[np.float64], phase: Phase) -> bool:
    """Tell a stall that is there all the time from pauses now and then.

    Args:
        excess: Shape (steps,), of one rank; NaN where unknown.
        num_late: Shape (steps,): before how many launches it was late.
        phase: When it stands out.
    """
    if phase.excess_ratio < phase.threshold:
        return False
    inside = np.arange(phase.first, phase.last + 1)
    known = inside[~np.isnan(excess[inside])]
    throughout = num_late[known] >= HOST_STALL_STEPS
    if len(known) < HOST_STALL_STEPS:
        return bool(throughout.all())
    steady = excess[known] >= np.median(excess[known]) / 2
    return float((steady | throughout).mean()) >= ONE_RANK_SHARE


def _stall(
    cause: str,
    stalls: Stalls,
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
    if phase.shown is not None:
        chosen &= np.isin(stalls.column, phase.shown)
        when = f"in {len(phase.shown)} of the {phase.num_steps} {when.removeprefix('in ')}"
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
        threshold=max(phase.threshold, DUE_RATIO if several else 0.0),
        evidence=(
            f"{format_ranks(ranks)}: {format_duration(extra)} a step"
            f" {places[1]}{'' if several else ' that its peers do not lose'},"
            f" {format_percent(phase.excess_ratio)} of its compute, {when}; nobody held it up"
        ),
        on_host=True,
        usual_ns=(
            stalls.usual(chosen, None) if expected is None else stalls.usual_at(chosen, expected)
        ),
        is_everywhere=several,
        shown_steps=None
        if phase.shown is None
        else tuple(profile.steps[list(phase.shown)].tolist()),
    )
