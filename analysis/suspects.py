"""Ranks and stages whose own compute stands clear of the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.noise import num_deviations, robust_deviation
from analysis.phases import DUE_RATIO, standing_out
from analysis.profile import Basis, Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.phases import Phase

STAGE_SHARE = 0.8
"""Share of a stage's ranks that must be longer than the other stages for a stage imbalance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank, or all ranks of a stage, with a slow phase."""

    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    num_steps: int
    """Steps of the phase that are in the trace."""

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

    @property
    def margin(self) -> float:
        """How far the excess lies above its threshold, as a factor."""
        return self.excess_ratio / self.threshold


def slow_ranks(profile: Profile) -> tuple[Suspect, ...]:
    """Find the ranks whose compute is longer than their peers', persistently or in some steps."""
    few = np.array([basis not in (Basis.PEERS, Basis.MATES) for basis in profile.basis])
    return tuple(_suspect(profile, phase) for phase in standing_out(profile.excess_ratio, few=few))


def _suspect(profile: Profile, phase: Phase) -> Suspect:
    """Measure the slow phase of one rank."""
    row, columns = phase.row, slice(phase.first, phase.last + 1)
    return Suspect(
        ranks=(int(profile.ranks[row]),),
        first_step=int(profile.steps[phase.first]),
        last_step=int(profile.steps[phase.last]),
        num_steps=phase.num_steps,
        excess_ratio=phase.excess_ratio,
        deviation=phase.deviation,
        threshold=phase.threshold,
        typical_ns=float(np.nanmedian(profile.expected_ns[row, columns])),
        compute_ns=float(np.nanmedian(profile.total_ns[row, columns])),
        num_peers=int((profile.stage == profile.stage[row]).sum()) - 1,
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
        clear = num_deviations(profile.total_ns[rows].size)
        threshold = max(DUE_RATIO, clear * noise / np.sqrt(profile.total_ns.shape[1]))
        longer = float((level[rows] > typical * (1.0 + threshold / 2)).mean())
        if excess >= threshold and longer >= STAGE_SHARE:
            found.append(
                Suspect(
                    ranks=tuple(profile.ranks[rows].tolist()),
                    first_step=int(profile.steps[0]),
                    last_step=int(profile.steps[-1]),
                    num_steps=len(profile.steps),
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
        if basis not in (Basis.EARLIER, Basis.NOBODY):
            continue
        mates = np.flatnonzero(profile.stage == profile.stage[row])
        fastest = level[mates].min()
        if level[row] > fastest * (1.0 + DUE_RATIO):
            found.append(int(profile.ranks[row]))
    return tuple(found)


def _lower_median(values: NDArray[np.float64]) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])
