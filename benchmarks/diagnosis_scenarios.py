"""Scenarios of `benchmarks.diagnosis`: random layouts, noise, and up to four faults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Noise, RankOrder, Scenario, TpDetail
from rankscope.trainer.simulator.schedule import V_CHUNKS, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRENGTHS = (1.03, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0)
"""Factors of the faults; faults that add a time add the same share of the compute."""

CAUSES = (
    "slow-compute", "clock-throttle", "slow-link", "network-degradation", "gc-pause", "host-stall",
    "data-stall", "launch-skew", "stage-imbalance", "sequence-imbalance", "misconfiguration",
    "crash", "hang", "layout",
)  # fmt: skip
SEVERAL_SHARE = 0.2
"""Share of the scenarios with two to four faults."""

ZERO_BUBBLE_SHARE = 0.2
"""Share of the pipelines with a split backward."""

EXPERTS_SHARE = 0.2
"""Share of the jobs with experts, if the layout allows them."""

LARGEST_TRACED = 2048
"""Largest number of ranks for which communication inside compute spans is recorded with experts."""

COMPUTE_MS = 30.0
"""Forward and backward of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Scenarios of one size."""

    name: str
    world_sizes: tuple[int, ...]
    num_steps: int
    num_faulty: int
    num_healthy: int


SIZES = (
    Size(name="small", world_sizes=(16, 32, 64, 128, 256), num_steps=14, num_faulty=640,
         num_healthy=260),
    Size(name="2048", world_sizes=(2048,), num_steps=8, num_faulty=300, num_healthy=40),
    Size(name="12288", world_sizes=(12288,), num_steps=5, num_faulty=100, num_healthy=10),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A scenario with its description."""

    number: int
    size: str
    scenario: Scenario
    strength: float
    """Factor of the first fault; 1 if it has none."""

    is_healthy: bool


def scenarios(seed: int, *, share: float = 1.0, sizes: tuple[str, ...] = ()) -> Iterator[Labelled]:
    """Yield all scenarios of a seed.

    Args:
        seed: Equal seeds give equal scenarios.
        share: Share of the scenarios of each size.
        sizes: Names of sizes; all if empty.
    """
    for place, size in enumerate(SIZES):
        if sizes and size.name not in sizes:
            continue
        number = 10_000 * place
        for index in range(round(size.num_faulty * share)):
            yield _faulty(size, number, np.random.default_rng((seed, number)), index)
            number += 1
        number = 10_000 * place + 5_000
        for _ in range(round(size.num_healthy * share)):
            yield _healthy(size, number, np.random.default_rng((seed, number)))
            number += 1


def _layout(size: Size, rng: np.random.Generator) -> Scenario:
    world = int(rng.choice(size.world_sizes))
    pp = int(rng.choice((1, 2, 4, 8) if world <= 256 else (2, 2, 2, 4)))
    pp = 2 if world > 2048 else pp
    tp = int(rng.choice((1, 2, 4, 8)))
    while pp * tp * 4 > world:
        pp, tp = max(pp // 2, 1), max(tp // 2, 1)
    num_microbatches = 2 * pp
    traced = tp > 1 and world <= 256 and rng.random() < 0.5
    plain = Scenario(
        dp=world // (pp * tp),
        pp=pp,
        tp=tp,
        vpp=2 if pp > 1 and rng.random() < 0.15 else 1,
        num_microbatches=max(num_microbatches, 4),
        num_steps=size.num_steps,
        tp_detail=TpDetail.COARSE if traced else TpDetail.COLLAPSED,
        overlap=bool(rng.random() < 0.3),
        noise=Noise(
            rank_bias_ratio=float(rng.choice((0.002, 0.005, 0.01))),
            compute_jitter_ratio=float(rng.choice((0.005, 0.01, 0.02))),
            transfer_jitter_ratio=float(rng.choice((0.02, 0.05))),
        ),
        seed=int(rng.integers(1 << 31)),
    )
    # A separate random stream, so that earlier draws do not change.
    return _with_experts(_with_split_backward(plain, rng.spawn(1)[0]), rng.spawn(1)[0])


def _with_split_backward(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Give some pipelines a zero-bubble schedule."""
    if scenario.pp == 1 or rng.random() >= ZERO_BUBBLE_SHARE:
        return scenario
    schedule = Schedule.ZERO_BUBBLE
    if scenario.vpp == V_CHUNKS and rng.random() < 1 / 2:
        schedule = Schedule.ZERO_BUBBLE_V
    return replace(scenario, schedule=schedule, weight_ratio=float(rng.choice((0.4, 0.5))))


def _with_experts(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """Give some jobs experts with varying tokens."""
    ep = int(rng.choice((2, 4, 8)))
    is_large = scenario.tp > 1 and scenario.world_size > LARGEST_TRACED
    if scenario.dp % ep or is_large or rng.random() >= EXPERTS_SHARE:
        return scenario
    noise = replace(scenario.noise, expert_spread=float(rng.choice((0.05, 0.1, 0.2))))
    detail = TpDetail.COARSE if scenario.tp > 1 else scenario.tp_detail
    return replace(scenario, ep=ep, tp_detail=detail, noise=noise)


def _healthy(size: Size, number: int, rng: np.random.Generator) -> Labelled:
    """Return a healthy scenario, possibly with large variation."""
    scenario = _layout(size, rng)
    noise = replace(
        scenario.noise,
        sequence_spread=float(rng.choice((0.0, 0.02, 0.05))),
        drift_ratio=float(rng.choice((0.0, 0.02))),
        drift_period_steps=int(rng.choice((20, 1000))),
        transfer_jitter_ratio=float(rng.choice((0.03, 0.1, 0.2))),
    )
    specs = []
    if rng.random() < 1 / 3:
        spans = rng.choice(("yes", "no"))
        every, pause_ms = int(rng.integers(2, 6)), int(rng.integers(100, 900))
        specs.append(f"checkpoint:every={every},ms={pause_ms},spans={spans}")
    scenario = replace(scenario, noise=noise, faults=parse_simulated_faults(specs))
    return Labelled(number=number, size=size.name, scenario=scenario, strength=1.0, is_healthy=True)


def _faulty(size: Size, number: int, rng: np.random.Generator, index: int) -> Labelled:
    base = _layout(size, rng)
    first = CAUSES[index % len(CAUSES)]
    strength = float(rng.choice(STRENGTHS))
    if first == "layout":
        return Labelled(
            number=number,
            size=size.name,
            scenario=_bad_layout(base, rng),
            strength=strength,
            is_healthy=False,
        )
    causes = [first]
    if first not in ("crash", "hang") and rng.random() < SEVERAL_SHARE:
        more = [cause for cause in MIXED if cause != first]
        causes += rng.choice(more, size=int(rng.integers(1, 4)), replace=False).tolist()
    base = _fitting(base, causes)
    draw = Draw(base, rng)
    specs = [
        PLANTERS[cause](draw, strength if place == 0 else max(strength, 1.2))
        for place, cause in enumerate(causes)
    ]
    return Labelled(
        number=number,
        size=size.name,
        scenario=replace(base, faults=parse_simulated_faults(specs)),
        strength=strength,
        is_healthy=False,
    )


MIXED = ("slow-compute", "slow-link", "data-stall", "host-stall", "misconfiguration")
"""Causes that are combined with another one."""


def _fitting(base: Scenario, causes: list[str]) -> Scenario:
    """Set the axes and hosts that the faults of a scenario need."""
    if "slow-link" in causes:
        # In a single ring all members are equally slow, so the slow one cannot be located.
        pp = max(base.pp, 2)
        dp = max(base.world_size // (pp * base.tp), 2)
        ep = math.gcd(base.ep, dp)
        base = replace(base, pp=pp, dp=dp, ep=ep, ranks_per_host=max(base.tp, 2))
    if "stage-imbalance" in causes and base.pp < 4:
        dp = max(base.world_size // (4 * base.tp), 1)
        base = replace(base, pp=4, dp=dp, ep=math.gcd(base.ep, dp), num_microbatches=8)
    fits = base.vpp == 1 or base.num_microbatches % base.pp == 0
    return base if fits else replace(base, vpp=1, schedule=Schedule.ONE_F_ONE_B)


def _bad_layout(base: Scenario, rng: np.random.Generator) -> Scenario:
    base = replace(base, ep=1, schedule=Schedule.ONE_F_ONE_B)
    if rng.random() < 0.5 and base.world_size >= 32:
        return replace(
            base,
            pp=max(base.pp, 2),
            tp=2,
            dp=base.world_size // (2 * max(base.pp, 2)),
            vpp=1,
            num_microbatches=max(4 * base.pp, 8),
            rank_order=RankOrder.DP_FIRST,
        )
    pp = 8 if base.world_size >= 64 else 4
    return replace(base, pp=pp, tp=1, vpp=1, dp=base.world_size // pp, num_microbatches=pp // 2)


@dataclass(frozen=True, slots=True)
class Draw:
    """Chooser of place and steps for the faults of a scenario."""

    base: Scenario
    rng: np.random.Generator
    taken: set[int] = field(default_factory=set)
    """Workers that already have a fault."""

    def steps(self) -> str:
        """Return the steps of a fault: all, from some step on, or some steps."""
        kind, last = int(self.rng.integers(3)), self.base.num_steps - 1
        if kind == 0:
            return ""
        first = int(self.rng.integers(2, max(self.base.num_steps // 2, 3)))
        end = last if kind == 1 else min(last, first + max(3, self.base.num_steps // 3))
        return f",steps={first}-{end}"

    def rank(self) -> int:
        """Return a rank of a worker without a fault."""
        while True:
            rank = int(self.rng.integers(self.base.world_size))
            if rank // self.base.tp not in self.taken:
                self.taken.add(rank // self.base.tp)
                return rank

    def extra_ms(self, strength: float) -> float:
        """Return the time that a factor adds to the compute of a step."""
        return (strength - 1.0) * COMPUTE_MS * self.base.num_microbatches

    def spans(self) -> str:
        """Return whether the trace has spans or gaps for it."""
        return str(self.rng.choice(("yes", "no")))


def _slow_compute(draw: Draw, strength: float) -> str:
    return f"slow-compute:rank={draw.rank()},factor={strength}{draw.steps()}"


def _clock_throttle(draw: Draw, strength: float) -> str:
    return f"clock-throttle:rank={draw.rank()},factor={strength}{draw.steps()}"


def _slow_link(draw: Draw, strength: float) -> str:
    factor = 1 + 2 * (strength - 1)
    return f"slow-link:rank={draw.rank()},factor={factor:.3f}{draw.steps()}"


def _network(draw: Draw, strength: float) -> str:
    reason = draw.rng.choice(("congestion", "retransmit", "flap"))
    half = draw.base.num_steps // 2
    return (
        f"network-degradation:factor={1 + 2 * (strength - 1):.3f},reason={reason}"
        f",steps={half}-{draw.base.num_steps - 1}"
    )


def _gc(draw: Draw, _: float) -> str:
    per_step = draw.base.world_size * draw.base.num_microbatches
    probability = min(float(draw.rng.uniform(2.0, 5.0)) / per_step, 0.05)
    spans = draw.spans()
    pause_ms = int(draw.rng.integers(100, 400))
    return f"gc-pause:ms={pause_ms},probability={probability:.6f},spans={spans}"


def _host_stall(draw: Draw, strength: float) -> str:
    ms = draw.extra_ms(strength) / (2 * draw.base.num_microbatches * draw.base.vpp)
    return f"host-stall:rank={draw.rank()},ms={ms:.3f}{draw.steps()}"


def _data_stall(draw: Draw, strength: float) -> str:
    spans = draw.spans()
    ms = draw.extra_ms(strength)
    return f"data-stall:rank={draw.rank()},ms={ms:.1f},spans={spans}{draw.steps()}"


def _skew(draw: Draw, strength: float) -> str:
    ms = draw.extra_ms(max(strength, 1.5))
    return f"launch-skew:ms={ms:.1f},stage={int(draw.rng.integers(draw.base.pp))}"


def _stage(draw: Draw, strength: float) -> str:
    return f"stage-imbalance:stage={int(draw.rng.integers(draw.base.pp))},factor={strength}"


def _sequence(draw: Draw, _: float) -> str:
    return f"sequence-imbalance:spread={draw.rng.uniform(0.3, 0.6):.2f}"


def _misconfiguration(draw: Draw, _: float) -> str:
    return f"misconfiguration:rank={draw.rank()}"


def _crash(draw: Draw, _: float) -> str:
    kind = draw.rng.choice(("cuda-oom", "host-oom", "xid", "exception"))
    step = int(draw.rng.integers(2, draw.base.num_steps))
    return f"crash:rank={draw.rank()},step={step},kind={kind}"


def _hang(draw: Draw, _: float) -> str:
    return f"hang:rank={draw.rank()},step={int(draw.rng.integers(2, draw.base.num_steps))}"


PLANTERS: dict[str, Callable[[Draw, float], str]] = {
    "slow-compute": _slow_compute,
    "clock-throttle": _clock_throttle,
    "slow-link": _slow_link,
    "network-degradation": _network,
    "gc-pause": _gc,
    "host-stall": _host_stall,
    "data-stall": _data_stall,
    "launch-skew": _skew,
    "stage-imbalance": _stage,
    "sequence-imbalance": _sequence,
    "misconfiguration": _misconfiguration,
    "crash": _crash,
    "hang": _hang,
}
