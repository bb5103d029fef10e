"""Stages of which half the ranks, or more, became slow together: nobody left there to compare with.

Where half of a stage is slow, the median of its ranks is slow as well, and the healthy ones seem
fast. Two things still tell: each rank's own other steps, and that the other stages did not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..statistics.baseline import usual_in_faster_steps
from ..statistics.noise import step_deviation
from ..statistics.peer_comparison import MIN_PEERS, Basis
from ..statistics.phases import SHORT_STEPS, Phase, standing_out
from ..statistics.significance import stands_apart
from .slow_ranks import STAGE_SHARE, Suspect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..statistics.peer_comparison import Profile

LEAST_SHARE = 0.5
"""Share of a stage's ranks from which their median is as slow as they are."""

LEAST_RANKS = 2


def risen_stages(profile: Profile) -> tuple[Suspect, ...]:
    """Find stages half of whose ranks, or more, compute longer in some steps than in their others.

    What the other stages' ranks take in a step, over what each of them usually takes, is the job's
    own change (a first step that warms up) and taken out.

    Args:
        profile: Compute of each rank; what it is compared with plays no part.

    Returns:
        One suspect a stage, with the ranks that became slow together: all of them where
        `STAGE_SHARE` did.
    """
    found = (_risen(profile, int(stage)) for stage in np.unique(profile.stage))
    return tuple(suspect for suspect in found if suspect is not None)


def _risen(profile: Profile, stage: int) -> Suspect | None:
    rows = np.flatnonzero(profile.stage == stage)
    others = np.flatnonzero(profile.stage != stage)
    if len(rows) < LEAST_RANKS or len(others) < MIN_PEERS:
        return None
    relative = profile.total_ns[others] / row_medians(profile.total_ns[others])[:, None]
    common = row_medians(relative.T)
    even = profile.total_ns[rows] / common
    usual = usual_in_faster_steps(even)
    # Where the other stages fell, or all rose, the stage itself did nothing.
    own = profile.total_ns[rows] / usual_in_faster_steps(profile.total_ns[rows])
    excess = np.minimum(even / usual, own) - 1.0
    phases = standing_out(
        excess,
        few=np.ones(len(rows), dtype=np.bool_),
        shortest=SHORT_STEPS,
        deviation=step_deviation(relative / common - 1.0),
    )
    together = _together(phases)
    if len(together) < max(LEAST_RANKS, LEAST_SHARE * len(rows)):
        return None
    slow = np.array([phase.row for phase in together])
    phase = _middle_phase(together)
    level = row_medians((excess[slow]).T)
    num_stages = len(np.unique(profile.stage))
    if not stands_apart(level, phase, num_rows=num_stages):
        return None
    mine = rows if len(slow) >= STAGE_SHARE * len(rows) else rows[slow]
    columns = slice(phase.first, phase.last + 1)
    return Suspect(
        ranks=tuple(profile.ranks[mine].tolist()),
        first_step=int(profile.steps[phase.first]),
        last_step=int(profile.steps[phase.last]),
        num_steps=phase.num_steps,
        excess_ratio=phase.excess_ratio,
        deviation=phase.deviation,
        threshold=phase.threshold,
        typical_ns=float(np.nanmedian((usual * common)[slow, columns])),
        compute_ns=float(np.nanmedian(profile.total_ns[rows[slow], columns])),
        num_peers=len(others),
        basis=Basis.EARLIER,
    )


def _together(phases: Sequence[Phase]) -> list[Phase]:
    """Return the phases that share most of their steps with the middle one."""
    if not phases:
        return []
    middle = _middle_phase(phases)
    return [
        phase
        for phase in phases
        if 2 * _num_shared(phase, middle) > max(phase.num_steps, middle.num_steps)
    ]


def _middle_phase(phases: Sequence[Phase]) -> Phase:
    def middle(values: list[float]) -> float:
        return float(np.sort(values)[len(values) // 2])

    return Phase(
        row=phases[0].row,
        first=int(middle([phase.first for phase in phases])),
        last=int(middle([phase.last for phase in phases])),
        excess_ratio=middle([phase.excess_ratio for phase in phases]),
        deviation=phases[0].deviation,
        threshold=middle([phase.threshold for phase in phases]),
    )


def _num_shared(one: Phase, other: Phase) -> int:
    return min(one.last, other.last) - max(one.first, other.first) + 1
