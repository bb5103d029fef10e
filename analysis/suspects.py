"""Ranks and stages whose own compute stands clear of the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.noise import best_segment, num_deviations, robust_deviation, step_deviation
from analysis.profile import Basis, Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

DUE_RATIO = 0.10
"""An excess from which a finding is due in even one step. Source: design.md section 5."""

PERSISTENT_RATIO = 0.05
"""An excess below which not even a persistent one is told: healthy devices of one kind differ by
a few percent. Source: arXiv 2402.15627 calls machines slow from about 10 % on."""

NUM_PERSISTENT_STEPS = 5
"""Steps that an excess below `DUE_RATIO` must last."""

SHORT_STEPS = 3
"""A slow phase shorter than this must also stand clear of what all other ranks ever showed."""

CLEAR_FACTOR = 1.5

PHASE_LEVELS = (0.06, 0.2, 0.6)
"""Excesses at which a slow phase is looked for: half of one parts slow steps from usual ones."""

MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""

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
    """Find the ranks whose compute is longer than their peers', persistently or in some steps.

    Lasting slowness is looked for first. What remains of the other ranks
    then tells how far a short phase must stand out.
    """
    excess = profile.excess_ratio
    known = np.flatnonzero(~np.isnan(excess).all(axis=1))
    deviation = step_deviation(excess[known])
    if np.isnan(deviation):
        return ()
    clear = num_deviations(excess[known].size)
    levels = np.nanmedian(excess[known], axis=1)
    found: dict[int, Suspect] = {}
    for place, row in enumerate(known.tolist()):
        suspect = _lasting(profile, excess[row], row, np.delete(levels, place), (deviation, clear))
        if suspect is not None:
            found[row] = suspect
    calm = [row for row in known.tolist() if row not in found]
    for row in calm:
        others = [other for other in calm if other != row]
        tail = float(np.nanmax(excess[others], initial=0.0)) if others else 0.0
        threshold = max(DUE_RATIO, clear * deviation, CLEAR_FACTOR * tail)
        if (excess[row] >= threshold).any():
            found[row] = _suspect(
                profile, row, best_segment(excess[row] - threshold / 2), (threshold, deviation)
            )
    return tuple(found[row] for row in sorted(found))


def _lasting(
    profile: Profile,
    excess: NDArray[np.float64],
    row: int,
    levels_of_others: NDArray[np.float64],
    noise: tuple[float, float],
) -> Suspect | None:
    """Test a rank for a slow phase of several steps; of several such phases take the surest."""
    deviation, clear = noise
    between = robust_deviation(levels_of_others) if len(levels_of_others) > 1 else 0.0
    few = profile.basis[row] not in (Basis.PEERS, Basis.MATES)
    best: Suspect | None = None
    for level in PHASE_LEVELS:
        first, last = best_segment(excess - level / 2)
        # Once more, at half of what was found: that is where it begins and ends.
        first, last = best_segment(excess - np.nanmedian(excess[first : last + 1]) / 2)
        phase = excess[first : last + 1]
        num = int((~np.isnan(phase)).sum())
        if num < SHORT_STEPS:
            continue
        middle = float(np.nanmedian(phase))
        error = MEDIAN_ERROR * max(robust_deviation(phase), deviation) / np.sqrt(num)
        # Unlike stages, or one rank's few first steps, are too thin a ground for little.
        least = PERSISTENT_RATIO if num >= NUM_PERSISTENT_STEPS and not few else DUE_RATIO
        threshold = max(least, clear * error, clear * between)
        if middle >= threshold and (best is None or middle / threshold > best.margin):
            best = _suspect(profile, row, (first, last), (threshold, deviation))
    return best


def _suspect(
    profile: Profile, row: int, phase: tuple[int, int], yardstick: tuple[float, float]
) -> Suspect:
    """Measure the slow phase, columns first to last, of one rank."""
    first, last = phase
    columns = slice(first, last + 1)
    threshold, deviation = yardstick
    return Suspect(
        ranks=(int(profile.ranks[row]),),
        first_step=int(profile.steps[first]),
        last_step=int(profile.steps[last]),
        num_steps=last - first + 1,
        excess_ratio=float(np.nanmedian(profile.excess_ratio[row, columns])),
        deviation=deviation,
        threshold=threshold,
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
