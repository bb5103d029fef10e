"""Planted faults of a simulated cluster: what is wrong, where, how much and when.

The spelling is the trainer's, ``cause:key=value,...``, with the causes that a
CPU process cannot have as well::

    slow-compute:rank=5+6,factor=1.8,steps=10-29
    slow-link:src=3,dst=7,factor=4
    gc-pause:ms=250,probability=0.01
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ..errors import FaultSpecError
from ..faults.spec import NO_FAULT
from ..faults.spec_text import (
    read_amount,
    read_factor,
    read_number,
    read_pairs,
    read_ranks,
    read_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


class SimulatedCause(StrEnum):
    """What can be planted, in the words of the findings."""

    SLOW_COMPUTE = "slow-compute"
    CLOCK_THROTTLE = "clock-throttle"
    SLOW_LINK = "slow-link"
    NETWORK_DEGRADATION = "network-degradation"
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


class NetworkReason(StrEnum):
    """Why a network is slow, as its counters tell."""

    CONGESTION = "congestion"
    RETRANSMIT = "retransmit"
    FLAP = "flap"


class CrashKind(StrEnum):
    """How a rank's process dies."""

    CUDA_OOM = "cuda-oom"
    HOST_OOM = "host-oom"
    XID = "xid"
    EXCEPTION = "exception"


class Trace(StrEnum):
    """What lost time looks like in the trace."""

    SPANS = "spans"
    GAPS = "gaps"


REQUIRED: dict[SimulatedCause, tuple[str, ...]] = {
    SimulatedCause.SLOW_COMPUTE: ("factor",),
    SimulatedCause.CLOCK_THROTTLE: ("factor",),
    SimulatedCause.SLOW_LINK: ("factor",),
    SimulatedCause.NETWORK_DEGRADATION: ("factor",),
    SimulatedCause.GC_PAUSE: (),
    SimulatedCause.HOST_STALL: ("ms",),
    SimulatedCause.DATA_STALL: ("ms",),
    SimulatedCause.LAUNCH_SKEW: ("ms",),
    SimulatedCause.CHECKPOINT: ("every", "ms"),
    SimulatedCause.STAGE_IMBALANCE: ("stage", "factor"),
    SimulatedCause.SEQUENCE_IMBALANCE: ("spread",),
    SimulatedCause.MISCONFIGURATION: ("rank",),
    SimulatedCause.CRASH: ("rank", "step"),
    SimulatedCause.HANG: ("rank", "step"),
}
"""Keys that each cause must be given."""

OPTIONAL: dict[SimulatedCause, tuple[str, ...]] = {
    SimulatedCause.SLOW_COMPUTE: ("rank", "host", "steps"),
    SimulatedCause.CLOCK_THROTTLE: ("rank", "host", "steps"),
    SimulatedCause.SLOW_LINK: ("src", "dst", "rank", "rack", "steps"),
    SimulatedCause.NETWORK_DEGRADATION: ("share", "reason", "steps"),
    SimulatedCause.GC_PAUSE: ("ms", "probability", "spans", "steps"),
    SimulatedCause.HOST_STALL: ("rank", "host", "steps"),
    SimulatedCause.DATA_STALL: ("rank", "host", "spans", "steps"),
    SimulatedCause.LAUNCH_SKEW: ("stage", "tp", "steps"),
    SimulatedCause.CHECKPOINT: ("spans", "steps"),
    SimulatedCause.STAGE_IMBALANCE: ("steps",),
    SimulatedCause.SEQUENCE_IMBALANCE: ("steps",),
    SimulatedCause.MISCONFIGURATION: ("variable", "value"),
    SimulatedCause.CRASH: ("kind",),
    SimulatedCause.HANG: (),
}
"""Keys that each cause may be given."""

NEEDS_A_PLACE = frozenset(
    {SimulatedCause.SLOW_COMPUTE, SimulatedCause.CLOCK_THROTTLE, SimulatedCause.HOST_STALL}
)
"""Causes that need ``rank`` or ``host``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    """One planted fault; a field that its cause does not take keeps its default."""

    cause: SimulatedCause

    ranks: tuple[int, ...] = ()
    """Global ranks, ascending."""

    host: int | None = None
    """Number of a host, all of whose ranks are meant."""

    stage: int | None = None
    tp: int = 0
    """Position of the data-parallel group whose members are skewed."""

    rack: int | None = None
    """Number of a rack, whose uplink is meant: all that leaves or enters it."""

    src: int | None = None
    dst: int | None = None
    factor: float = 1.0
    """How many times as long: compute, or the bytes' part of a transfer."""

    extra_ns: int = 0
    """Time lost at each occurrence."""

    probability: float = 0.0
    """Of a pause before one forward of one rank."""

    share: float = 1.0
    """Of the hosts that have a degraded network."""

    spread: float = 0.0
    """Standard deviation of the logarithm of a micro-batch's compute."""

    every: int = 0
    """Steps from one checkpoint to the next."""

    reason: NetworkReason = NetworkReason.CONGESTION
    crash: CrashKind = CrashKind.EXCEPTION
    trace: Trace = Trace.SPANS
    variable: str = ""
    value: str = ""
    """Environment variable that differs, and what it says."""

    step: int | None = None
    """In which the rank dies or falls silent."""

    steps: tuple[int, int] | None = None
    """First and last step, inclusive, 0-based; None: every step."""

    def is_active(self, step: int) -> bool:
        """Return whether the fault holds in ``step``."""
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def __str__(self) -> str:
        parts = [
            f"{key}={text}"
            for key in (*REQUIRED[self.cause], *OPTIONAL[self.cause])
            if (text := self._text(key))
        ]
        return f"{self.cause}:{','.join(parts)}" if parts else str(self.cause)

    def _text(self, key: str) -> str:
        """Return the value of ``key`` as `parse_simulated_fault` reads it; "" where not given."""
        match key:
            case "rank":
                return "+".join(map(str, self.ranks))
            case "ms":
                return f"{self.extra_ns / 1e6:g}"
            case "steps":
                return "" if self.steps is None else f"{self.steps[0]}-{self.steps[1]}"
            case "spans":
                return "yes" if self.trace is Trace.SPANS else "no"
            case "kind":
                return str(self.crash)
            case _:
                value = getattr(self, key)
                return "" if value is None else f"{value:g}" if key in FLOATS else str(value)


FLOATS = frozenset({"factor", "probability", "share", "spread"})

DEFAULT_PAUSE_MS = 250.0
"""Source: pauses of hundreds of ms, arXiv 2505.05713."""

DEFAULT_PAUSE_PROBABILITY = 0.005
DEFAULT_VARIABLE, DEFAULT_VALUE = "NCCL_IB_DISABLE", "1"


def parse_simulated_fault(spec: str) -> SimulatedFault | None:
    """Return the fault that ``spec`` spells; None for ``none``.

    Raises:
        FaultSpecError: Unknown cause, unknown, missing or repeated key, or a bad value.
    """
    text = spec.strip()
    if text == NO_FAULT:
        return None
    name, colon, rest = text.partition(":")
    if name not in tuple(SimulatedCause):
        raise FaultSpecError(
            spec, f"unknown cause {name!r}: use one of {', '.join(SimulatedCause)}, or {NO_FAULT}"
        )
    cause = SimulatedCause(name)
    keys = (*REQUIRED[cause], *OPTIONAL[cause])
    if not colon and REQUIRED[cause]:
        raise FaultSpecError(spec, f"expected {name}:key=value,... with {', '.join(keys)}")
    values = (
        read_pairs(spec, rest, cause=cause, keys=keys, optional=OPTIONAL[cause]) if colon else {}
    )
    fault = _read(spec, cause, values)
    _check(spec, fault, values)
    return fault


def parse_simulated_faults(specs: Iterable[str]) -> tuple[SimulatedFault, ...]:
    """Return the faults of several specs in their order; ``none`` adds nothing.

    Raises:
        FaultSpecError: As `parse_simulated_fault`.
    """
    parsed = (parse_simulated_fault(spec) for spec in specs)
    return tuple(fault for fault in parsed if fault is not None)


def _read(spec: str, cause: SimulatedCause, values: dict[str, str]) -> SimulatedFault:
    def number(key: str) -> int | None:
        return read_number(spec, key, values[key]) if key in values else None

    def amount(key: str, missing: float, *, most: float = float("inf")) -> float:
        return read_amount(spec, key, values[key], most=most) if key in values else missing

    pauses = cause is SimulatedCause.GC_PAUSE
    configured = cause is SimulatedCause.MISCONFIGURATION
    missing_ms = DEFAULT_PAUSE_MS if pauses else 0.0
    return SimulatedFault(
        cause=cause,
        ranks=read_ranks(spec, values["rank"]) if "rank" in values else (),
        host=number("host"),
        rack=number("rack"),
        stage=number("stage"),
        tp=number("tp") or 0,
        src=number("src"),
        dst=number("dst"),
        factor=read_factor(spec, values["factor"]) if "factor" in values else 1.0,
        extra_ns=round(amount("ms", missing_ms) * 1e6),
        probability=amount("probability", DEFAULT_PAUSE_PROBABILITY if pauses else 0.0, most=1.0),
        share=amount("share", 1.0, most=1.0),
        spread=amount("spread", 0.0, most=1.0),
        every=number("every") or 0,
        reason=NetworkReason(_one_of(spec, "reason", values, NetworkReason)),
        crash=CrashKind(_one_of(spec, "kind", values, CrashKind, missing=CrashKind.EXCEPTION)),
        trace=Trace.GAPS if _one_of(spec, "spans", values, ("yes", "no")) == "no" else Trace.SPANS,
        variable=values.get("variable", DEFAULT_VARIABLE if configured else ""),
        value=values.get("value", DEFAULT_VALUE if configured else ""),
        step=number("step"),
        steps=read_steps(spec, values["steps"]) if "steps" in values else None,
    )


def _one_of(
    spec: str,
    key: str,
    values: dict[str, str],
    choices: Iterable[str],
    *,
    missing: str | None = None,
) -> str:
    known = tuple(choices)
    value = values.get(key, missing or known[0])
    if value not in known:
        raise FaultSpecError(spec, f"{key} must be one of {', '.join(known)}, got {value!r}")
    return value


def _check(spec: str, fault: SimulatedFault, values: dict[str, str]) -> None:
    if fault.cause in NEEDS_A_PLACE and ("rank" in values) == ("host" in values):
        raise FaultSpecError(spec, "give either rank=... or host=...")
    if "rank" in values and "host" in values:
        raise FaultSpecError(spec, "give either rank=... or host=..., not both")
    if fault.cause is SimulatedCause.SLOW_LINK:
        given = [key for key in ("src", "dst", "rank", "rack") if key in values]
        if given not in (["src", "dst"], ["rank"], ["rack"]):
            raise FaultSpecError(spec, "give src=RANK,dst=RANK or rank=RANK or rack=RACK")
        if fault.src is not None and fault.src == fault.dst:
            raise FaultSpecError(spec, "src and dst must differ")
    if "every" in values and fault.every < 1:
        raise FaultSpecError(spec, "every must be 1 or more")
    if fault.step is not None and len(fault.ranks) != 1:
        raise FaultSpecError(spec, "one rank dies or falls silent first: give one rank")
