"""Ranks whose experts get more tokens than others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians, sum_cells
from ..replay.model import COMPUTE_KINDS, has_kind
from ..report.text import format_duration, format_percent, format_ranks, format_steps
from ..statistics.peers import median_of_peers
from ..statistics.phases import find_phases
from ..statistics.thresholds import THRESHOLDS
from . import sequence_imbalance, stage_imbalance
from .candidate import Candidate, named_ranks
from .slow_compute import SLOW_DEVICE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..replay.what_if import Replayer
    from ..statistics.peers import ComputeProfile
    from .detector import Case

CAUSE = sequence_imbalance.CAUSE
"""The finding names its ranks; the cause is that of tokens that are distributed unequally."""


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add ranks whose experts get more tokens. They explain stages that are longer only there."""
    reported = [each for each in found if each.explained_by is None]
    blamed = named_ranks(reported, SLOW_DEVICE)
    experts = find_expert_imbalance(case.reading.experts, case.profile, case.replayer, blamed)
    if experts is None:
        return found
    return (*mark_explained_stages(found, experts, case.reading.model), experts)


def find_expert_imbalance(
    experts: NDArray[np.bool_] | None,
    profile: ComputeProfile,
    replayer: Replayer,
    blamed: Collection[int],
) -> Candidate | None:
    """Find ranks whose experts compute longer than those of their stage for some steps.

    A slow device, and a rank with longer sequences, is slow outside its experts as well. What
    remains is the number of tokens that the router sends. Routing that changes from step to step
    favours no rank and is no finding.

    Args:
        experts: Shape (ops,): compute of experts; None: none is known.
        profile: Compute of the ranks outside their experts.
        replayer: Prices the candidate.
        blamed: Ranks whose whole compute is slow.

    Returns:
        None if no rank is significantly longer for `min_lasting_steps` steps, or if fixing all of
        them would save less than `min_excess_ratio` of a step.
    """
    if experts is None or not experts.any():
        return None
    operations = replayer.model.operations
    rows = np.flatnonzero(experts)
    row = np.searchsorted(profile.ranks, replayer.model.rank[rows])
    column = np.searchsorted(profile.steps, np.array(operations.steps)[operations.step[rows]])
    total = sum_cells(profile.total_ns.shape, row, column, operations.duration_ns[rows])
    total = np.where(total > 0, total, np.nan)
    expected = _expected_of_experts(total, profile)
    excess = total / expected - 1.0
    excess[np.isin(profile.ranks, list(blamed))] = np.nan
    phases = [
        phase
        for phase in find_phases(excess, min_steps=THRESHOLDS.min_lasting_steps)
        if phase.excess_ratio >= THRESHOLDS.min_excess_ratio
    ]
    if not phases:
        return None
    chosen = np.zeros(total.shape, dtype=np.bool_)
    for phase in phases:
        chosen[phase.row, phase.inside] = True
    fixed_ns = np.full(len(experts), np.nan)
    equal_share = np.where(chosen, expected / total, np.nan)[row, column]
    fixed_ns[rows] = operations.duration_ns[rows] * equal_share
    part = ~np.isnan(fixed_ns)
    without = float(replayer.full_with(np.where(part, fixed_ns, operations.duration_ns)).mean())
    lost = float(replayer.full_recorded().mean()) / without - 1.0
    if lost < THRESHOLDS.min_excess_ratio:
        return None
    worst = max(phases, key=lambda phase: phase.excess_ratio)
    ranks = tuple(sorted(int(profile.ranks[phase.row]) for phase in phases))
    first = int(profile.steps[min(phase.first for phase in phases)])
    last = int(profile.steps[max(phase.last for phase in phases)])
    times = [
        format_duration(float(np.nanmedian(each[worst.row, worst.inside])))
        for each in (total, expected)
    ]
    return Candidate(
        cause=CAUSE,
        ranks=ranks,
        steps=(first, last),
        part=np.flatnonzero(part),
        fixed_ns=fixed_ns,
        excess_ratio=worst.excess_ratio,
        threshold=max(worst.threshold, THRESHOLDS.min_excess_ratio),
        evidence=(
            f"{format_ranks(ranks)}: experts get more tokens than others; those of rank"
            f" {int(profile.ranks[worst.row])} compute {times[0]} per step, {times[1]} in the rest"
            f" of the stage (+{format_percent(worst.excess_ratio)}), in"
            f" {format_steps((first, last))}; compute outside experts is as usual; with"
            f" equal shares a step would be {format_percent(1 - 1 / (1 + lost))} shorter"
        ),
    )


def mark_explained_stages(
    candidates: Sequence[Candidate], experts: Candidate, model: ReplayModel
) -> tuple[Candidate, ...]:
    """Mark stages that have more work only because of some ranks' experts.

    Args:
        candidates: All that was found.
        experts: Result of `find_expert_imbalance`.
        model: The operations.
    """
    if experts.part is None or experts.fixed_ns is None:
        return tuple(candidates)
    duration_ns = model.operations.duration_ns
    surplus_ns = np.zeros(len(duration_ns))
    surplus_ns[experts.part] = (duration_ns - experts.fixed_ns)[experts.part]
    compute = has_kind(model, COMPUTE_KINDS) & model.on_device

    def is_left(each: Candidate) -> bool:
        if each.cause is not stage_imbalance.CAUSE:
            return True
        mine = compute & np.isin(model.rank, each.ranks)
        share = float(surplus_ns[mine].sum() / duration_ns[mine].sum())
        return (1.0 + each.excess_ratio) * (1.0 - share) - 1.0 >= THRESHOLDS.persistent_ratio

    return tuple(
        each if is_left(each) else replace(each, explained_by=CAUSE) for each in candidates
    )


def _expected_of_experts(
    total: NDArray[np.float64], profile: ComputeProfile
) -> NDArray[np.float64]:
    """Return what is expected of the experts' compute from the peers. Shape (ranks, steps), ns.

    The factor by which a rank computes longer outside experts is taken out of the comparison: its
    whole device is slow, or its sequences are long. NaN if fewer than `min_peers` peers have
    experts.
    """
    expected = np.full_like(total, np.nan)
    has_experts = ~np.isnan(total).all(axis=1)
    for stage in np.unique(profile.stage).tolist():
        mine = np.flatnonzero((profile.stage == stage) & has_experts)
        if len(mine) > THRESHOLDS.min_peers:
            outside = profile.total_ns[mine]
            relative = outside / row_medians(outside.T)[None]
            expected[mine] = median_of_peers(total[mine] / relative) * relative
    return expected
