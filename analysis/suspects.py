"""Ranks and stages whose own compute stands clear of the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.noise import best_segment, robust_deviation
from analysis.profile import Basis, Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

DUE_RATIO = 0.10
"""An excess from which a finding is due in even one step. Source: design.md section 5."""

PERSISTENT_RATIO = 0.03
"""An excess below which not even a persistent one is told: hardware of one kind differs by as
much. Source: arXiv 2402.15627 reports slow machines from about 10 % on."""

NUM_DEVIATIONS = 4.0
"""Robust deviations that an excess must exceed. Source: design.md section 5."""

NUM_PERSISTENT_STEPS = 5
"""Steps that an excess below `DUE_RATIO` must last."""

SHORT_STEPS = 3
"""A slow phase shorter than this must also stand clear of what all other ranks ever showed."""

CLEAR_FACTOR = 1.5
STAGE_SHARE = 0.8
"""Share of a stage's ranks that must be longer than the other stages for a stage imbalance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank, or all ranks of a stage, with a slow phase."""

    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    excess_ratio: float
    """Median over the phase's steps."""

    deviation: float
    """One robust deviation of the excess when nothing is wrong."""

    threshold: float
    """What the excess had to exceed."""

    typical_ns: float
    """Expected compute in a step of the phase, median."""

    compute_ns: float
    """Own compute in a step of the phase, median."""

    num_peers: int
    basis: Basis


def slow_ranks(profile: Profile) -> tuple[Suspect, ...]:
    """Find the ranks whose compute is longer than their peers', persistently or in some steps.

    Persistent slowness is looked for first. What remains of the other ranks
    then tells how far a short phase must stand out.
    """
    excess = profile.excess_ratio
    deviation = robust_deviation(excess)
    if np.isnan(deviation):
        return ()
    due = max(DUE_RATIO, NUM_DEVIATIONS * deviation)
    found: dict[int, Suspect] = {}
    for row in range(len(profile.ranks)):
        suspect = _persistent(profile, excess, row, due, deviation)
        if suspect is not None:
            found[row] = suspect
    calm = [row for row in range(len(profile.ranks)) if row not in found]
    for row in calm:
        others = [other for other in calm if other != row]
        tail = float(np.nanmax(np.abs(excess[others]), initial=0.0)) if others else 0.0
        threshold = max(due, CLEAR_FACTOR * tail)
        if (excess[row] >= threshold).any():
            found[row] = _suspect(profile, excess, row, threshold, deviation)
    return tuple(found[row] for row in sorted(found))


def _persistent(
    profile: Profile, excess: NDArray[np.float64], row: int, due: float, deviation: float
) -> Suspect | None:
    """Test a rank for a slow phase of several steps."""
    own = excess[row]
    known = int((~np.isnan(own)).sum())
    if known < SHORT_STEPS:
        return None
    if (own >= due).sum() >= SHORT_STEPS:
        suspect = _suspect(profile, excess, row, due, deviation)
        inside = (profile.steps >= suspect.first_step) & (profile.steps <= suspect.last_step)
        if (own[inside] >= due).sum() >= SHORT_STEPS and suspect.excess_ratio >= due:
            return suspect
    levels = np.delete(np.nanmedian(excess, axis=1), row)
    between_ranks = robust_deviation(levels) if len(levels) else 0.0
    middle = float(np.nanmedian(own))
    standard_error = 1.2533 * max(robust_deviation(own), deviation) / np.sqrt(known)
    threshold = max(
        PERSISTENT_RATIO,
        NUM_DEVIATIONS * standard_error,
        NUM_DEVIATIONS * between_ranks + float(np.median(levels, axis=0)) if len(levels) else 0.0,
    )
    # The few first steps of one rank are too thin a ground for a small excess.
    if profile.basis[row] is Basis.EARLIER:
        return None
    if known >= NUM_PERSISTENT_STEPS and middle >= threshold:
        return _suspect(profile, excess, row, threshold, deviation)
    return None


def _suspect(
    profile: Profile, excess: NDArray[np.float64], row: int, threshold: float, deviation: float
) -> Suspect:
    """Measure the slow phase of one rank."""
    own = excess[row]
    high = own[own >= threshold]
    level = float(np.median(high)) if len(high) else float(np.nanmedian(own))
    first, last = best_segment(own - level / 2)
    phase = slice(first, last + 1)
    same_stage = int((profile.stage == profile.stage[row]).sum()) - 1
    return Suspect(
        ranks=(int(profile.ranks[row]),),
        first_step=int(profile.steps[first]),
        last_step=int(profile.steps[last]),
        excess_ratio=float(np.nanmedian(own[phase])),
        deviation=deviation,
        threshold=threshold,
        typical_ns=float(np.nanmedian(profile.expected_ns[row, phase])),
        compute_ns=float(np.nanmedian(profile.total_ns[row, phase])),
        num_peers=same_stage,
        basis=profile.basis[row],
    )


def slow_stages(profile: Profile) -> tuple[Suspect, ...]:
    """Find stages whose ranks all compute longer than those of the other stages."""
    stages = np.unique(profile.stage)
    if len(stages) == 1:
        return ()
    level = np.nanmedian(profile.total_ns, axis=1)
    rows_of = {int(stage): np.flatnonzero(profile.stage == stage) for stage in stages}
    by_stage = {stage: _lower_median(level[rows]) for stage, rows in rows_of.items()}
    found = []
    for stage, rows in rows_of.items():
        if len(rows) == 1 and stage != stages.max():
            continue
        others = [by_stage[other] for other in by_stage if other != stage]
        typical = float(np.median(others))
        excess = by_stage[stage] / typical - 1.0
        noise = robust_deviation(profile.total_ns[rows] / level[rows, None])
        threshold = max(DUE_RATIO, NUM_DEVIATIONS * noise / np.sqrt(profile.total_ns.shape[1]))
        longer = float((level[rows] > typical * (1.0 + threshold / 2)).mean())
        if excess >= threshold and longer >= STAGE_SHARE:
            found.append(
                Suspect(
                    ranks=tuple(profile.ranks[rows].tolist()),
                    first_step=int(profile.steps[0]),
                    last_step=int(profile.steps[-1]),
                    excess_ratio=excess,
                    deviation=noise,
                    threshold=threshold,
                    typical_ns=typical,
                    compute_ns=by_stage[stage],
                    num_peers=int(len(profile.ranks) - len(rows)),
                    basis=Basis.STAGES,
                )
            )
    return tuple(found)


def unexplained(profile: Profile) -> tuple[int, ...]:
    """Name the ranks that differ from the few there are to compare with, but have too few peers.

    With one or two peers nobody can say which of them is slow.
    """
    level = np.nanmedian(profile.total_ns, axis=1)
    found = []
    for row, basis in enumerate(profile.basis):
        if basis in (Basis.PEERS, Basis.STAGES):
            continue
        mates = np.flatnonzero(profile.stage == profile.stage[row])
        fastest = level[mates].min()
        if level[row] > fastest * (1.0 + DUE_RATIO):
            found.append(int(profile.ranks[row]))
    return tuple(found)


def _lower_median(values: NDArray[np.float64]) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])
