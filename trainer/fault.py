"""Planted faults: what is slow, where, by how much and when. Standard library only.

The spelling is ``cause:key=value,...`` and is the same in the trainer, the demo
and the simulator; ``none`` plants nothing::

    slow-compute:rank=5,factor=1.8,steps=10-29
    slow-compute:rank=5+6,factor=1.5
    stage-imbalance:stage=1,factor=1.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainer.errors import FaultSpecError
from trainer.fault_text import read_factor, read_number, read_pairs, read_ranks, read_steps
from trainer.ranks import coords_of, ranks_of_stage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracer.topology import Layout

NO_FAULT = "none"
"""The spelling of "plant nothing"."""


class FaultCause(StrEnum):
    """What can be planted, in the words of the findings."""

    SLOW_COMPUTE = "slow-compute"
    STAGE_IMBALANCE = "stage-imbalance"


KEYS: dict[FaultCause, tuple[str, ...]] = {
    FaultCause.SLOW_COMPUTE: ("rank", "factor", "steps"),
    FaultCause.STAGE_IMBALANCE: ("stage", "factor", "steps"),
}
"""The keys that each cause takes; all but ``steps`` are required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault: local compute that takes ``factor`` times as long."""

    cause: FaultCause

    factor: float
    """How many times as long, more than 1."""

    ranks: tuple[int, ...] = ()
    """Global ranks, ascending; empty where ``stage`` says it."""

    stage: int | None = None
    """Pipeline stage, all of whose ranks are slow."""

    steps: tuple[int, int] | None = None
    """First and last step, inclusive, 0-based as printed; None: every step."""

    def __str__(self) -> str:
        place = (
            f"rank={'+'.join(map(str, self.ranks))}"
            if self.stage is None
            else f"stage={self.stage}"
        )
        steps = "" if self.steps is None else f",steps={self.steps[0]}-{self.steps[1]}"
        return f"{self.cause}:{place},factor={self.factor:g}{steps}"

    def culprits(self, layout: Layout) -> tuple[int, ...]:
        """Return the global ranks that this fault makes slow, ascending.

        Raises:
            FaultSpecError: A rank or the stage is not in the layout.
        """
        if self.stage is not None:
            if self.stage >= layout.pp:
                raise FaultSpecError(
                    str(self),
                    f"stage {self.stage} does not exist: --pp {layout.pp} has stages"
                    f" 0 to {layout.pp - 1}",
                )
            return ranks_of_stage(self.stage, layout)
        for rank in self.ranks:
            if rank >= layout.world_size:
                raise FaultSpecError(
                    str(self),
                    f"rank {rank} does not exist: the layout has ranks"
                    f" 0 to {layout.world_size - 1}",
                )
        return self.ranks

    def is_active(self, step: int) -> bool:
        """Return whether the fault holds in ``step``."""
        return self.steps is None or self.steps[0] <= step <= self.steps[1]


def parse_fault(spec: str) -> Fault | None:
    """Return the fault that ``spec`` spells; None for ``none``.

    Raises:
        FaultSpecError: Unknown cause, unknown, missing or repeated key, or a bad value.
    """
    if spec.strip() == NO_FAULT:
        return None
    name, colon, rest = spec.strip().partition(":")
    if name not in tuple(FaultCause):
        raise FaultSpecError(
            spec, f"unknown cause {name!r}: use one of {', '.join(FaultCause)}, or {NO_FAULT}"
        )
    cause = FaultCause(name)
    if not colon:
        raise FaultSpecError(spec, f"expected {name}:key=value,... with {', '.join(KEYS[cause])}")
    values = read_pairs(spec, rest, cause=cause, keys=KEYS[cause], optional=("steps",))
    return Fault(
        cause=cause,
        factor=read_factor(spec, values["factor"]),
        ranks=read_ranks(spec, values["rank"]) if "rank" in values else (),
        stage=read_number(spec, "stage", values["stage"]) if "stage" in values else None,
        steps=read_steps(spec, values["steps"]) if "steps" in values else None,
    )


def parse_faults(specs: Iterable[str]) -> tuple[Fault, ...]:
    """Return the faults of several specs in their order; ``none`` adds nothing.

    Raises:
        FaultSpecError: As `parse_fault`.
    """
    parsed = (parse_fault(spec) for spec in specs)
    return tuple(fault for fault in parsed if fault is not None)


def slowdown_of(faults: Iterable[Fault], layout: Layout, *, rank: int, step: int) -> float:
    """Return how many times as long the compute of ``rank`` takes in ``step``.

    Faults that meet on one rank multiply; 1.0 where none holds.
    """
    stage = coords_of(rank, layout).pp
    return math.prod(
        fault.factor
        for fault in faults
        if fault.is_active(step) and (rank in fault.ranks or stage == fault.stage)
    )
