"""Ranks whose host launches late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import medians_by_kind, row_medians, sum_cells
from ..replay.model import Place
from ..statistics.phases import find_phases
from .candidate import merge_hosts
from .detector import Cause
from .host_gaps import find_late_rows, find_late_stages, stall_candidate
from .thresholds import HOST_STALL_STEPS, ONE_RANK_SHARE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..statistics.phases import Phase
    from .candidate import Candidate
    from .detector import Case
    from .host_gaps import HostGaps

STALL_PLACES = (Place.FORWARD, Place.BACKWARD, Place.OTHER)
"""Where a host that launches late loses time; before collectives see `launch_skew`."""

LATE_PLACES = (*STALL_PLACES, Place.LAUNCH, Place.INPUT)
"""All that a host makes late that launches late throughout."""


CAUSE = Cause(
    name="host-stall",
    one="launches late because its host stalls",
    several="launch late because their host stalls",
    has_place=True,
)


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the ranks, or whole hosts, that launch late throughout."""
    pauses = case.common_pauses
    steps = ~(pauses.places[Place.FORWARD] | pauses.places[Place.BACKWARD])
    return (*found, *merge_hosts(find_host_stalls(case.gaps, steps, pauses.in_gaps), case.ranks))


def find_host_stalls(
    stalls: HostGaps, usual: NDArray[np.bool_], in_dips: NDArray[np.bool_] | None = None
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
    fixed_ns = [((place,), _expected(stalls, stalls.total(place))[0]) for place in LATE_PLACES]
    num_late = _num_late_launches(stalls, in_dips)
    where = "between its launches"
    found = [
        stall_candidate(CAUSE, stalls, phase, [phase.row], (LATE_PLACES, where), fixed_ns)
        for phase in find_phases(excess, has_few_peers=~enough)
        if _is_persistent(excess[phase.row], num_late[phase.row], phase)
    ]
    named = {rank for candidate in found for rank in candidate.ranks}
    for phase in find_late_stages(stalls, gap, usual, always=False):
        rows = find_late_rows(stalls, gap, phase)
        # One of two ranks lifts its stage's median by half of what it loses.
        if not named.issuperset(stalls.profile.ranks[rows].tolist()):
            found.append(stall_candidate(CAUSE, stalls, phase, rows, (STALL_PLACES, where)))
    return tuple(found)


def _expected(
    stalls: HostGaps, gap: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return what a rank of a healthy host loses, and which ranks have enough peers to tell."""
    expected, enough = medians_by_kind(gap, stalls.profile.stage)
    others = np.median(gap, axis=0)
    expected[~enough] = np.minimum(others, row_medians(gap)[:, None])[~enough]
    return expected, enough


def _num_late_launches(stalls: HostGaps, in_dips: NDArray[np.bool_] | None) -> NDArray[np.float64]:
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
    whole, squares = sum_cells(*where, gap), sum_cells(*where, gap**2)
    return np.divide(whole**2, squares, out=np.zeros_like(whole), where=squares > 0)


def _is_persistent(
    excess: NDArray[np.float64], num_late: NDArray[np.float64], phase: Phase
) -> bool:
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
