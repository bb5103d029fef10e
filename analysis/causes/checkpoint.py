"""Checkpoints: planned steps in which all ranks pause at once while the job saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..breakdown.waterfall import Part
from .common_pause import pause_candidates
from .detector import Cause, HostTime, ProofForm, Subject

if TYPE_CHECKING:
    from .candidate import Candidate
    from .detector import Case

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
    """Add the common pauses in which a save was recorded."""
    pauses = case.common_pauses
    is_save = pauses.is_planned & pauses.is_saved
    where = "while the job saves"
    return (*candidates, *pause_candidates(CAUSE, case.gaps, pauses, is_save, where=where))
