"""Ranks that wait for input: single ranks, whole stages, or all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import BASELINE_QUANTILE, MIN_ROWS_OF_KIND, medians_by_kind
from ..breakdown.waterfall import Part
from ..statistics.phases import find_rank_phases
from .candidate import (
    Candidate,
    explained_gaps,
    merge_alike,
    merge_equal,
    merge_hosts,
    merge_recurring,
)
from .common_pause import pause_candidates
from .detector import Cause, HostTime, ProofForm
from .host_gaps import INPUT_PLACES, HostGaps, Loss, late_candidates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .detector import Case

CAUSE = Cause(
    name="data-stall",
    one="waits for input",
    several="wait for input",
    sentence="The whole job waits for input",
    shown_in=HostTime("input and gaps of the host", (Part.INPUT, Part.HOST_GAP)),
    has_place=True,
    proof_form=ProofForm.HOST,
)


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add ranks that wait for input, and common pauses that are not planned."""
    gaps, pauses = case.gaps, case.common_pauses
    explained = explained_gaps(candidates, len(gaps.gaps))
    late = find_data_stalls(gaps, pauses.other_steps, explained)
    late = merge_recurring(late, len(gaps.profile.ranks))
    late += pause_candidates(CAUSE, gaps, pauses, ~pauses.is_planned)
    together = [candidate for candidate in late if len(candidate.ranks) > 1]
    single = [candidate for candidate in late if len(candidate.ranks) == 1]
    if len(together) > 1:
        # Stages that miss input, and what all ranks miss, share what is slow.
        whole = merge_alike(together, " wait for input together")
        together = [replace(whole, is_everywhere=True)]
    return (*candidates, *together, *merge_equal(merge_hosts(single, case.ranks), CAUSE))


def find_data_stalls(
    gaps: HostGaps, steps: NDArray[np.bool_], explained: NDArray[np.bool_]
) -> tuple[Candidate, ...]:
    """Find single ranks, and stages, that wait for input.

    Args:
        steps: Shape (steps,): steps that are searched.
        explained: Shape (gaps,): gaps that another cause explains.
    """
    lost_ns = gaps.total_ns(*INPUT_PLACES, excluding=explained)
    expected, enough = medians_by_kind(lost_ns, gaps.profile.stage, is_lower=True)
    expected[~enough] = _baseline_of_few_peers(lost_ns, gaps.profile.stage)[~enough]
    excess = (lost_ns - expected) / gaps.compute_ns[:, None]
    excess[:, ~steps] = np.nan
    # Ranks return from a checkpoint one after the other: what the last one loses in the next step,
    # and in no other, is the rest of the checkpoint.
    is_after_pause = np.append(False, ~steps[:-1])
    single = [
        phase
        for phase in find_rank_phases(excess, has_few_peers=~enough, may_recur=True)
        if not is_after_pause[phase.shown].all()
    ]
    loss = Loss(
        cause=CAUSE,
        activity="waiting for input",
        lost_ns=lost_ns,
        chosen=gaps.is_at(*INPUT_PLACES),
        expected=[(INPUT_PLACES, expected)],
        steps=steps,
        is_zero_usual=True,
    )
    return late_candidates(gaps, loss, single)


def _baseline_of_few_peers(
    lost_ns: NDArray[np.float64], stage: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Return what a rank with one or two peers, or none, loses normally. Shape (ranks, steps).

    Ranks of other stages may load no input. So the baseline is the rank's own faster steps, or
    the peer that loses most in that step if that is less. One peer is enough, because a rank that
    need not wait for input loses nothing.
    """
    faster_ns = np.quantile(lost_ns, BASELINE_QUANTILE, axis=1)
    baseline = np.broadcast_to(faster_ns[:, None], lost_ns.shape).copy()
    stages, size = np.unique(stage, return_counts=True)
    for number in stages[(size > 1) & (size < MIN_ROWS_OF_KIND)].tolist():
        rows = np.flatnonzero(stage == number)
        for row in rows.tolist():
            peers = rows[rows != row]
            baseline[row] = np.minimum(faster_ns[row], lost_ns[peers].max(axis=0))
    return baseline
