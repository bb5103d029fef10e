"""Planted faults: what is wrong, where, by how much and when. Standard library only.

The spelling is ``cause:key=value,...`` and is the same in the trainer, the demo
and the simulator; ``none`` plants nothing::

    slow-compute:rank=5,factor=1.8,steps=10-29
    slow-link:src=4,dst=5,factor=50
    crash:rank=3,step=7,kind=kill
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ..errors import FaultSpecError
from ..ranks import coords_of, ranks_of_stage
from .spec_text import (
    read_amount,
    read_choice,
    read_factor,
    read_number,
    read_pairs,
    read_ranks,
    read_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.tracer.topology import Layout

NO_FAULT = "none"
"""The spelling of "plant nothing"."""


class FaultCause(StrEnum):
    """What can be planted, in the words of the findings."""

    SLOW_COMPUTE = "slow-compute"
    CLOCK_THROTTLE = "clock-throttle"
    SLOW_LINK = "slow-link"
    GC_PAUSE = "gc-pause"
    HOST_STALL = "host-stall"
    DATA_STALL = "data-stall"
    LAUNCH_SKEW = "launch-skew"
    CHECKPOINT = "checkpoint"
    STAGE_IMBALANCE = "stage-imbalance"
    SEQUENCE_IMBALANCE = "sequence-imbalance"
    MISCONFIGURATION = "misconfiguration"
    CRASH = "crash"
    HANG = "hang"


class CrashKind(StrEnum):
    """How a rank's process dies."""

    EXCEPTION = "exception"
    HOST_OOM = "host-oom"
    EXIT = "exit"
    """At once and without a word, by `os._exit`."""

    KILL = "kill"
    """By SIGKILL, as the kernel's out-of-memory killer does it."""


REQUIRED: dict[FaultCause, tuple[str, ...]] = {
    FaultCause.SLOW_COMPUTE: ("rank", "factor"),
    FaultCause.CLOCK_THROTTLE: ("rank", "factor"),
    FaultCause.SLOW_LINK: ("factor",),
    FaultCause.GC_PAUSE: (),
    FaultCause.HOST_STALL: ("rank", "ms"),
    FaultCause.DATA_STALL: ("ms",),
    FaultCause.LAUNCH_SKEW: ("ms",),
    FaultCause.CHECKPOINT: ("every", "ms"),
    FaultCause.STAGE_IMBALANCE: ("stage", "factor"),
    FaultCause.SEQUENCE_IMBALANCE: ("spread",),
    FaultCause.MISCONFIGURATION: ("rank",),
    FaultCause.CRASH: ("rank", "step"),
    FaultCause.HANG: ("rank", "step"),
}
"""Keys that each cause must be given."""

OPTIONAL: dict[FaultCause, tuple[str, ...]] = {
    FaultCause.SLOW_LINK: ("src", "dst", "rank", "steps"),
    FaultCause.GC_PAUSE: ("ms", "probability", "spans", "steps"),
    FaultCause.DATA_STALL: ("rank", "spans", "steps"),
    FaultCause.LAUNCH_SKEW: ("stage", "tp", "steps"),
    FaultCause.CHECKPOINT: ("spans", "steps"),
    FaultCause.MISCONFIGURATION: ("variable", "value"),
    FaultCause.CRASH: ("kind",),
    FaultCause.HANG: (),
}
"""Keys that each cause may be given; ``steps`` alone where a cause is not here."""

OF_COMPUTE = frozenset(
    {FaultCause.SLOW_COMPUTE, FaultCause.CLOCK_THROTTLE, FaultCause.STAGE_IMBALANCE}
)
"""Causes that make local compute take longer."""

OF_ALL_RANKS = frozenset(
    {FaultCause.GC_PAUSE, FaultCause.CHECKPOINT, FaultCause.SEQUENCE_IMBALANCE}
)
"""Causes that belong to no rank."""

ENDINGS = frozenset({FaultCause.CRASH, FaultCause.HANG})
"""Causes after which the job trains no more."""

DEFAULT_PAUSE_MS = 250.0
"""Source: pauses of hundreds of ms, arXiv 2505.05713."""

DEFAULT_PAUSE_PROBABILITY = 0.005
DEFAULT_VARIABLE, DEFAULT_VALUE = "NCCL_IB_DISABLE", "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault; a field that its cause does not take keeps its default."""

    cause: FaultCause

    factor: float = 1.0
    """How many times as long: compute, or the bytes of a transfer."""

    ranks: tuple[int, ...] = ()
    """Global ranks, ascending."""

    stage: int | None = None
    """Pipeline stage, all of whose ranks are meant; of a skew, that of its group."""

    tp: int = 0
    """Position of the data-parallel group whose members are skewed."""

    src: int | None = None
    dst: int | None = None
    """Ends of a link; it is slow both ways."""

    extra_ns: int = 0
    """Time lost at each occurrence."""

    probability: float = 0.0
    """Of a pause before one forward of one rank."""

    spread: float = 0.0
    """Standard deviation of the logarithm of a micro-batch's compute."""

    every: int = 0
    """Steps from one checkpoint to the next."""

    has_spans: bool = True
    """Whether the trace shows the lost time as spans of its kind, or as gaps."""

    variable: str = ""
    value: str = ""
    """Environment variable that differs, and what it says."""

    kind: CrashKind = CrashKind.EXCEPTION

    step: int | None = None
    """In which the rank dies or falls silent."""

    steps: tuple[int, int] | None = None
    """First and last step, inclusive, 0-based as printed; None: every step."""

    def __str__(self) -> str:
        told = ((key, self._text(key)) for key in keys_of(self.cause))
        parts = [f"{key}={text}" for key, text in told if text]
        return f"{self.cause}:{','.join(parts)}"

    @property
    def first_step(self) -> int:
        """The first step that the fault can show in."""
        if self.step is not None:
            return self.step
        return self.steps[0] if self.steps is not None else 0

    def culprits(self, layout: Layout) -> tuple[int, ...]:
        """Return the global ranks at which this fault is planted, ascending.

        Raises:
            FaultSpecError: A rank or the stage is not in the layout, or a link
                or a skewed group is none that this layout has.
        """
        self._check_places(layout)
        if self.ranks:
            return self.ranks
        if self.src is not None and self.dst is not None:
            return tuple(sorted((self.src, self.dst)))
        everywhere = {rank: coords_of(rank, layout) for rank in range(layout.world_size)}
        if self.cause is FaultCause.LAUNCH_SKEW:
            place = (self.stage or 0, self.tp)
            return tuple(rank for rank, at in everywhere.items() if (at.pp, at.tp) == place)
        return tuple(everywhere) if self.stage is None else ranks_of_stage(self.stage, layout)

    def is_active(self, step: int) -> bool:
        """Return whether the fault holds in ``step``."""
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def _check_places(self, layout: Layout) -> None:
        places = [("rank", rank, layout.world_size) for rank in self.ranks]
        places += [
            (name, value, size)
            for name, value, size in (
                ("rank", self.src, layout.world_size),
                ("rank", self.dst, layout.world_size),
                ("stage", self.stage, layout.pp),
                ("tp", self.tp, layout.tp),
            )
            if value is not None
        ]
        for name, value, size in places:
            if value >= size:
                has = (
                    f"--pp {layout.pp} has stages" if name == "stage" else f"the layout has {name}s"
                )
                raise FaultSpecError(
                    str(self), f"{name} {value} does not exist: {has} 0 to {size - 1}"
                )
        if self.cause is FaultCause.LAUNCH_SKEW and layout.dp == 1:
            raise FaultSpecError(str(self), "needs --dp above 1: nobody to be late")
        if self.src is not None and self.dst is not None:
            self._check_link(self.src, self.dst, layout)

    def _check_link(self, src: int, dst: int, layout: Layout) -> None:
        here, there = coords_of(src, layout), coords_of(dst, layout)
        distances = (here.pp - there.pp, here.dp - there.dp, here.tp - there.tp)
        if sum(map(bool, distances)) != 1 or abs(distances[0]) > 1:
            raise FaultSpecError(
                str(self),
                f"ranks {src} and {dst} share no group and are no neighbouring stages: nothing of"
                " size goes between them",
            )

    def _text(self, key: str) -> str:
        """Return the value of ``key`` as `parse_fault` reads it; "" where not given."""
        told = {
            "rank": "+".join(map(str, self.ranks)),
            "ms": f"{self.extra_ns / 1e6:g}",
            "steps": "" if self.steps is None else f"{self.steps[0]}-{self.steps[1]}",
            "spans": "" if self.has_spans else "no",
            "tp": str(self.tp or ""),
        }
        if key in told:
            return told[key]
        value = getattr(self, key)
        return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def keys_of(cause: FaultCause) -> tuple[str, ...]:
    """Return every key that ``cause`` takes, those that it must be given first."""
    return (*REQUIRED[cause], *OPTIONAL.get(cause, ("steps",)))


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
    keys = keys_of(cause)
    if not colon and REQUIRED[cause]:
        raise FaultSpecError(spec, f"expected {name}:key=value,... with {', '.join(keys)}")
    optional = [key for key in keys if key not in REQUIRED[cause]]
    values = read_pairs(spec, rest, cause=cause, keys=keys, optional=optional) if colon else {}
    fault = _read(spec, cause, values)
    _check(spec, fault, values)
    return fault


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
        if fault.cause in OF_COMPUTE
        and fault.is_active(step)
        and (rank in fault.ranks or stage == fault.stage)
    )


def _read(spec: str, cause: FaultCause, values: dict[str, str]) -> Fault:
    def number(key: str) -> int | None:
        return read_number(spec, key, values[key]) if key in values else None

    def amount(key: str, missing: float, *, most: float = math.inf) -> float:
        return read_amount(spec, key, values[key], most=most) if key in values else missing

    pauses = cause is FaultCause.GC_PAUSE
    configured = cause is FaultCause.MISCONFIGURATION
    return Fault(
        cause=cause,
        factor=read_factor(spec, values["factor"]) if "factor" in values else 1.0,
        ranks=read_ranks(spec, values["rank"]) if "rank" in values else (),
        stage=number("stage"),
        tp=number("tp") or 0,
        src=number("src"),
        dst=number("dst"),
        extra_ns=round(amount("ms", DEFAULT_PAUSE_MS if pauses else 0.0) * 1e6),
        probability=amount("probability", DEFAULT_PAUSE_PROBABILITY if pauses else 0.0, most=1.0),
        spread=amount("spread", 0.0, most=1.0),
        every=number("every") or 0,
        has_spans=read_choice(spec, "spans", values.get("spans", "yes"), ("yes", "no")) == "yes",
        variable=values.get("variable", DEFAULT_VARIABLE if configured else ""),
        value=values.get("value", DEFAULT_VALUE if configured else ""),
        kind=CrashKind(read_choice(spec, "kind", values.get("kind", "exception"), CrashKind)),
        step=number("step"),
        steps=read_steps(spec, values["steps"]) if "steps" in values else None,
    )


def _check(spec: str, fault: Fault, values: dict[str, str]) -> None:
    if fault.cause is FaultCause.SLOW_LINK:
        given = [key for key in ("src", "dst", "rank") if key in values]
        if given not in (["src", "dst"], ["rank"]):
            raise FaultSpecError(spec, "give src=RANK,dst=RANK or rank=RANK")
        if fault.src is not None and fault.src == fault.dst:
            raise FaultSpecError(spec, "src and dst must differ")
    if "every" in values and fault.every < 1:
        raise FaultSpecError(spec, "every must be 1 or more")
    if fault.cause in ENDINGS and len(fault.ranks) != 1:
        raise FaultSpecError(spec, "one rank dies or falls silent first: give one rank")
