"""Steps in which most links between hosts are slower than in others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..statistics.baseline import usual_in_faster_steps
from ..statistics.noise import calm_deviation, flapping_deviation, num_deviations
from ..statistics.phases import DUE_RATIO, Phase, standing_out
from ..statistics.significance import error_of_level, stands_apart
from .link_profile import LONE_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .link_profile import LinkProfile

SEVERAL_LINKS = 3
"""Links that must be slower together for the network to be at fault.
Source: design.md section 5, several groups."""

MOST_SHARE = 0.5
"""Share of the links between hosts that must be slower for that."""


def crossing_links(profile: LinkProfile, hosts: Mapping[int, str]) -> NDArray[np.bool_]:
    """Tell which links lie between hosts, shape (links,).

    Args:
        profile: Transfers by link and step.
        hosts: Host of each rank. Where none is known, or all ranks share one, no link crosses.
    """
    return np.array(
        [
            len({hosts.get(rank, "") for rank in link.members}) > 1
            for link in profile.transfers.links
        ],
        dtype=np.bool_,
    )


def common_slowness(
    profile: LinkProfile, hosts: Mapping[int, str], *, least_steps: int = LONE_STEPS
) -> tuple[Phase, NDArray[np.bool_]] | None:
    """Find steps in which most links between hosts are slower than in others.

    Args:
        profile: Transfers by link and step.
        hosts: Host of each rank. Where none is known, or all ranks share one, all links count.
        least_steps: Fewer single slow steps than this are no phase. Where so few count that
            something else has to speak for them, the calm half of the steps tells the noise.

    Returns:
        The phase, and which links take part, shape (links,); None where there is none.
    """
    if not profile.total_ns.size:
        return None
    crosses = crossing_links(profile, hosts)
    ratio = profile.total_ns / row_medians(profile.total_ns)[:, None]
    if crosses.any():
        ratio[~crosses] = np.nan
    # All links together: the faster steps of one link alone may be mere luck.
    level = row_medians(ratio.T)[None]
    excess = level / usual_in_faster_steps(level) - 1.0
    level_error = error_of_level(ratio)
    changing = flapping_deviation(excess[0])
    # The median of so few changes is itself uncertain: two of its standard errors are added.
    changing *= 1.0 + 2.0 / np.sqrt(2.0 * max(excess.shape[1] - 1, 1))
    deviation = max(changing, level_error)
    phases = standing_out(
        excess, few=np.ones(1, dtype=np.bool_), shortest=LONE_STEPS, deviation=deviation
    )
    steady = phases and stands_apart(level[0], phases[0], num_rows=1, least_deviation=level_error)
    if not steady and least_steps < LONE_STEPS:
        deviation = max(min(changing, _calm(excess[0])), level_error)
    phase = phases[0] if steady else _flapping(excess[0], deviation, least_steps)
    if phase is None:
        return None
    # A flapping network is slow in some steps of its phase only.
    within = excess[0] >= phase.excess_ratio / 2
    within[: phase.first] = within[phase.last + 1 :] = False
    outside = ratio[:, ~within]
    before = row_medians(outside) if outside.shape[1] else usual_in_faster_steps(ratio)[:, 0]
    slower = np.nan_to_num(row_medians(ratio[:, within]) / before - 1.0) >= phase.excess_ratio / 2
    known = (~np.isnan(ratio)).any(axis=1)
    return (phase, slower) if slower.sum() >= MOST_SHARE * known.sum() else None


def _calm(excess: NDArray[np.float64]) -> float:
    """Return the noise of the calm half of the steps, and two of its standard errors."""
    return calm_deviation(excess) * (1.0 + 2.0 / float(np.sqrt(max(len(excess) - 2, 1))))


def _flapping(excess: NDArray[np.float64], deviation: float, least_steps: int) -> Phase | None:
    """Return the phase of single slow steps, at least so many, that stand out."""
    threshold = max(DUE_RATIO, num_deviations(len(excess)) * deviation)
    slow = np.flatnonzero(excess >= threshold)
    if len(slow) < least_steps:
        return None
    return Phase(
        row=0,
        first=int(slow[0]),
        last=int(slow[-1]),
        excess_ratio=float(np.median(excess[slow])),
        deviation=deviation,
        threshold=threshold,
    )
