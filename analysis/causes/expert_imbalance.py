"""Experts that get more tokens than others: long inside, while the rest of the rank is as usual."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians, sum_cells
from ..replay.model import COMPUTE_KINDS, has_kind
from ..report.text import format_duration, format_percent, format_ranks
from ..statistics.peers import MIN_PEERS, median_of_peers
from ..statistics.phases import MIN_EXCESS_RATIO, MIN_LASTING_STEPS, PERSISTENT_RATIO, find_phases
from . import sequence_imbalance, stage_imbalance
from .candidate import Candidate, named_ranks
from .slow_compute import SLOW_DEVICE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..replay.what_if import Replayer
    from ..statistics.peers import ComputeProfile
    from ..statistics.phases import Phase
    from .detector import Case


CAUSE = sequence_imbalance.CAUSE
"""Of the causes that design.md names, the one about tokens that are dealt unequally."""


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add ranks whose experts get more tokens; they explain stages that are long for them."""
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
    """Find ranks whose experts compute longer than those of their stage, for 3 steps or more.

    A device that is slow is slow outside its experts as well, and so is a rank
    with longer sequences; what is left is the number of tokens that the router
    sends. Routing that varies from step to step is in nobody's favour and no
    finding.

    Args:
        experts: Shape (ops,): which operations are the experts' compute; None: none is known.
        profile: What the ranks compute outside their experts.
        replayer: Prices it: the experts of these ranks take what those of the others do.
        blamed: Ranks whose compute is slow as a whole.

    Returns:
        None where no rank stands out, or mending all of them wins less than `MIN_EXCESS_RATIO`.
    """
    if experts is None or not experts.any():
        return None
    total, expected = _experts_by_rank(experts, profile, replayer)
    excess = total / expected - 1.0
    excess[np.isin(profile.ranks, list(blamed))] = np.nan
    phases = [
        phase
        for phase in find_phases(excess, min_steps=MIN_LASTING_STEPS)
        if phase.excess_ratio >= MIN_EXCESS_RATIO
    ]
    if not phases:
        return None
    part, fixed_ns = _part(experts, phases, profile, replayer, expected / total)
    recorded_ns = replayer.model.operations.duration_ns
    without = float(replayer.full_with(np.where(part, fixed_ns, recorded_ns)).mean())
    lost = float(replayer.full_recorded().mean()) / without - 1.0
    if lost < MIN_EXCESS_RATIO:
        return None
    worst = max(phases, key=lambda phase: phase.excess_ratio)
    columns = slice(worst.first, worst.last + 1)
    ranks = tuple(sorted(int(profile.ranks[phase.row]) for phase in phases))
    first = int(profile.steps[min(phase.first for phase in phases)])
    last = int(profile.steps[max(phase.last for phase in phases)])
    times = [
        format_duration(float(np.nanmedian(each[worst.row, columns]))) for each in (total, expected)
    ]
    return Candidate(
        cause=CAUSE,
        ranks=ranks,
        steps=(first, last),
        part=part,
        fixed_ns=fixed_ns,
        excess_ratio=worst.excess_ratio,
        threshold=max(worst.threshold, MIN_EXCESS_RATIO),
        evidence=(
            f"{format_ranks(ranks)}: experts get more tokens than others; those of rank"
            f" {int(profile.ranks[worst.row])} compute {times[0]} a step against {times[1]} in its"
            f" stage (+{format_percent(worst.excess_ratio)}), in steps {first} to {last}, while"
            " compute outside them is as usual; with equal shares a step would be"
            f" {format_percent(1 - 1 / (1 + lost))} shorter"
        ),
    )


def mark_explained_stages(
    candidates: Sequence[Candidate], experts: Candidate, model: ReplayModel
) -> tuple[Candidate, ...]:
    """Leave out long stages that are as long as the others but for some ranks' experts.

    Compute outside the experts stands for a rank's whole compute at the mean share of its
    stage. Tokens that one rank has more others have less, so that mean holds; unless
    they come from nowhere in the stage.

    Args:
        candidates: All that was found.
        experts: What `find_expert_imbalance` found.
        model: The operations.
    """
    if experts.part is None or experts.fixed_ns is None:
        return tuple(candidates)
    duration_ns = model.operations.duration_ns
    surplus_ns = np.where(experts.part, duration_ns - experts.fixed_ns, 0.0)
    compute = has_kind(model, COMPUTE_KINDS) & model.on_device

    def is_left(each: Candidate) -> bool:
        if each.cause is not stage_imbalance.CAUSE:
            return True
        mine = compute & np.isin(model.rank, each.ranks)
        share = float(surplus_ns[mine].sum() / duration_ns[mine].sum())
        return (1.0 + each.excess_ratio) * (1.0 - share) - 1.0 >= PERSISTENT_RATIO

    return tuple(
        each if is_left(each) else replace(each, explained_by=CAUSE) for each in candidates
    )


def _experts_by_rank(
    experts: NDArray[np.bool_], profile: ComputeProfile, replayer: Replayer
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the experts' compute by rank and step, and that of the others of its stage.

    Both of shape (ranks, steps), ns; NaN where fewer than `MIN_PEERS` others have experts. What a
    rank's compute outside is longer by is taken out first: its whole device is slow, or its
    sequences are long.
    """
    operations = replayer.model.operations
    rows = np.flatnonzero(experts)
    row = np.searchsorted(profile.ranks, replayer.model.rank[rows])
    column = np.searchsorted(profile.steps, np.array(operations.steps)[operations.step[rows]])
    total = sum_cells(profile.total_ns.shape, row, column, operations.duration_ns[rows])
    total = np.where(total > 0, total, np.nan)
    expected = np.full_like(total, np.nan)
    has_experts = ~np.isnan(total).all(axis=1)
    for stage in np.unique(profile.stage).tolist():
        mine = np.flatnonzero((profile.stage == stage) & has_experts)
        if len(mine) > MIN_PEERS:
            outside = profile.total_ns[mine]
            relative = outside / row_medians(outside.T)[None]
            expected[mine] = median_of_peers(total[mine] / relative) * relative
    return total, expected


def _part(
    experts: NDArray[np.bool_],
    phases: list[Phase],
    profile: ComputeProfile,
    replayer: Replayer,
    share: NDArray[np.float64],
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return the phases' operations, and what they would take with an equal share."""
    operations = replayer.model.operations
    chosen = np.zeros(profile.total_ns.shape, dtype=np.bool_)
    for phase in phases:
        chosen[phase.row, phase.first : phase.last + 1] = True
    part = np.zeros(len(experts), dtype=np.bool_)
    fixed_ns = np.full(len(experts), np.nan)
    rows = np.flatnonzero(experts)
    row = np.searchsorted(profile.ranks, replayer.model.rank[rows])
    column = np.searchsorted(profile.steps, np.array(operations.steps)[operations.step[rows]])
    kept = chosen[row, column]
    part[rows[kept]] = True
    fixed_ns[rows[kept]] = operations.duration_ns[rows[kept]] * share[row[kept], column[kept]]
    return part, fixed_ns
