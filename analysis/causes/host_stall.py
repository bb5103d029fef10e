"""Ranks whose host launches late in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import medians_by_kind, row_medians
from ..replay.model import Place
from ..statistics.phases import find_rank_phases
from ..statistics.thresholds import THRESHOLDS
from .candidate import explained_gaps, merge_hosts
from .detector import Cause
from .host_gaps import WORKING_PLACES, Loss, late_candidates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..statistics.phases import Phase
    from .candidate import Candidate
    from .detector import Case
    from .host_gaps import HostGaps

STALL_PLACES = (Place.FORWARD, Place.BACKWARD, Place.OTHER)
"""Places that show a stalling host. For gaps before collectives see `launch_skew`."""

CAUSE = Cause(
    name="host-stall",
    one="launches late because its host stalls",
    several="launch late because their host stalls",
    has_place=True,
)


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the ranks, or whole hosts, that launch late."""
    pauses = case.common_pauses
    steps = ~(pauses.places[Place.FORWARD] | pauses.places[Place.BACKWARD])
    explained = pauses.covers_gap | explained_gaps(found, len(case.gaps.gaps))
    stalled = find_host_stalls(case.gaps, steps, explained)
    return (*found, *merge_hosts(stalled, case.ranks))


def find_host_stalls(
    gaps: HostGaps, steps: NDArray[np.bool_], explained: NDArray[np.bool_] | None = None
) -> tuple[Candidate, ...]:
    """Find ranks whose host launches late.

    They do so in `min_lasting_steps` steps; a host that runs ahead of its device may hide its stall
    in the first of them.

    Args:
        gaps: The run's gaps.
        steps: Shape (steps,): steps that are searched.
        explained: Shape (gaps,): gaps that are part of a common pause; None: none.
    """
    lost_ns = gaps.total_ns(*STALL_PLACES, excluding=explained)
    expected, enough = _expected_ns(gaps, lost_ns)
    excess = (lost_ns - expected) / gaps.compute_ns[:, None]
    excess[:, ~steps] = np.nan
    single = [
        phase
        for phase in find_rank_phases(excess, has_few_peers=~enough)
        if _is_persistent(excess[phase.row], phase)
    ]
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
            ((place,), _expected_ns(gaps, gaps.total_ns(place))[0])
            for place in (*WORKING_PLACES, Place.INPUT)
        ],
        steps=steps,
        is_zero_usual=False,
    )
    return late_candidates(gaps, loss, single)


def _expected_ns(
    gaps: HostGaps, lost_ns: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return what a rank of a healthy host loses, and which ranks have enough peers.

    Args:
        gaps: The run's gaps.
        lost_ns: Shape (ranks, steps).

    Returns:
        Shapes (ranks, steps), ns, and (ranks,).
    """
    expected, enough = medians_by_kind(lost_ns, gaps.profile.stage)
    others = np.median(lost_ns, axis=0)
    expected[~enough] = np.minimum(others, row_medians(lost_ns)[:, None])[~enough]
    return expected, enough


def _is_persistent(excess: NDArray[np.float64], phase: Phase) -> bool:
    """Return whether a phase is a stall in most of its steps, not a few long pauses.

    Args:
        excess: Shape (steps,), of one rank; NaN if unknown.
        phase: The phase.
    """
    known = excess[phase.inside]
    known = known[~np.isnan(known)]
    if phase.excess_ratio < phase.threshold or len(known) < THRESHOLDS.min_lasting_steps:
        return False
    return float((known >= np.median(known) / 2).mean()) >= THRESHOLDS.one_rank_share
