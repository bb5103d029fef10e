"""What the demo plants, and whether a diagnosis found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config import ModelConfig, TrainerConfig, default_pace_ms
from trainer.fault import Fault, parse_fault

if TYPE_CHECKING:
    from analysis.report import RunReport
    from tracer.topology import Layout

DEFAULT_RANK = 5
DEFAULT_FACTOR = 1.8
HEALTHY = "healthy"
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
    """Tell whether the diagnosis puts the planted fault first.

    One finding may name all planted ranks, or the first few of the same cause
    together; no other rank may come before they are all named. What else was
    slow on a busy machine may follow. With nothing planted, only ``healthy``
    is right.
    """
    if plan.fault is None:
        return report.top_finding.cause == HEALTHY
    culprits = set(plan.fault.culprits(plan.layout))
    named: set[int] = set()
    for finding in report.findings:
        if finding.cause != plan.fault.cause or not set(finding.ranks) <= culprits:
            return False
        named.update(finding.ranks)
        if named == culprits:
            return True
    return False


def outcome_line(report: RunReport, plan: DemoPlan) -> str:
    """Return what was planted and whether it was found, on one line."""
    found = "yes" if is_found(report, plan) else "no"
    return f"planted: {plan.spec}   found: {found}"
