"""The causes, in the order in which they are searched for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import (
    checkpoint,
    clock_throttle,
    common_pause,
    crash,
    data_stall,
    evaluation,
    gc_pause,
    hang,
    host_stall,
    launch_skew,
    layout,
    misconfiguration,
    near_oom,
    network_degradation,
    recompile,
    sequence_imbalance,
    slow_compute,
    slow_link,
    stage_imbalance,
)

if TYPE_CHECKING:
    from ..report.report import Finding
    from .detector import Cause, CauseModule, Detector, RecordDetector

FROM_RECORDS: tuple[RecordDetector, ...] = (
    hang,
    crash,
    near_oom,
    misconfiguration,
    layout,
)
"""Detectors that need no replay. Those of causes that ended the job come first."""

FROM_REPLAY: tuple[Detector, ...] = (
    checkpoint,
    evaluation,
    common_pause,
    recompile,
    # A pause that ranks take in turn is neither a stall, nor input, nor skew.
    gc_pause,
    # A host that launches late explains gaps before its input and its collectives.
    host_stall,
    data_stall,
    launch_skew,
    # This detector also finds `clock_throttle` and `stage_imbalance`: samples, or the rest of the
    # stage, separate them.
    slow_compute,
    # More tokens explain a stage that is long only inside its experts.
    sequence_imbalance,
    # A slow device sends as slowly as it computes. This detector also finds `slow_link`.
    network_degradation,
)
"""Detectors that search the replayed steps. What one finds explains part of what later ones see,
as the comments say."""

_MODULES: tuple[CauseModule, ...] = (
    *FROM_RECORDS,
    *FROM_REPLAY,
    clock_throttle,
    stage_imbalance,
    slow_link,
)

CAUSES = {module.CAUSE.name: module.CAUSE for module in _MODULES}


def shown_as(finding: Finding) -> Cause | None:
    """Return the cause whose proof shows a finding: its own, or that of unequal evaluations."""
    is_unequal = finding.evidence.startswith(evaluation.UNEQUAL)
    return evaluation.SHOWS_UNEQUAL if is_unequal else CAUSES.get(finding.cause)
