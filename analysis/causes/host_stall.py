"""Ranks whose host launches late in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import lower_medians, medians_by_kind, row_medians
from ..breakdown.waterfall import Part
from ..replay.model import Place
from ..statistics.phases import find_rank_phases
from ..statistics.thresholds import THRESHOLDS
from .candidate import explained_gaps, merge_equal, merge_hosts, merge_recurring
from .detector import Cause, HostTime, ProofForm
from .host_gaps import WORKING_PLACES, Loss, late_candidates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..statistics.phases import Phase
    from .candidate import Candidate
    from .detector import Case
    from .host_gaps import HostGaps

STALL_PLACES = (Place.FORWARD, Place.BACKWARD, Place.OTHER)
"""Places that show a stalling host. For gaps before collectives see `launch_skew`."""

SPAN_PLACES = (Place.SPAN,)

SEARCHES = (
    (True, (Place.FORWARD, Place.BACKWARD, Place.SPAN)),
    (False, STALL_PLACES),
    (False, SPAN_PLACES),
)
"""Stalls that recur, or last, and their places."""

CAUSE = Cause(
    name="host-stall",
    one="launches late because its host stalls",
    several="launch late because their host stalls",
    # The host's own spans before the first compute are input there.
    shown_in=HostTime("gaps of the host", (Part.INPUT, Part.HOST_GAP)),
    has_place=True,
    proof_form=ProofForm.HOST,
)


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the ranks, or whole hosts, that launch late."""
    pauses = case.common_pauses
    steps = ~(pauses.places[Place.FORWARD] | pauses.places[Place.BACKWARD])
    # In the same span of the job's own, what all ranks take is compared and so no stall.
    explained = pauses.covers_gap & ~case.gaps.is_at(Place.SPAN)
    explained |= explained_gaps(candidates, len(case.gaps.gaps))
    stalled = find_host_stalls(case.gaps, steps, explained)
    stalled = merge_equal(merge_hosts(stalled, case.ranks), CAUSE)
    return (*candidates, *merge_recurring(stalled, len(case.gaps.profile.ranks)))


def find_host_stalls(
    gaps: HostGaps,
    steps: NDArray[np.bool_],
    explained: NDArray[np.bool_] | None = None,
    *,
    searches: tuple[tuple[bool, tuple[Place, ...]], ...] = SEARCHES,
) -> tuple[Candidate, ...]:
    """Find ranks whose host launches late.

    They do so in `min_lasting_steps` steps; a host that runs ahead of its device may hide its stall
    in the first of them.

    Args:
        steps: Shape (steps,): steps that are searched.
        explained: Shape (gaps,): gaps that are part of a common pause; None: none.
        searches: Whether a stall recurs, and where it is; the first one that finds a rank counts.
    """
    lost_ns = gaps.total_ns(*STALL_PLACES, excluding=explained)
    phases: dict[int, Phase] = {}
    for may_recur, places in searches:
        lost = gaps.total_ns(*places, excluding=explained)
        expected, enough = _expected_ns(gaps, lost, places)
        excess = (lost - expected) / gaps.compute_ns[:, None]
        excess[:, ~steps] = np.nan
        for phase in find_rank_phases(excess, has_few_peers=~enough, may_recur=may_recur):
            if phase.recurs if may_recur else _is_persistent(excess[phase.row], phase):
                phases.setdefault(phase.row, phase)
    # A host that launches late is late for the first launch of a step as well. If it loses more
    # there than before all other launches together, its input is late too.
    later_ns = gaps.total_ns(*WORKING_PLACES)[gaps.row, gaps.column]
    first_ns = gaps.total_ns(Place.INPUT)[gaps.row, gaps.column]
    late = gaps.is_at(*WORKING_PLACES) | (gaps.is_at(Place.INPUT) & (first_ns <= later_ns))
    loss = Loss(
        cause=CAUSE,
        activity="between launches",
        lost_ns=lost_ns,
        chosen=late,
        # By place: a pause of all ranks is normal at its own place only.
        expected=[
            ((place,), _expected_ns(gaps, gaps.total_ns(place), (place,))[0])
            for place in (*WORKING_PLACES, Place.INPUT)
        ],
        steps=steps,
        is_zero_usual=False,
    )
    single = [phases[row] for row in sorted(phases)]
    names = {phase.row: name for phase in single if (name := _span_of_job(gaps, phase))}
    return late_candidates(
        gaps, loss, single, {row: f'in its own span "{name}"' for row, name in names.items()}
    )


def _span_of_job(gaps: HostGaps, phase: Phase) -> str:
    """Return the name of the job's own span that takes most of a stall; empty if none does."""
    items, columns = gaps.gaps, phase.shown
    if items.name is None:
        return ""
    mine = gaps.is_at(Place.SPAN) & np.isin(gaps.column, columns)
    peers = np.flatnonzero(gaps.profile.stage == gaps.profile.stage[phase.row])
    peers = peers[peers != phase.row]
    least_ns = phase.excess_ratio * float(gaps.compute_ns[phase.row]) * len(columns) / 2
    for code in np.unique(items.name[mine & (gaps.row == phase.row)]).tolist():
        named = mine & (items.name == code)
        taken_ns = np.bincount(
            gaps.row[named], weights=items.gap_ns[named], minlength=len(gaps.compute_ns)
        )
        usual_ns = float(lower_medians(taken_ns[peers])) if len(peers) else 0.0
        if taken_ns[phase.row] - usual_ns >= least_ns:
            return str(items.names[code])
    return ""


def _expected_ns(
    gaps: HostGaps, lost_ns: NDArray[np.float64], places: tuple[Place, ...]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return what a rank of a healthy host loses, and which ranks have enough peers.

    In spans of the job's own all ranks of a stage do the same work, so one or two peers suffice
    there: a rank is late if it takes longer than all of them.
    """
    expected, enough = medians_by_kind(lost_ns, gaps.profile.stage, is_lower=True)
    usual = np.minimum(lower_medians(lost_ns), row_medians(lost_ns)[:, None])
    expected[~enough] = usual[~enough]
    for row in np.flatnonzero(~enough).tolist() if places == SPAN_PLACES else ():
        peers = np.flatnonzero(gaps.profile.stage == gaps.profile.stage[row])
        if len(peers) > 1:
            expected[row] = lost_ns[peers[peers != row]].max(axis=0)
    return expected, enough


def _is_persistent(excess: NDArray[np.float64], phase: Phase) -> bool:
    """Return whether a phase is a stall in most of its steps, not a few long pauses."""
    losses = excess[phase.inside]
    losses = losses[~np.isnan(losses)]
    if phase.excess_ratio < phase.threshold or len(losses) < THRESHOLDS.min_lasting_steps:
        return False
    return float((losses >= np.median(losses) / 2).mean()) >= THRESHOLDS.one_rank_share
