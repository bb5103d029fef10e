"""The text form of faults, ``cause:key=value,...``: one language for demo, trainer and simulator.

::

    slow-compute:rank=5,factor=1.8,steps=10-29
    slow-link:src=4,dst=5,factor=50
    crash:rank=3,step=7,kind=kill

``none`` means no fault. `KEYS` says what each key means, `CAUSES` which keys a cause takes, and a
`Vocabulary` which of both the trainer or the simulator can make. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import coords_of, ranks_of_stage
from ..errors import FaultSpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankscope.tracer.topology import Layout

NO_FAULT = "none"


class FaultCause(StrEnum):
    """Causes of faults, spelled as in the findings."""

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
    RECOMPILE = "recompile"
    EVALUATION = "evaluation"
    CPU_HOG = "cpu-hog"
    """Other processes on the cores of a rank; found by what they make slow."""

    MEMORY_HOG = "memory-hog"
    """Other processes that copy memory; likewise."""

    CRASH = "crash"
    HANG = "hang"
    MISMATCH = "mismatch"
    """A rank calls a collective that the others do not call; found as a hang."""


class CrashKind(StrEnum):
    """Kinds of crashes."""

    EXCEPTION = "exception"
    CUDA_OOM = "cuda-oom"
    HOST_OOM = "host-oom"
    XID = "xid"
    EXIT = "exit"
    """By `os._exit`, without a message."""

    KILL = "kill"
    """By SIGKILL, as the kernel's out-of-memory killer does it."""


class NetworkReason(StrEnum):
    """Reasons for a degraded network; each shows in a counter of its own."""

    CONGESTION = "congestion"
    RETRANSMIT = "retransmit"
    FLAP = "flap"


COMPUTE_CAUSES = frozenset(
    {FaultCause.SLOW_COMPUTE, FaultCause.CLOCK_THROTTLE, FaultCause.STAGE_IMBALANCE}
)
"""Causes that make local compute take longer."""

ALL_RANK_CAUSES = frozenset(
    {FaultCause.GC_PAUSE, FaultCause.CHECKPOINT, FaultCause.SEQUENCE_IMBALANCE}
)
"""Causes that act on all ranks, so that no rank is the culprit."""

PERIODIC_CAUSES = frozenset({FaultCause.DATA_STALL, FaultCause.RECOMPILE, FaultCause.EVALUATION})
"""Causes that act in each ``every``-th step."""

HANG_CAUSES = frozenset({FaultCause.HANG, FaultCause.MISMATCH})

ENDING_CAUSES = frozenset({FaultCause.CRASH, *HANG_CAUSES})
"""Causes after which the job trains no more."""

SKEW_PERIOD_STEPS = 8.0
"""Steps after which the same member of a skewed group is latest again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. A field that its cause does not take keeps its default."""

    cause: FaultCause

    factor: float = 1.0
    """How many times as long compute takes, or the bytes of a transfer."""

    ranks: tuple[int, ...] = ()
    """Global ranks, ascending."""

    host: int | None = None
    """A host, with all its ranks."""

    rack: int | None = None
    """A rack, with all traffic that leaves or enters it."""

    stage: int | None = None
    """A pipeline stage, with all its ranks. For launch skew: the stage of the skewed group."""

    tp: int = 0
    """Tensor-parallel position of the data-parallel group that is skewed."""

    src: int | None = None
    dst: int | None = None
    """Ends of a link, which is slow in both directions."""

    extra_ns: int = 0
    """Time lost at each occurrence."""

    probability: float = 0.0
    """Probability of a pause before one forward of one rank, or that a link is slow in a step; 0:
    the link is slow in all of them."""

    share: float = 1.0
    """Share of the hosts whose network is degraded."""

    spread: float = 0.0
    """Standard deviation of the logarithm of a micro-batch's compute."""

    every: int = 0
    """Steps from one checkpoint, evaluation or batch of a slow loader worker to the next one; 0:
    every step."""

    ramp: int = 0
    """Steps in which compute slows down to the whole factor, evenly; 0: at once."""

    reason: NetworkReason = NetworkReason.CONGESTION
    has_spans: bool = True
    """Whether the trace shows the lost time as spans; else as gaps."""

    variable: str = ""
    value: str = ""
    """The environment variable that differs, and its value."""

    crash_kind: CrashKind = CrashKind.EXCEPTION

    step: int | None = None
    """The step in which the rank crashes or hangs."""

    steps: tuple[int, int] | None = None
    """First and last step, inclusive, from 0; None: every step."""

    def __str__(self) -> str:
        texts = {key: KEYS[key].text(self) for key in CAUSES[self.cause].all}
        pairs = ",".join(f"{key}={text}" for key, text in texts.items() if text)
        return f"{self.cause}:{pairs}"

    @property
    def num_hogs(self) -> int:
        """Processes beside a rank, whose work then takes about ``factor`` times as long."""
        return max(1, round(self.factor - 1))

    @property
    def first_step(self) -> int:
        """The first step in which the fault can show."""
        if self.step is not None:
            return self.step
        return self.steps[0] if self.steps is not None else 0

    def is_active(self, step: int) -> bool:
        """Return whether the fault acts in ``step``."""
        is_due = self.cause not in PERIODIC_CAUSES or not self.every
        begin = -1 if self.cause is FaultCause.EVALUATION else self.first_step
        is_due = is_due or (step - begin) % self.every == 0
        return is_due and (self.steps is None or self.steps[0] <= step <= self.steps[1])

    def factor_at(self, step: int) -> float:
        """Return the factor in a step in which the fault acts."""
        reached = (step - self.first_step + 1) / self.ramp if self.ramp else 1.0
        return 1.0 + (self.factor - 1.0) * min(reached, 1.0)

    def culprits(self, layout: Layout) -> tuple[int, ...]:
        """Return the global ranks that are at fault in a job without hosts or racks, ascending.

        Raises:
            FaultSpecError: The layout lacks a rank, stage, link or group that the fault names.
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
        if self.cause is FaultCause.MISMATCH and layout.world_size == 1:
            raise FaultSpecError(str(self), "a mismatch needs several ranks")
        if self.cause is FaultCause.LAUNCH_SKEW and layout.dp == 1:
            raise FaultSpecError(
                str(self), "launch skew needs a group of several ranks: pass --dp 2 or more"
            )
        if self.src is not None and self.dst is not None:
            self._check_link(self.src, self.dst, layout)

    def _check_link(self, src: int, dst: int, layout: Layout) -> None:
        here, there = coords_of(src, layout), coords_of(dst, layout)
        is_other_data = (here.dp, here.cp) != (there.dp, there.cp)
        distances = (here.pp - there.pp, is_other_data, here.tp - there.tp)
        if sum(map(bool, distances)) != 1 or abs(distances[0]) > 1:
            raise FaultSpecError(
                str(self),
                f"ranks {src} and {dst} exchange no data: name two ranks of one data- or"
                " tensor-parallel group, or of neighbouring stages",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseKeys:
    """Keys of one cause."""

    places: tuple[tuple[str, ...], ...] = ()
    """Ways to say where the fault is, each by one or more keys; they exclude each other."""

    is_place_required: bool = True
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ("steps",)
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Values of optional keys whose default differs from that of `Fault`."""

    @property
    def all(self) -> tuple[str, ...]:
        """Every key, in the order in which a fault is printed."""
        return (*(key for place in self.places for key in place), *self.required, *self.optional)

    def check(self, given: Iterable[str], cause: FaultCause) -> None:
        """Check the keys that were given.

        Raises:
            ValueError: A required key is missing, or not exactly one place is given.
        """
        keys = set(given)
        for key in self.required:
            if key not in keys:
                raise ValueError(f"{key!r} is missing: {cause} takes {', '.join(self.all)}")
        place = {key for alternative in self.places for key in alternative} & keys
        if not self.places or (not place and not self.is_place_required):
            return
        if place not in map(set, self.places):
            choices = (
                ",".join(f"{key}={KEYS[key].placeholder}" for key in alternative)
                for alternative in self.places
            )
            raise ValueError(f"give {' or '.join(choices)}")


RANK_OR_HOST = (("rank",), ("host",))

CAUSES: dict[FaultCause, CauseKeys] = {
    FaultCause.SLOW_COMPUTE: CauseKeys(
        places=RANK_OR_HOST, required=("factor",), optional=("ramp", "steps")
    ),
    FaultCause.CLOCK_THROTTLE: CauseKeys(
        places=RANK_OR_HOST, required=("factor",), optional=("ramp", "steps")
    ),
    FaultCause.SLOW_LINK: CauseKeys(
        places=(("src", "dst"), ("rank",), ("rack",)),
        required=("factor",),
        optional=("probability", "steps"),
    ),
    FaultCause.NETWORK_DEGRADATION: CauseKeys(
        required=("factor",), optional=("share", "reason", "steps")
    ),
    FaultCause.GC_PAUSE: CauseKeys(
        optional=("ms", "probability", "spans", "steps"),
        # Source: pauses of hundreds of ms, arXiv 2505.05713.
        defaults={"ms": "250", "probability": "0.005"},
    ),
    FaultCause.HOST_STALL: CauseKeys(places=RANK_OR_HOST, required=("ms",)),
    FaultCause.DATA_STALL: CauseKeys(
        places=RANK_OR_HOST,
        is_place_required=False,
        required=("ms",),
        optional=("every", "spans", "steps"),
    ),
    FaultCause.LAUNCH_SKEW: CauseKeys(required=("ms",), optional=("stage", "tp", "steps")),
    FaultCause.CHECKPOINT: CauseKeys(required=("every", "ms"), optional=("spans", "steps")),
    FaultCause.STAGE_IMBALANCE: CauseKeys(required=("stage", "factor")),
    FaultCause.SEQUENCE_IMBALANCE: CauseKeys(required=("spread",)),
    FaultCause.MISCONFIGURATION: CauseKeys(
        required=("rank",),
        optional=("variable", "value"),
        defaults={"variable": "NCCL_IB_DISABLE", "value": "1"},
    ),
    FaultCause.RECOMPILE: CauseKeys(
        places=RANK_OR_HOST,
        is_place_required=False,
        required=("ms",),
        optional=("every", "steps"),
    ),
    FaultCause.EVALUATION: CauseKeys(
        required=("every", "ms"), optional=("rank", "steps"), defaults={"rank": "0"}
    ),
    FaultCause.CPU_HOG: CauseKeys(places=RANK_OR_HOST, required=("factor",)),
    FaultCause.MEMORY_HOG: CauseKeys(places=RANK_OR_HOST, required=("factor",)),
    FaultCause.CRASH: CauseKeys(required=("rank", "step"), optional=("kind",)),
    FaultCause.HANG: CauseKeys(required=("rank", "step"), optional=()),
    FaultCause.MISMATCH: CauseKeys(required=("rank", "step"), optional=()),
}

SPECIAL_FORMS: dict[str, tuple[FaultCause, Mapping[str, str]]] = {
    "network-jitter": (FaultCause.SLOW_LINK, {"probability": "0.3"}),
    "throttle-ramp": (FaultCause.CLOCK_THROTTLE, {"ramp": "10"}),
    "slow-loader-worker": (FaultCause.DATA_STALL, {"every": "4"}),
}
"""Further names of faults: a cause, and keys with another default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Faults that one program can make."""

    crash_kinds: tuple[CrashKind, ...]
    missing_causes: frozenset[FaultCause] = frozenset()
    missing_keys: frozenset[str] = frozenset()

    @property
    def causes(self) -> tuple[FaultCause, ...]:
        """The causes, in the order of `FaultCause`."""
        return tuple(cause for cause in FaultCause if cause not in self.missing_causes)

    def keys_of(self, cause: FaultCause) -> CauseKeys:
        """Return the keys that ``cause`` takes in this program."""
        keys = CAUSES[cause]
        known = (place for place in keys.places if not self.missing_keys.intersection(place))
        return replace(keys, places=tuple(known))


TRAINER_FAULTS = Vocabulary(
    crash_kinds=(CrashKind.EXCEPTION, CrashKind.HOST_OOM, CrashKind.EXIT, CrashKind.KILL),
    missing_causes=frozenset({FaultCause.NETWORK_DEGRADATION}),
    missing_keys=frozenset({"host", "rack"}),
)
"""All ranks of the trainer run on one machine: it has no network, hosts or racks."""

SIMULATED_FAULTS = Vocabulary(
    crash_kinds=(CrashKind.CUDA_OOM, CrashKind.HOST_OOM, CrashKind.XID, CrashKind.EXCEPTION)
)


def parse_faults(
    specs: Iterable[str], vocabulary: Vocabulary = TRAINER_FAULTS
) -> tuple[Fault, ...]:
    """Return the faults of several texts in their order; ``none`` adds nothing.

    Raises:
        FaultSpecError: As `parse_fault`.
    """
    parsed = (parse_fault(spec, vocabulary) for spec in specs)
    return tuple(fault for fault in parsed if fault is not None)


def parse_simulated_faults(specs: Iterable[str]) -> tuple[Fault, ...]:
    """Return the faults of a simulated cluster (docs/simulator.md), as `parse_faults` does."""
    return parse_faults(specs, SIMULATED_FAULTS)


def parse_fault(spec: str, vocabulary: Vocabulary = TRAINER_FAULTS) -> Fault | None:
    """Return the fault that a text describes; None for ``none``.

    Raises:
        FaultSpecError: Unknown cause, unknown, missing or repeated key, or a bad value.
    """
    if spec.strip() == NO_FAULT:
        return None
    try:
        return _parse(spec.strip(), vocabulary)
    except ValueError as problem:
        raise FaultSpecError(spec, str(problem)) from None


def slowdown_of(faults: Iterable[Fault], layout: Layout, *, rank: int, step: int) -> float:
    """Return how many times as long the compute of ``rank`` takes in ``step``.

    The factors of several faults on one rank multiply; 1.0 without a fault.
    """
    stage = coords_of(rank, layout).pp
    return math.prod(
        fault.factor_at(step)
        for fault in faults
        if fault.cause in COMPUTE_CAUSES
        and fault.is_active(step)
        and (rank in fault.ranks or stage == fault.stage)
    )


def _parse(text: str, vocabulary: Vocabulary) -> Fault:
    name, colon, rest = text.partition(":")
    cause_name, defaults = SPECIAL_FORMS.get(name, (name, {}))
    if cause_name not in vocabulary.causes:
        raise ValueError(
            f"unknown cause {name!r}: use one of"
            f" {', '.join((*vocabulary.causes, *SPECIAL_FORMS))}, or {NO_FAULT}"
        )
    cause = FaultCause(cause_name)
    keys = vocabulary.keys_of(cause)
    if not colon and (keys.required or keys.places):
        raise ValueError(f"expected {name}:key=value,... with {', '.join(keys.all)}")
    given = _split(rest, cause, keys) if colon else {}
    keys.check(given, cause)
    kind = given.get("kind", CrashKind.EXCEPTION)
    if kind not in vocabulary.crash_kinds:
        raise ValueError(f"kind must be one of {', '.join(vocabulary.crash_kinds)}, got {kind!r}")
    values = {**keys.defaults, **defaults, **given}
    fields = {KEYS[key].field: KEYS[key].read(key, value) for key, value in values.items()}
    fault = Fault(cause=cause, **fields)
    if fault.src is not None and fault.src == fault.dst:
        raise ValueError("src and dst must differ")
    if cause in ENDING_CAUSES and len(fault.ranks) != 1:
        raise ValueError(f"a {cause} begins on one rank: give one rank")
    return fault


def _split(text: str, cause: FaultCause, keys: CauseKeys) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise ValueError(f"expected key=value, got {pair!r}")
        if key not in keys.all:
            raise ValueError(f"unknown key {key!r}: {cause} takes {', '.join(keys.all)}")
        if key in values:
            raise ValueError(f"{key!r} is given twice")
        values[key] = value
    return values


def _read_number(key: str, text: str, *, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ValueError(f"{key} must be a whole number from {least} on, got {text!r}")
    return int(text)


def _read_ranks(key: str, text: str) -> tuple[int, ...]:
    ranks = sorted(_read_number(key, part) for part in text.split("+"))
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"{key} names a rank twice: {text!r}")
    return tuple(ranks)


def _read_float(key: str, text: str, *, above: float = 0.0, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (above < value <= most and math.isfinite(value)):
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        raise ValueError(f"{key} must be a number above {above:g}{limit}, got {text!r}")
    return value


def _read_ns(key: str, text: str) -> int:
    return round(_read_float(key, text) * 1e6)


def _read_steps(key: str, text: str) -> tuple[int, int]:
    first_text, dash, last_text = text.partition("-")
    first = _read_number(key, first_text)
    last = _read_number(key, last_text) if dash else first
    if last < first:
        raise ValueError(f"{key} must be FIRST-LAST, got {text!r}: it ends before it starts")
    return first, last


def _read_choice(key: str, text: str, *, choices: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if text not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, got {text!r}")
    return choices[text]


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Key:
    """One key: the field of `Fault` that it sets, how it is read, and how it is printed."""

    field: str
    read: Callable[[str, str], Any]
    """From key and text to the value of the field; raises ValueError for a bad text."""

    write: Callable[[Any], str] = _format
    placeholder: str = ""
    """Placeholder of the value in error messages."""

    def text(self, fault: Fault) -> str:
        """Return the text of the value in ``fault``; "" if it has none."""
        value = getattr(fault, self.field)
        return "" if value is None or value == () else self.write(value)


_read_count = partial(_read_number, least=1)
_read_ratio = partial(_read_float, most=1.0)
_read_reason = partial(_read_choice, choices={str(reason): reason for reason in NetworkReason})
_read_yes_no = partial(_read_choice, choices={"yes": True, "no": False})

KEYS: dict[str, Key] = {
    "rank": Key("ranks", _read_ranks, lambda ranks: "+".join(map(str, ranks)), "RANK"),
    "host": Key("host", _read_number, placeholder="HOST"),
    "rack": Key("rack", _read_number, placeholder="RACK"),
    "src": Key("src", _read_number, placeholder="RANK"),
    "dst": Key("dst", _read_number, placeholder="RANK"),
    "stage": Key("stage", _read_number),
    "tp": Key("tp", _read_number),
    "factor": Key("factor", partial(_read_float, above=1.0)),
    "ms": Key("extra_ns", _read_ns, lambda extra_ns: f"{extra_ns / 1e6:g}"),
    "probability": Key("probability", _read_ratio, lambda ratio: f"{ratio:g}" if ratio else ""),
    "share": Key("share", _read_ratio),
    "spread": Key("spread", _read_ratio),
    "every": Key("every", _read_count, lambda every: str(every or "")),
    "ramp": Key("ramp", _read_count, lambda ramp: str(ramp or "")),
    "reason": Key("reason", _read_reason),
    "spans": Key("has_spans", _read_yes_no, lambda has_spans: "yes" if has_spans else "no"),
    "variable": Key("variable", lambda _, text: text),
    "value": Key("value", lambda _, text: text),
    "kind": Key("crash_kind", lambda _, text: CrashKind(text)),
    "step": Key("step", _read_number),
    "steps": Key("steps", _read_steps, lambda steps: f"{steps[0]}-{steps[1]}"),
}
