"""What the demo plants, and whether a diagnosis found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.causes.order import CAUSES
from rankscope.trainer.config import ModelConfig, TrainerConfig, default_pace_ms
from rankscope.trainer.errors import FaultSpecError
from rankscope.trainer.faults.spec import ENDINGS, OF_ALL_RANKS, Fault, FaultCause, parse_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.tracer.topology import Layout

DEFAULT_RANK = 5
DEFAULT_FACTOR = 1.8
HEALTHY = "healthy"
QUIET = frozenset({HEALTHY, *(cause.name for cause in CAUSES.values() if not cause.is_alarm)})
"""Causes of findings that are no alarm."""

OTHER_NAMES = {FaultCause.CLOCK_THROTTLE: FaultCause.SLOW_COMPUTE}
"""What a planted cause is called where nothing samples the devices' clocks."""

ANY_OF_ITS_RANKS = frozenset({*OF_ALL_RANKS, FaultCause.LAUNCH_SKEW})
"""Causes that strike their ranks in turn: which of them is told does not matter."""

MIN_LAYERS = 2
"""Few layers make few and long segments: in lock-step, all ranks of a core compute one after the
other, and together they must stay within one segment's pace."""

PACE_FACTOR = 1.3
"""How much slower than the trainer's own choice: the collector and the ranks share the cores here,
and a rank that gets its core late by a tenth of its target has overrun it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """A demo's training, checked before anything starts."""

    layout: Layout
    num_steps: int
    num_layers: int
    """A multiple of the stages, so that no stage is slow by nature."""

    pace_ms: float
    """Paced forward time of one local segment."""

    fault: Fault | None

    @property
    def spec(self) -> str:
        """The planted fault as the trainer reads it."""
        return "none" if self.fault is None else str(self.fault)


def plan_demo(*, layout: Layout, num_steps: int, fault: str | None) -> DemoPlan:
    """Return the plan of a demo.

    Args:
        layout: Sizes of the parallel axes.
        num_steps: Optimizer steps.
        fault: What to plant; None: rank 5 (or the last one) 1.8 times as slow, from a third of
            the steps on.

    Raises:
        ConfigError: The fault's text is wrong or names a rank that does not exist, or the
            trainer cannot train this layout.
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
    if plan.fault is not None and plan.fault.cause in ENDINGS:
        raise FaultSpecError(
            spec, "ends the training: plant it in a training of your own, under rankscope serve"
        )
    # The trainer's own check, made here so that it fails before processes start.
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
    """Return the spec of the fault that is planted where none was asked for."""
    rank = min(DEFAULT_RANK, layout.world_size - 1)
    steps = f"{num_steps // 3}-{num_steps - 1}"
    return f"slow-compute:rank={rank},factor={DEFAULT_FACTOR},steps={steps}"


def is_found(report: RunReport, plan: DemoPlan) -> bool:
    """Tell whether the diagnosis puts the planted fault first; see `names_fault`."""
    return names_fault(report.findings, plan.fault, plan.layout)


def names_fault(findings: Iterable[Finding], fault: Fault | None, layout: Layout) -> bool:
    """Tell whether findings put a planted fault first.

    One finding may name all planted ranks, or the first few of the same cause
    together; no other rank may come before they are all named. What else was
    slow on a busy machine may follow. Of a cause that strikes ranks in turn any of
    them will do; a checkpoint is told beside healthy. With nothing planted, only
    ``healthy`` is right.
    """
    told = list(findings)
    alarms = [finding for finding in told if finding.cause not in QUIET]
    if fault is None:
        return told[0].cause == HEALTHY
    if fault.cause is FaultCause.CHECKPOINT:
        return not alarms and any(finding.cause == fault.cause for finding in told)
    causes = {str(fault.cause), str(OTHER_NAMES.get(fault.cause, fault.cause))}
    culprits = set(fault.culprits(layout))
    named: set[int] = set()
    for finding in alarms:
        if finding.cause not in causes or not set(finding.ranks) <= culprits:
            return False
        named.update(finding.ranks)
        if named == culprits or (fault.cause in ANY_OF_ITS_RANKS):
            return True
    return False


def outcome_line(report: RunReport, plan: DemoPlan) -> str:
    """Return what was planted and whether it was found, on one line."""
    found = "yes" if is_found(report, plan) else "no"
    return f"planted: {plan.spec}   found: {found}"
