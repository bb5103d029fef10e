"""Stages with more work than the others, and stages whose ranks became slow together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..report.text import format_duration, format_percent, format_steps
from ..statistics.baseline import faster_steps_baseline
from ..statistics.noise import required_deviations, robust_deviation, step_deviation
from ..statistics.peers import Basis
from ..statistics.phases import Phase, find_phases
from ..statistics.significance import is_significant
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate
from .detector import Cause, Subject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..statistics.peers import ComputeProfile
    from ..trace.tables import RankInfo


CAUSE = Cause(name="stage-imbalance", subject=Subject.STAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRanks:
    """A rank, or ranks of one stage, with the steps in which they compute slowly."""

    ranks: tuple[int, ...]
    steps: tuple[int, int]
    """First and last."""

    num_steps: int
    """Traced steps between these, both included."""

    excess_ratio: float
    """Median over the steps."""

    deviation: float
    """Standard deviation of the excess in healthy steps."""

    threshold: float
    """Least excess that would have been reported."""

    baseline_ns: float
    """Expected compute in one of the steps, median."""

    compute_ns: float
    """Own compute in one of the steps, median."""

    num_peers: int
    basis: Basis
    """The peers or steps that give the baseline."""

    shown_steps: tuple[int, ...] | None = None
    """Steps that show it, if not all between the first and the last do; None: all."""

    @property
    def compute_text(self) -> str:
        """Return own compute and its baseline: "345 ms of own compute per step, 140 ms"."""
        own, usual = format_duration(self.compute_ns), format_duration(self.baseline_ns)
        return f"{own} of own compute per step, {usual}"

    @property
    def excess_text(self) -> str:
        """Return the excess and how far it is outside the noise: "+135 %, far outside noise"."""
        text = f"+{format_percent(self.excess_ratio)}"
        if self.deviation <= 0:
            return text
        is_far = self.excess_ratio >= THRESHOLDS.far_deviations * self.deviation
        return f"{text}, {'far ' if is_far else ''}outside noise"


def find_slow_stages(profile: ComputeProfile) -> tuple[SlowRanks, ...]:
    """Find stages most of whose ranks compute longer than the other stages, always or for a while.

    A stage of one rank counts only if it is the last stage.

    Returns:
        For each stage the ranks that are longer: all of them if `whole_stage_share` are and none is
        clearly not.
    """
    stages = np.unique(profile.stage)
    if len(stages) == 1:
        return ()
    rows_of = [np.flatnonzero(profile.stage == stage) for stage in stages]
    level = np.array([_lower_medians(profile.total_ns[rows]) for rows in rows_of])
    others = np.array(
        [_lower_medians(np.delete(level, place, axis=0)) for place in range(len(level))]
    )
    excess = level / others - 1.0
    is_single = [len(rows) == 1 for rows in rows_of[:-1]]
    excess[np.flatnonzero(is_single)] = np.nan
    phases = find_phases(excess, has_few_peers=np.ones(len(excess), dtype=np.bool_), min_steps=1)
    found = (
        _measure_stage(profile, rows_of[phase.row], phase, others[phase.row]) for phase in phases
    )
    return tuple(each for each in found if each is not None)


def _lower_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lower median of each column's known values."""
    ordered = np.sort(values, axis=0)
    known = np.maximum((~np.isnan(values)).sum(axis=0) - 1, 0)
    medians: NDArray[np.float64] = np.take_along_axis(ordered, known[None] // 2, axis=0)[0]
    return medians


def _measure_stage(
    profile: ComputeProfile, rows: NDArray[np.int64], phase: Phase, others_ns: NDArray[np.float64]
) -> SlowRanks | None:
    """Return the slow ranks of a stage; None if its excess is within the noise of its ranks.

    Args:
        profile: Compute by rank and step.
        rows: The stage's ranks.
        phase: The steps in which the stage is longer.
        others_ns: Shape (steps,): compute of the other stages.
    """
    columns = slice(phase.first, phase.last + 1)
    total_ns = profile.total_ns[rows, columns]
    ratio = row_medians(total_ns / others_ns[columns]) - 1.0
    noise = robust_deviation(total_ns / row_medians(total_ns)[:, None])
    required = required_deviations(profile.total_ns[rows].size) * noise / np.sqrt(phase.num_steps)
    threshold = max(phase.threshold, required)
    if phase.excess_ratio < threshold:
        return None
    is_longer = ratio > threshold / 2
    # Noise may hide a rank's share of the work, but more work spares no rank of a stage.
    spares_one = bool((ratio + required < phase.excess_ratio / 2).any())
    slow = (
        rows
        if is_longer.mean() >= THRESHOLDS.whole_stage_share and not spares_one
        else rows[is_longer]
    )
    return SlowRanks(
        ranks=tuple(profile.ranks[slow].tolist()),
        steps=(int(profile.steps[phase.first]), int(profile.steps[phase.last])),
        num_steps=phase.num_steps,
        excess_ratio=phase.excess_ratio,
        deviation=noise,
        threshold=threshold,
        baseline_ns=float(np.nanmedian(others_ns[columns])),
        compute_ns=float(np.nanmedian(profile.total_ns[slow, columns])),
        num_peers=int(len(profile.ranks) - len(rows)),
        basis=Basis.STAGES,
    )


def find_stages_turned_slow(profile: ComputeProfile) -> tuple[SlowRanks, ...]:
    """Find stages half of whose ranks, or more, compute longer in some steps than in the others.

    If half of a stage is slow, its median is slow as well and its healthy ranks look fast. So each
    rank is compared with its own other steps. What the other stages changed by in a step (a first
    step that warms up) is the job's change and taken out.

    Args:
        profile: Compute by rank and step. Its baselines are not used.

    Returns:
        For each stage the ranks that became slow together: all of them if `whole_stage_share` did.
    """
    found = (_measure_stage_turned_slow(profile, int(stage)) for stage in np.unique(profile.stage))
    return tuple(each for each in found if each is not None)


def _measure_stage_turned_slow(profile: ComputeProfile, stage: int) -> SlowRanks | None:
    rows = np.flatnonzero(profile.stage == stage)
    others = np.flatnonzero(profile.stage != stage)
    if len(rows) < THRESHOLDS.min_slow_stage_ranks or len(others) < THRESHOLDS.min_peers:
        return None
    relative = profile.total_ns[others] / row_medians(profile.total_ns[others])[:, None]
    common = row_medians(relative.T)
    own = profile.total_ns[rows] / common
    baseline = faster_steps_baseline(own)
    # If the other stages became faster, or all became slower, the stage itself did not change.
    unscaled = profile.total_ns[rows] / faster_steps_baseline(profile.total_ns[rows])
    excess = np.minimum(own / baseline, unscaled) - 1.0
    phases = find_phases(
        excess,
        has_few_peers=np.ones(len(rows), dtype=np.bool_),
        min_steps=THRESHOLDS.min_lasting_steps,
        deviation=step_deviation(relative / common - 1.0),
    )
    together = _phases_in_common(phases)
    if len(together) < max(
        THRESHOLDS.min_slow_stage_ranks, THRESHOLDS.min_slow_stage_share * len(rows)
    ):
        return None
    slow = np.array([phase.row for phase in together])
    phase = _median_phase(together)
    level = row_medians((excess[slow]).T)
    num_stages = len(np.unique(profile.stage))
    if not is_significant(level, phase, num_series=num_stages):
        return None
    named = rows if len(slow) >= THRESHOLDS.whole_stage_share * len(rows) else rows[slow]
    columns = slice(phase.first, phase.last + 1)
    return SlowRanks(
        ranks=tuple(profile.ranks[named].tolist()),
        steps=(int(profile.steps[phase.first]), int(profile.steps[phase.last])),
        num_steps=phase.num_steps,
        excess_ratio=phase.excess_ratio,
        deviation=phase.deviation,
        threshold=phase.threshold,
        baseline_ns=float(np.nanmedian((baseline * common)[slow, columns])),
        compute_ns=float(np.nanmedian(profile.total_ns[rows[slow], columns])),
        num_peers=len(others),
        basis=Basis.EARLIER,
    )


def _phases_in_common(phases: Sequence[Phase]) -> list[Phase]:
    """Return the phases that share most of their steps with the median phase."""
    if not phases:
        return []
    median = _median_phase(phases)
    return [
        phase
        for phase in phases
        if 2 * _num_shared_steps(phase, median) > max(phase.num_steps, median.num_steps)
    ]


def _median_phase(phases: Sequence[Phase]) -> Phase:
    """Return a phase with the upper median of each quantity."""

    def median(values: list[float]) -> float:
        return float(np.sort(values)[len(values) // 2])

    return Phase(
        row=phases[0].row,
        first=int(median([phase.first for phase in phases])),
        last=int(median([phase.last for phase in phases])),
        excess_ratio=median([phase.excess_ratio for phase in phases]),
        deviation=phases[0].deviation,
        threshold=median([phase.threshold for phase in phases]),
    )


def _num_shared_steps(one: Phase, other: Phase) -> int:
    return min(one.last, other.last) - max(one.first, other.first) + 1


def stage_candidate(
    slow: SlowRanks,
    profile: ComputeProfile,
    model: ReplayModel,
    ranks: Mapping[int, RankInfo],
    *,
    if_slow: Cause,
) -> Candidate:
    """Return the slow ranks of a stage as a candidate.

    A stage with more work has it on all ranks and in all steps. So a stage has slow ranks instead
    if some of its ranks are not longer, or if it is on one host of several and slow for a while.

    Args:
        slow: The ranks.
        profile: Compute by rank and step.
        model: The operations.
        ranks: Host of each rank.
        if_slow: Cause of slow ranks.
    """
    stage = int(profile.stage[np.flatnonzero(profile.ranks == slow.ranks[0])[0]])
    all_steps = (int(profile.steps[0]), int(profile.steps[-1]))
    hosts = {ranks[rank].host for rank in slow.ranks}
    is_one_host = len(hosts) == 1 and len({info.host for info in ranks.values()}) > 1
    is_partial = len(slow.ranks) < int((profile.stage == stage).sum())
    is_slow = is_partial or (is_one_host and slow.steps != all_steps)
    subject = f"{'' if is_partial else 'all '}{len(slow.ranks):,} traced ranks of stage {stage}"
    if is_slow and is_one_host:
        subject += f" on host {min(hosts)}"
    against = "for the other stages"
    if slow.basis is Basis.EARLIER:
        against = "in their own other steps, while no other stage changed"
    return Candidate(
        cause=if_slow if is_slow else CAUSE,
        ranks=slow.ranks,
        steps=slow.steps,
        part=np.flatnonzero(np.isin(model.rank, slow.ranks)),
        excess_ratio=slow.excess_ratio,
        threshold=slow.threshold,
        evidence=(
            f"{subject}: {slow.compute_text} {against} ({slow.excess_text}; waiting not counted),"
            f" in {format_steps(slow.steps)}"
        ),
    )
