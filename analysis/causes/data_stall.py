"""Ranks that miss their input: alone, as a stage, or all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import BASELINE_QUANTILE, MIN_ROWS_OF_KIND, medians_by_kind
from ..replay.model import Place
from ..report.text import format_ranks
from ..statistics.phases import find_recurring_phases
from . import host_stall
from .candidate import Candidate, merge_parts
from .checkpoint import pause_candidate
from .detector import Cause
from .host_gaps import (
    INPUT_PLACES,
    WORKING_PLACES,
    HostGaps,
    find_late_rows,
    find_late_stages,
    stall_candidate,
)
from .thresholds import ALL_RANKS_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..statistics.phases import Phase
    from .detector import Case


CAUSE = Cause(
    name="data-stall",
    one="waits for input",
    several="wait for input",
    sentence="The whole job waits for input",
    has_place=True,
)


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add ranks that miss their input, and common pauses that are no checkpoints."""
    gaps, pauses = case.gaps, case.common_pauses
    explained = _first_gaps_of_late_hosts(
        gaps, [each for each in found if each.cause is host_stall.CAUSE]
    )
    for each in found:
        if each.gaps is not None:
            explained |= each.gaps
    late = find_data_stalls(gaps, pauses.other_steps, explained)
    common = pause_candidate(CAUSE, gaps, pauses, ~pauses.is_planned)
    return (*found, *(late if common is None else _with_common_pause(common, late)))


def find_data_stalls(
    stalls: HostGaps, usual: NDArray[np.bool_], explained: NDArray[np.bool_]
) -> tuple[Candidate, ...]:
    """Find ranks that wait for their input: alone, or all those of a stage.

    Args:
        stalls: The run's gaps.
        usual: Shape (steps,): steps that take part.
        explained: Shape (gaps,): gaps that something else explains.
    """
    gap = stalls.total(*INPUT_PLACES, but=explained)
    expected, enough = medians_by_kind(gap, stalls.profile.stage)
    expected[~enough] = _baseline_of_few_peers(gap, stalls.profile.stage)[~enough]
    excess = (gap - expected) / stalls.compute_ns[:, None]
    excess[:, ~usual] = np.nan
    where = "before its first compute or in data"
    fixed_ns = [(INPUT_PLACES, expected)]
    stages = [
        (phase, find_late_rows(stalls, gap, phase))
        for phase in find_late_stages(stalls, gap, usual, always=True)
    ]
    found = [
        stall_candidate(CAUSE, stalls, phase, [phase.row], (INPUT_PLACES, where), fixed_ns)
        for phase in _phases_outside_pauses(excess, usual, has_few_peers=~enough)
        if not _is_part_of_stage(stalls, gap, phase, stages)
    ]
    named = {rank for candidate in found for rank in candidate.ranks}
    for phase, late in stages:
        rows = [row for row in late if int(stalls.profile.ranks[row]) not in named]
        if rows:
            found.append(stall_candidate(CAUSE, stalls, phase, rows, (INPUT_PLACES, where)))
    return _merge_stages(found)


def _baseline_of_few_peers(
    gap: NDArray[np.float64], stage: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Return what a rank with one or two peers, or none, loses anyway, shape (ranks, steps).

    Ranks of other stages may load nothing: its own faster steps tell, or the peer that loses most
    in that step where that is less. No peers agree on what compute should take; but who need not
    wait for input loses nothing, so one peer shows that a gap is not due.
    """
    own = np.quantile(gap, BASELINE_QUANTILE, axis=1)
    usual = np.broadcast_to(own[:, None], gap.shape).copy()
    for row in range(len(gap)):
        mates = np.flatnonzero(stage == stage[row])
        mates = mates[mates != row]
        if 0 < len(mates) < MIN_ROWS_OF_KIND - 1:
            usual[row] = np.minimum(own[row], gap[mates].max(axis=0))
    return usual


def _phases_outside_pauses(
    excess: NDArray[np.float64], usual: NDArray[np.bool_], *, has_few_peers: NDArray[np.bool_]
) -> tuple[Phase, ...]:
    """Return what stands out, but for single steps after one in which all ranks stood still.

    They come back one after the other: what the last of them loses there is the rest of its
    checkpoint, not its input.
    """
    after = np.zeros(len(usual), dtype=np.bool_)
    after[1:] = ~usual[:-1]
    kept = []
    for phase in find_recurring_phases(excess, has_few_peers=has_few_peers):
        if phase.columns is None:
            if phase.num_steps > 1 or not after[phase.first]:
                kept.append(phase)
            continue
        shown = tuple(column for column in phase.columns if not after[column])
        if shown:
            whole = len(shown) == shown[-1] - shown[0] + 1
            kept.append(
                replace(
                    phase,
                    first=shown[0],
                    last=shown[-1],
                    excess_ratio=float(np.nanmedian(excess[phase.row, list(shown)])),
                    columns=None if whole else shown,
                )
            )
    return tuple(kept)


def _is_part_of_stage(
    stalls: HostGaps,
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


def _merge_stages(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Tell stages that miss their input in the same steps as one: they share what is slow."""
    several = [each for each in found if len(each.ranks) > 1]
    alone = [each for each in found if len(each.ranks) == 1]
    if len(several) <= 1:
        return tuple(found)
    worst = max(several, key=lambda each: each.excess_ratio)
    part, fixed_ns = merge_parts(several)
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
        fixed_ns=fixed_ns,
        is_everywhere=True,
    )
    return (whole, *alone)


def _first_gaps_of_late_hosts(stalls: HostGaps, stalled: Sequence[Candidate]) -> NDArray[np.bool_]:
    """Tell the gaps before the first compute of hosts that launch late throughout.

    Such a host is late for the step's first launch as well. Where it loses more
    there than before all other launches together, in most of its steps, its
    input is late too.

    Returns:
        Shape (gaps,).
    """
    profile = stalls.profile
    first, later = stalls.total(Place.INPUT), stalls.total(*WORKING_PLACES)
    explained = np.zeros(len(stalls.gaps), dtype=np.bool_)
    for each in stalled:
        rows = np.isin(profile.ranks, each.ranks)
        inside = (profile.steps >= each.steps[0]) & (profile.steps <= each.steps[1])
        more = first[rows][:, inside] > later[rows][:, inside]
        if more.mean() <= 1 / 2:
            explained |= stalls.among(Place.INPUT) & np.isin(stalls.gaps.rank, each.ranks)
    return explained


def _with_common_pause(common: Candidate, late: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Add common pauses that are part of, or next to, input that all ranks miss throughout to it.

    A step that is later than the others of such a phase stands out as a common pause as well, and
    took no part in the search for the phase.
    """
    grown, is_part = [], False
    for each in late:
        takes_in = (
            not is_part
            and each.steps[0] <= common.steps[1] + 1
            and each.steps[1] >= common.steps[0] - 1
            and len(each.ranks) >= ALL_RANKS_SHARE * len(common.ranks)
        )
        grown.append(_extended(each, common) if takes_in else each)
        is_part |= takes_in
    return tuple(grown) if is_part else (common, *grown)


def _extended(late: Candidate, common: Candidate) -> Candidate:
    whole = (late, common)
    part, fixed_ns = merge_parts(whole)
    steps = min(each.steps[0] for each in whole), max(each.steps[1] for each in whole)
    also = "" if steps == late.steps else f"; {common.evidence}"
    return replace(
        late,
        evidence=late.evidence + also,
        steps=steps,
        shown_steps=None,
        part=part,
        fixed_ns=fixed_ns,
    )
