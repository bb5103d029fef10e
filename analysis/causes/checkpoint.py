"""Checkpoints: planned steps in which all ranks pause while the job saves, or one saves for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..breakdown.waterfall import Part
from ..replay.model import Place
from ..report.text import format_count, format_duration, format_steps
from ..statistics.thresholds import THRESHOLDS
from .candidate import Candidate
from .common_pause import format_period, name_ranks, pause_candidates
from .detector import Cause, HostTime, ProofForm, Subject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .detector import Case
    from .host_gaps import HostGaps

CAUSE = Cause(
    name="checkpoint",
    subject=Subject.JOB,
    sentence="Checkpoints take time",
    shown_in=HostTime(
        "saving and gaps of the host", (Part.CHECKPOINT, Part.HOST_GAP), is_of_all=True
    ),
    is_alarm=False,
    proof_form=ProofForm.HOST,
)


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add the common pauses in which a save was recorded, and the saves of some ranks for all."""
    pauses = case.common_pauses
    is_save = pauses.is_planned & pauses.is_saved
    common = pause_candidates(CAUSE, case.gaps, pauses, is_save, where="while the job saves")
    single = find_single_saves(case.gaps, pauses.columns[is_save])
    return (*candidates, *common, *single)


def find_single_saves(gaps: HostGaps, columns: NDArray[np.int64]) -> tuple[Candidate, ...]:
    """Return the saves in steps in which not all ranks pause: the others wait for those that save.

    Args:
        columns: Shape (pauses,): columns of the steps in which all ranks pause.
    """
    is_common = np.isin(gaps.column, columns)
    lost_ns = gaps.total_ns(Place.CHECKPOINT, excluding=is_common)
    excess = lost_ns / gaps.compute_ns[:, None]
    is_save = excess >= THRESHOLDS.min_excess_ratio
    if not is_save.any():
        return ()
    mine = gaps.is_at(Place.CHECKPOINT) & ~is_common & is_save[gaps.row, gaps.column]
    ranks = gaps.profile.ranks[is_save.any(axis=1)]
    steps = gaps.profile.steps[is_save.any(axis=0)]
    who = name_ranks(ranks, len(lost_ns), ("saves", "save"))
    how_often = format_period(steps) or f"in {format_count(len(steps), 'step')}"
    shown = int(steps[0]), int(steps[-1])
    save = Candidate(
        cause=CAUSE,
        ranks=tuple(ranks.tolist()),
        steps=shown,
        part=gaps.part(mine),
        fixed_ns=gaps.fixed_ns(mine),
        excess_ratio=float(np.median(excess[is_save])),
        threshold=THRESHOLDS.min_excess_ratio,
        evidence=(
            f"{who} for {format_duration(float(np.median(lost_ns[is_save])))} {how_often},"
            f" in {format_steps(shown)}"
        ),
        on_host=True,
        shown_steps=tuple(steps.tolist()),
    )
    return (save,)
