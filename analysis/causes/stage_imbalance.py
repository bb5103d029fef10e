"""Stages with more work than the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import lower_medians, row_medians
from ..report.text import format_duration, format_percent
from ..statistics.noise import required_deviations, robust_deviation
from ..statistics.phases import find_phases
from ..statistics.thresholds import THRESHOLDS
from .detector import Cause, ProofForm, ShownIn, Subject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..statistics.peers import ComputeProfile
    from ..statistics.phases import Phase


CAUSE = Cause(
    name="stage-imbalance",
    subject=Subject.STAGE,
    shown_in=ShownIn.COMPUTE,
    proof_form=ProofForm.STAGES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRanks:
    """A rank, or ranks of one stage, with the steps in which they compute slowly."""

    rows: NDArray[np.int64]
    """Rows of the profile."""

    phase: Phase
    profile: ComputeProfile
    expected_ns: NDArray[np.float64]
    """Shape (..., steps): the baseline."""

    against: str
    """The baseline in words: "for the other stages"."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return their global ranks, ascending."""
        return tuple(self.profile.ranks[self.rows].tolist())

    @property
    def steps(self) -> tuple[int, int]:
        """Return the first and the last step."""
        return self.phase.steps(self.profile.steps)

    @property
    def evidence(self) -> str:
        """Return compute and baseline: "345 ms of own compute per step, 140 ms (+135 %)"."""
        columns = self.phase.shown
        took, usual = (
            format_duration(float(np.nanmedian(values_ns[..., columns])))
            for values_ns in (self.profile.total_ns[self.rows], self.expected_ns)
        )
        excess, noise = self.phase.excess_ratio, self.phase.deviation
        is_far = excess >= THRESHOLDS.far_deviations * noise
        beyond = f", {'far ' if is_far else ''}outside noise" if noise > 0 else ""
        return (
            f"{took} of own compute per step, {usual} {self.against}"
            f" (+{format_percent(excess)}{beyond}; waiting not counted)"
        )


def find_slow_stages(profile: ComputeProfile) -> tuple[SlowRanks, ...]:
    """Find stages most of whose ranks compute longer than the other stages, always or for a while.

    A stage of one rank counts only if it is the last stage. Work that is distributed unequally
    lasts: a step or two in which all ranks of a stage are late have another reason.

    Returns:
        For each stage the ranks that are longer: all of them if `whole_share` are and none is
        clearly not.
    """
    stages = np.unique(profile.stage)
    if len(stages) == 1:
        return ()
    rows_of = [np.flatnonzero(profile.stage == stage) for stage in stages]
    level = np.array([lower_medians(profile.total_ns[rows]) for rows in rows_of])
    others = np.array(
        [lower_medians(np.delete(level, index, axis=0)) for index in range(len(level))]
    )
    excess = level / others - 1.0
    excess[[len(rows) == 1 for rows in rows_of[:-1]] + [False]] = np.nan
    least = min(THRESHOLDS.min_lasting_steps, excess.shape[1])
    phases = find_phases(excess, has_few_peers=True, min_steps=least)
    measured = (
        _measure_stage(profile, rows_of[phase.row], phase, others[phase.row]) for phase in phases
    )
    return tuple(slow for slow in measured if slow is not None)


def _measure_stage(
    profile: ComputeProfile, rows: NDArray[np.int64], phase: Phase, others_ns: NDArray[np.float64]
) -> SlowRanks | None:
    """Return the slow ranks of a stage; None if its excess is within the noise of its ranks."""
    total_ns = profile.total_ns[rows, phase.inside]
    ratio = row_medians(total_ns / others_ns[phase.inside]) - 1.0
    noise = robust_deviation(total_ns / row_medians(total_ns)[:, None])
    required = required_deviations(profile.total_ns[rows].size) * noise / np.sqrt(phase.num_steps)
    threshold = max(phase.threshold, required)
    if phase.excess_ratio < threshold:
        return None
    is_longer = ratio > threshold / 2
    # Noise may hide a rank's share of the work, but more work spares no rank of a stage.
    spares_one = bool((ratio + required < phase.excess_ratio / 2).any())
    is_whole = is_longer.mean() >= THRESHOLDS.whole_share and not spares_one
    return SlowRanks(
        rows=rows if is_whole else rows[is_longer],
        phase=replace(phase, threshold=threshold, deviation=noise),
        profile=profile,
        expected_ns=others_ns,
        against="for the other stages",
    )
