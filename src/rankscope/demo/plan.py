"""Plan of a demo: its training and fault, and the check that a diagnosis finds the fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.causes.order import CAUSES
from rankscope.trainer.config import ModelConfig, TrainerConfig, default_pace_ms
from rankscope.trainer.errors import FaultSpecError
from rankscope.trainer.faults.spec import (
    ALL_RANK_CAUSES,
    ENDING_CAUSES,
    Fault,
    FaultCause,
    parse_fault,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.tracer.topology import Layout

DEFAULT_RANK = 5
DEFAULT_FACTOR = 1.8
HEALTHY = "healthy"
QUIET = frozenset({HEALTHY, *(cause.name for cause in CAUSES.values() if not cause.is_alarm)})
"""Causes of findings that raise no alarm."""

OTHER_NAMES = {
    FaultCause.CLOCK_THROTTLE: FaultCause.SLOW_COMPUTE,
    FaultCause.CPU_HOG: FaultCause.SLOW_COMPUTE,
    FaultCause.MEMORY_HOG: FaultCause.SLOW_COMPUTE,
    FaultCause.MISMATCH: FaultCause.HANG,
}
"""Causes that are found instead: the clocks of the devices are not sampled, and the device is the
processor that the hogs take."""

ANY_OF_ITS_RANKS = frozenset({*ALL_RANK_CAUSES, FaultCause.LAUNCH_SKEW})
"""Causes that affect their ranks in turn: a finding may name any of them."""

MIN_LAYERS = 2
"""A few layers make a few long pieces of compute. The ranks that share a core compute one after the
other, and together they must finish within the set time of one piece."""

PACE_FACTOR = 1.3
"""Factor on the trainer's own set times: the collector shares the cores with the ranks, and a rank
that gets its core late by a tenth of the set time overruns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The training of a demo, checked before any process starts."""

    layout: Layout
    num_steps: int
    num_layers: int
    """A multiple of the number of stages, so that all stages are equal."""

    pace_ms: float
    """Set time of the forward of one piece of compute."""

    fault: Fault | None

    @property
    def spec(self) -> str:
        """The fault as the trainer reads it."""
        return "none" if self.fault is None else str(self.fault)


def plan_demo(*, layout: Layout, num_steps: int, fault: str | None) -> DemoPlan:
    """Return the plan of a demo.

    Args:
        layout: Sizes of the parallel axes.
        num_steps: Number of optimizer steps.
        fault: The fault. None: rank 5 (or the last rank) computes 1.8 times as long after a third
            of the steps.

    Raises:
        ConfigError: The fault is invalid or names a rank that does not exist, or the trainer
            cannot train this layout.
    """
    spec = default_fault(layout, num_steps) if fault is None else fault
    model = ModelConfig(num_layers=layout.pp * -(-MIN_LAYERS // layout.pp))
    num_microbatches = 2 * layout.pp
    pace_ms = default_pace_ms(model, layout, num_microbatches=num_microbatches)
    plan = DemoPlan(
        layout=layout,
        num_steps=num_steps,
        num_layers=model.num_layers,
        pace_ms=float(round(PACE_FACTOR * pace_ms)),
        fault=parse_fault(spec),
    )
    if plan.fault is not None and plan.fault.cause in ENDING_CAUSES:
        raise FaultSpecError(
            spec, "ends the training: use it in a training of your own, beside rankscope serve"
        )
    # The check of the trainer, made here so that it fails before processes start.
    TrainerConfig(
        layout=layout,
        world_size=layout.world_size,
        model=model,
        num_steps=num_steps,
        num_microbatches=num_microbatches,
        pace_ms=plan.pace_ms,
        faults=() if plan.fault is None else (plan.fault,),
    )
    return plan


def default_fault(layout: Layout, num_steps: int) -> str:
    """Return the fault of a demo without ``--fault``."""
    rank = min(DEFAULT_RANK, layout.world_size - 1)
    steps = f"{num_steps // 3}-{num_steps - 1}"
    return f"slow-compute:rank={rank},factor={DEFAULT_FACTOR},steps={steps}"


def is_found(report: RunReport, plan: DemoPlan) -> bool:
    """Return whether the diagnosis puts the fault first; see `names_fault`."""
    return names_fault(report.findings, plan.fault, plan.layout)


def names_fault(findings: Iterable[Finding], fault: Fault | None, layout: Layout) -> bool:
    """Return whether findings put a fault first.

    One finding names all ranks of the fault, or the first few findings of the cause do so
    together. No other rank may come before them; others may follow, because a busy machine has
    slow ranks of its own. If a cause affects its ranks in turn, any of them is right. A checkpoint
    or an evaluation is found beside ``healthy``. Without a fault, only ``healthy`` is right.
    """
    known = list(findings)
    alarms = [finding for finding in known if finding.cause not in QUIET]
    if fault is None:
        return known[0].cause == HEALTHY
    if fault.cause in (FaultCause.CHECKPOINT, FaultCause.EVALUATION):
        return not alarms and any(finding.cause == fault.cause for finding in known)
    causes = {str(fault.cause), str(OTHER_NAMES.get(fault.cause, fault.cause))}
    culprits = set(fault.culprits(layout))
    named: set[int] = set()
    for finding in alarms:
        if finding.cause not in causes or not set(finding.ranks) <= culprits:
            return False
        named.update(finding.ranks)
        if named == culprits or fault.cause in ANY_OF_ITS_RANKS:
            return True
    return False


def outcome_line(report: RunReport, plan: DemoPlan) -> str:
    """Return the fault and whether it was found, on one line."""
    found = "yes" if is_found(report, plan) else "no"
    return f"fault: {plan.spec}   found: {found}"
