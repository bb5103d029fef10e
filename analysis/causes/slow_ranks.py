"""Ranks and stages whose own compute stands clear of the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..statistics.noise import num_deviations, robust_deviation
from ..statistics.peer_comparison import Basis, Profile
from ..statistics.phases import DUE_RATIO, standing_out, standing_out_now_and_then

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..statistics.phases import Phase

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
    shown_steps: tuple[int, ...] | None = None
    """The steps that show it, where those between them do not; None: all."""

    @property
    def margin(self) -> float:
        """How far the excess lies above its threshold, as a factor."""
        return self.excess_ratio / self.threshold


def slow_ranks(
    profile: Profile, workers: Mapping[int, tuple[int, ...]] | None = None
) -> tuple[Suspect, ...]:
    """Find the ranks whose compute is longer than their peers', persistently or in some steps.

    Args:
        profile: Compute of each rank against its peers.
        workers: What each rank shares with the partners that look just like it: a slow one makes
            them all longer; None: nothing.
    """
    few = np.array([basis not in (Basis.PEERS, Basis.MATES) for basis in profile.basis])
    alike = None
    if workers is not None:
        shared = [workers[rank] for rank in profile.ranks.tolist()]
        numbers = {worker: number for number, worker in enumerate(dict.fromkeys(shared))}
        alike = np.array([numbers[worker] for worker in shared])
    phases = standing_out_now_and_then(profile.excess_ratio, few=few, alike=alike)
    return tuple(_suspect(profile, phase) for phase in phases)


def _suspect(profile: Profile, phase: Phase) -> Suspect:
    """Measure the slow phase of one rank."""
    row, columns = phase.row, np.arange(phase.first, phase.last + 1)
    if phase.shown is not None:
        columns = np.array(phase.shown)
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
        shown_steps=None if phase.shown is None else tuple(profile.steps[columns].tolist()),
    )


def slow_stages(profile: Profile) -> tuple[Suspect, ...]:
    """Find stages most of whose ranks compute longer than the other stages, for a while or always.

    A rank alone in its stage counts in the last stage only.

    Returns:
        One suspect a stage, with the ranks that are longer: all of them where `STAGE_SHARE` are
        and none is clearly not.
    """
    stages = np.unique(profile.stage)
    if len(stages) == 1:
        return ()
    rows_of = [np.flatnonzero(profile.stage == stage) for stage in stages]
    level = np.array([_middle(profile.total_ns[rows]) for rows in rows_of])
    typical = np.array([_middle(np.delete(level, place, axis=0)) for place in range(len(level))])
    excess = level / typical - 1.0
    alone = [len(rows) == 1 for rows in rows_of[:-1]]
    excess[np.flatnonzero(alone)] = np.nan
    phases = standing_out(excess, few=np.ones(len(excess), dtype=np.bool_), shortest=1)
    found = (
        _slow_stage(profile, rows_of[phase.row], phase, typical[phase.row]) for phase in phases
    )
    return tuple(suspect for suspect in found if suspect is not None)


def _middle(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lower median of each column, NaNs passed over."""
    ordered = np.sort(values, axis=0)
    known = np.maximum((~np.isnan(values)).sum(axis=0) - 1, 0)
    middle: NDArray[np.float64] = np.take_along_axis(ordered, known[None] // 2, axis=0)[0]
    return middle


def _slow_stage(
    profile: Profile, rows: NDArray[np.int64], phase: Phase, typical: NDArray[np.float64]
) -> Suspect | None:
    columns = slice(phase.first, phase.last + 1)
    ratio = row_medians(profile.total_ns[rows, columns] / typical[columns]) - 1.0
    noise = robust_deviation(
        profile.total_ns[rows, columns] / row_medians(profile.total_ns[rows, columns])[:, None]
    )
    clear = num_deviations(profile.total_ns[rows].size) * noise / np.sqrt(phase.num_steps)
    threshold = max(phase.threshold, clear)
    if phase.excess_ratio < threshold:
        return None
    longer = ratio > threshold / 2
    # Noise may hide a rank's share of the work, but no stage spares one of its ranks.
    spared = bool((ratio + clear < phase.excess_ratio / 2).any())
    slow = rows if longer.mean() >= STAGE_SHARE and not spared else rows[longer]
    return Suspect(
        ranks=tuple(profile.ranks[slow].tolist()),
        first_step=int(profile.steps[phase.first]),
        last_step=int(profile.steps[phase.last]),
        num_steps=phase.num_steps,
        excess_ratio=phase.excess_ratio,
        deviation=noise,
        threshold=threshold,
        typical_ns=float(np.nanmedian(typical[columns])),
        compute_ns=float(np.nanmedian(profile.total_ns[slow, columns])),
        num_peers=int(len(profile.ranks) - len(rows)),
        basis=Basis.STAGES,
    )


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
