"""Stages of which half the ranks, or more, became slow together: nobody left there to compare with.

Where half of a stage is slow, the median of its ranks is slow as well, and the healthy ones seem
fast. Two things still tell: each rank's own other steps, and that the other stages did not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import row_medians
from ..report.text import format_duration, format_percent
from ..statistics.baseline import faster_steps_baseline
from ..statistics.noise import required_deviations, robust_deviation, step_deviation
from ..statistics.peers import MIN_PEERS, Basis
from ..statistics.phases import MIN_LASTING_STEPS, Phase, find_phases
from ..statistics.significance import is_significant
from .candidate import Candidate
from .detector import Cause, Subject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..statistics.peers import ComputeProfile
    from ..trace.tables import RankInfo

MIN_SLOW_SHARE = 0.5
"""Share of a stage's ranks from which their median is as slow as they are."""

MIN_SLOW_RANKS = 2

WHOLE_STAGE_SHARE = 0.8
"""Share of a stage's ranks that must be longer than the other stages for a stage imbalance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRanks:
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


CAUSE = Cause(name="stage-imbalance", subject=Subject.STAGE)


def find_stages_turned_slow(profile: ComputeProfile) -> tuple[SlowRanks, ...]:
    """Find stages half of whose ranks, or more, compute longer in some steps than in their others.

    What the other stages' ranks take in a step, over what each of them usually takes, is the job's
    own change (a first step that warms up) and taken out.

    Args:
        profile: Compute of each rank; what it is compared with plays no part.

    Returns:
        One suspect a stage, with the ranks that became slow together: all of them where
        `WHOLE_STAGE_SHARE` did.
    """
    found = (_stage_turned_slow(profile, int(stage)) for stage in np.unique(profile.stage))
    return tuple(suspect for suspect in found if suspect is not None)


def _stage_turned_slow(profile: ComputeProfile, stage: int) -> SlowRanks | None:
    rows = np.flatnonzero(profile.stage == stage)
    others = np.flatnonzero(profile.stage != stage)
    if len(rows) < MIN_SLOW_RANKS or len(others) < MIN_PEERS:
        return None
    relative = profile.total_ns[others] / row_medians(profile.total_ns[others])[:, None]
    common = row_medians(relative.T)
    even = profile.total_ns[rows] / common
    usual = faster_steps_baseline(even)
    # Where the other stages fell, or all rose, the stage itself did nothing.
    own = profile.total_ns[rows] / faster_steps_baseline(profile.total_ns[rows])
    excess = np.minimum(even / usual, own) - 1.0
    phases = find_phases(
        excess,
        has_few_peers=np.ones(len(rows), dtype=np.bool_),
        min_steps=MIN_LASTING_STEPS,
        deviation=step_deviation(relative / common - 1.0),
    )
    together = _together(phases)
    if len(together) < max(MIN_SLOW_RANKS, MIN_SLOW_SHARE * len(rows)):
        return None
    slow = np.array([phase.row for phase in together])
    phase = _middle_phase(together)
    level = row_medians((excess[slow]).T)
    num_stages = len(np.unique(profile.stage))
    if not is_significant(level, phase, num_series=num_stages):
        return None
    mine = rows if len(slow) >= WHOLE_STAGE_SHARE * len(rows) else rows[slow]
    columns = slice(phase.first, phase.last + 1)
    return SlowRanks(
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


def find_slow_stages(profile: ComputeProfile) -> tuple[SlowRanks, ...]:
    """Find stages most of whose ranks compute longer than the other stages, for a while or always.

    A rank alone in its stage counts in the last stage only.

    Returns:
        One suspect a stage, with the ranks that are longer: all of them if `WHOLE_STAGE_SHARE`
        are and none is clearly not.
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
    phases = find_phases(excess, has_few_peers=np.ones(len(excess), dtype=np.bool_), min_steps=1)
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
    profile: ComputeProfile, rows: NDArray[np.int64], phase: Phase, typical: NDArray[np.float64]
) -> SlowRanks | None:
    columns = slice(phase.first, phase.last + 1)
    ratio = row_medians(profile.total_ns[rows, columns] / typical[columns]) - 1.0
    noise = robust_deviation(
        profile.total_ns[rows, columns] / row_medians(profile.total_ns[rows, columns])[:, None]
    )
    clear = required_deviations(profile.total_ns[rows].size) * noise / np.sqrt(phase.num_steps)
    threshold = max(phase.threshold, clear)
    if phase.excess_ratio < threshold:
        return None
    longer = ratio > threshold / 2
    # Noise may hide a rank's share of the work, but no stage spares one of its ranks.
    spared = bool((ratio + clear < phase.excess_ratio / 2).any())
    slow = rows if longer.mean() >= WHOLE_STAGE_SHARE and not spared else rows[longer]
    return SlowRanks(
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


def stage_candidate(
    suspect: SlowRanks,
    profile: ComputeProfile,
    model: ReplayModel,
    ranks: Mapping[int, RankInfo],
    *,
    if_slow: Cause,
) -> Candidate:
    """Tell a stage with more work from one whose ranks have all become slow.

    Work does not change hands in mid-run: a stage on one host of several that
    is slow for a while, or of which some ranks are not, has slow ranks.
    """
    stage = int(profile.stage[np.flatnonzero(profile.ranks == suspect.ranks[0])[0]])
    whole = (int(profile.steps[0]), int(profile.steps[-1]))
    mine = {ranks[rank].host for rank in suspect.ranks}
    one_host = len(mine) == 1 and len({info.host for info in ranks.values()}) > 1
    partial = len(suspect.ranks) < int((profile.stage == stage).sum())
    passing = (suspect.first_step, suspect.last_step) != whole
    is_slow = partial or (one_host and passing)
    subject = f"{'' if partial else 'all '}{len(suspect.ranks):,} traced ranks of stage {stage}"
    against = "the other stages"
    if suspect.basis is Basis.EARLIER:
        against = "in their own other steps, as no other stage does"
    where = f" on host {min(mine)}" if is_slow and one_host else ""
    return Candidate(
        cause=if_slow if is_slow else CAUSE,
        ranks=suspect.ranks,
        steps=(suspect.first_step, suspect.last_step),
        part=np.isin(model.rank, suspect.ranks),
        excess_ratio=suspect.excess_ratio,
        threshold=suspect.threshold,
        evidence=(
            f"{subject}{where} compute longer than {against}: {format_compute(suspect)}"
            f" ({format_excess(suspect)}), in steps {suspect.first_step} to {suspect.last_step}"
        ),
    )


def format_compute(suspect: SlowRanks) -> str:
    """Return a suspect's compute and what is usual."""
    return (
        f"{format_duration(suspect.compute_ns)} of its own compute a step"
        f" against {format_duration(suspect.typical_ns)}"
    )


def format_excess(suspect: SlowRanks) -> str:
    """Return a suspect's excess in percent and in deviations."""
    above = f"+{format_percent(suspect.excess_ratio)}"
    if suspect.deviation > 0:
        above += f", {suspect.excess_ratio / suspect.deviation:.0f} robust deviations"
    return above
