"""Random jobs and faults: every cause, several layouts, up to three faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.independent.faults import Fault
from benchmarks.independent.job import Job
from benchmarks.independent.layout import Places

if TYPE_CHECKING:
    from collections.abc import Callable

JOBS: dict[str, tuple[Job, ...]] = {
    "ddp": (
        Job(places=Places(dp=8), num_layers=4),
        Job(places=Places(dp=16), num_layers=3),
        Job(places=Places(dp=32), num_layers=2),
    ),
    "fsdp": (
        Job(places=Places(dp=8), sharded=True, num_layers=4, layer_ms=8.0),
        Job(places=Places(dp=32), sharded=True, num_layers=3, layer_ms=12.0, num_microbatches=2),
    ),
    "pp": (
        Job(places=Places(dp=4, pp=4), num_microbatches=6),
        Job(places=Places(dp=2, pp=4, tp=2), num_microbatches=6),
        Job(places=Places(dp=4, pp=2, tp=4), num_microbatches=6),
        Job(places=Places(dp=4, pp=4, tp=4), num_microbatches=6, num_layers=1, layer_ms=6.0),
        Job(places=Places(dp=8, pp=4), num_microbatches=6, last_stage=1.05),
    ),
    "interleaved": (
        Job(places=Places(dp=4, pp=4, vpp=2), num_microbatches=4, num_layers=1, layer_ms=5.0),
        Job(places=Places(dp=2, pp=4, tp=4, vpp=2), num_microbatches=4, num_layers=1),
    ),
    "cp": (
        Job(places=Places(dp=4, cp=4), num_layers=2),
        Job(places=Places(dp=2, cp=2, pp=4), num_microbatches=6),
    ),
    "ep": (
        Job(places=Places(dp=8, ep=4), num_layers=3, routing_noise=0.05),
        Job(places=Places(dp=8, ep=8, pp=2), num_microbatches=4, routing_noise=0.1),
    ),
    "large": (
        Job(places=Places(dp=16, pp=8), num_microbatches=6, num_layers=1, num_steps=8),
        Job(places=Places(dp=8, pp=4, tp=8), num_microbatches=4, num_layers=1, num_steps=8),
    ),
}

FACTORS = (1.1, 1.15, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run with its faults."""

    number: int
    family: str
    cause: str
    job: Job
    faults: tuple[Fault, ...]
    is_throttle_sampled: bool = False
    clock_off_ns: int = 0
    clock_error_ns: int | None = 0
    """None if clocks were not measured."""


def case_of(number: int, cause: str, family: str | None = None) -> Case:
    """Return a case; equal numbers give equal cases."""
    rng = np.random.default_rng((number, 7))
    chosen = family or str(rng.choice([name for name in JOBS if name != "large"]))
    jobs = JOBS[chosen]
    job = jobs[int(rng.integers(len(jobs)))]
    mode = rng.choice(["device", "ahead", "bounds", "host", "bare"])
    job = replace(
        job,
        seed=number,
        is_device=mode not in ("host", "bare"),
        synchronised=mode != "ahead",
        as_bounds=mode == "bounds",
        records_waits=mode != "bare" or job.sharded or job.places.cp > 1 or job.places.pp > 1,
        tp_traced=bool(rng.random() < 0.75),
        noise=float(rng.choice([0.01, 0.02, 0.03])),
        rank_spread=float(rng.choice([0.003, 0.01])),
        link_noise=float(rng.choice([0.02, 0.05])),
        warm_up=float(rng.choice([1.0, 1.6, 3.0])),
        checkpoint_every=int(rng.choice([0, 0, 4])),
        records_checkpoints=bool(rng.random() < 0.5),
        evaluate_every=int(rng.choice([0, 0, 5])),
    )
    if cause == "healthy" and rng.random() < 0.4:
        job = replace(
            job,
            length_spread=float(rng.choice([0.03, 0.05])),
            records_lengths=bool(rng.random() < 0.5),
        )
    clock = rng.choice(["one", "measured", "unmeasured"])
    case = Case(
        number=number,
        family=chosen,
        cause=cause,
        job=job,
        faults=(),
        clock_off_ns={"one": 0, "measured": 100_000, "unmeasured": 1_000_000}[str(clock)],
        clock_error_ns={"one": 0, "measured": 200_000, "unmeasured": None}[str(clock)],
    )
    return MAKERS[cause](case, rng) if cause in MAKERS else case


def _phase(job: Job, rng: np.random.Generator) -> dict[str, Any]:
    first = int(rng.choice([0, 3, 4]))
    last = int(rng.choice([job.num_steps - 1, min(first + 4, job.num_steps - 1)]))
    return {"first": first, "last": last}


def _rank(job: Job, rng: np.random.Generator) -> int:
    return int(rng.integers(job.places.world_size))


def _slow_rank(case: Case, rng: np.random.Generator) -> Case:
    fault = Fault(
        cause="slow-compute", how="compute", ranks=(_rank(case.job, rng),),
        factor=float(rng.choice(FACTORS)), **_phase(case.job, rng),
    )  # fmt: skip
    return replace(case, faults=(*case.faults, fault))


def _throttled(case: Case, rng: np.random.Generator) -> Case:
    slow = _slow_rank(case, rng)
    faults = (*slow.faults[:-1], replace(slow.faults[-1], cause="clock-throttle", first=3))
    return replace(slow, faults=faults, is_throttle_sampled=True)


def _on_several_hosts(case: Case) -> Case:
    places = case.job.places
    while places.world_size <= places.ranks_per_host:
        places = replace(places, dp=places.dp * 4)
    return replace(case, job=replace(case.job, places=places))


def _slow_host(case: Case, rng: np.random.Generator) -> Case:
    case = _on_several_hosts(case)
    places = case.job.places
    host = places.host(_rank(case.job, rng))
    ranks = tuple(r for r in range(places.world_size) if places.host(r) == host)
    fault = Fault(
        cause="slow-compute", how="compute", ranks=ranks,
        factor=float(rng.choice(FACTORS)), **_phase(case.job, rng) | {"first": 4},
    )  # fmt: skip
    return replace(case, faults=(*case.faults, fault))


def _slow_pair(case: Case, rng: np.random.Generator) -> Case:
    places = case.job.places
    rank = _rank(case.job, rng)
    axis = next(axis for axis in ("pp", "cp", "dp") if getattr(places, axis) > 1)
    members = places.group(axis, rank).members
    at = members.index(rank)
    other = members[at + 1] if at + 1 < len(members) else members[at - 1]
    fault = Fault(
        cause="slow-link", how="pair", ranks=tuple(sorted((rank, other))),
        factor=float(rng.choice((1.5, 2.0, 3.0, 6.0))), **_phase(case.job, rng),
    )  # fmt: skip
    return replace(case, faults=(*case.faults, fault))


def _slow_nic(case: Case, rng: np.random.Generator) -> Case:
    fault = Fault(
        cause="slow-link", how="nic", ranks=(_rank(case.job, rng),),
        factor=float(rng.choice((1.5, 2.0, 3.0, 6.0))), **_phase(case.job, rng),
    )  # fmt: skip
    return replace(case, faults=(*case.faults, fault))


def _network(case: Case, rng: np.random.Generator) -> Case:
    # A job on one host has no network.
    case = _on_several_hosts(case)
    first = int(rng.choice([3, 4]))
    fault = Fault(
        cause="network-degradation", how="network", first=first, last=first + 4,
        factor=float(rng.choice((1.3, 1.6, 2.5))),
    )  # fmt: skip
    return replace(case, faults=(*case.faults, fault))


def _data(case: Case, rng: np.random.Generator) -> Case:
    one = rng.random() < 0.6
    fault = Fault(
        cause="data-stall", how="data", ranks=(_rank(case.job, rng),) if one else (),
        ms=float(rng.choice([40, 80, 200])), has_spans=bool(rng.random() < 0.5), **_phase(case.job,
        rng),
    )  # fmt: skip
    return replace(case, faults=(*case.faults, fault))


def _host(case: Case, rng: np.random.Generator) -> Case:
    job = case.job
    span_ms = job.num_layers * job.layer_ms
    ms = span_ms * (3.0 if job.is_device else float(rng.choice([0.3, 0.6])))
    fault = Fault(
        cause="host-stall", how="host", ranks=(_rank(job, rng),), ms=ms, **_phase(job, rng)
    )
    return replace(case, faults=(*case.faults, fault))


def _pauses(case: Case, rng: np.random.Generator) -> Case:
    job = case.job
    share = 12 / (job.places.world_size * job.num_microbatches * job.places.vpp * job.num_steps)
    fault = Fault(
        cause="gc-pause", how="gc", share=share, ms=float(rng.choice([150, 300])),
        has_spans=bool(rng.random() < 0.5),
    )  # fmt: skip
    return replace(case, faults=(*case.faults, fault))


def _skew(case: Case, rng: np.random.Generator) -> Case:
    members = case.job.places.group("dp", _rank(case.job, rng)).members
    fault = Fault(
        cause="launch-skew", how="skew", ranks=members, ms=float(rng.choice([60, 120])), first=1
    )
    # A host that runs ahead of its device hides its pauses, so in this job the host computes.
    return replace(case, job=replace(case.job, is_device=False), faults=(*case.faults, fault))


def _stage(case: Case, rng: np.random.Generator) -> Case:
    places = case.job.places
    stage = int(rng.integers(places.pp))
    ranks = tuple(r for r in range(places.world_size) if places.coords(r).pp == stage)
    fault = Fault(
        cause="stage-imbalance", how="compute", ranks=ranks, factor=float(rng.choice(FACTORS[1:]))
    )
    return replace(case, faults=(*case.faults, fault))


def _last_stage(case: Case, rng: np.random.Generator) -> Case:
    places = case.job.places
    ranks = tuple(r for r in range(places.world_size) if places.coords(r).pp == places.pp - 1)
    factor = float(rng.choice((1.3, 1.6, 2.0)))
    fault = Fault(cause="stage-imbalance", how="last stage", ranks=ranks, factor=factor)
    job = replace(case.job, last_stage=1 + (factor - 1) * places.vpp)
    return replace(case, job=job, faults=(*case.faults, fault))


def _sequences(case: Case, rng: np.random.Generator) -> Case:
    spread = float(rng.choice([0.4, 0.7]))
    job = replace(case.job, length_spread=spread, records_lengths=bool(rng.random() < 0.5))
    return replace(case, job=job, faults=(*case.faults, Fault(cause="sequence-imbalance", how="")))


def _experts(case: Case, rng: np.random.Generator) -> Case:
    fault = Fault(
        cause="sequence-imbalance", how="experts", ranks=(_rank(case.job, rng),),
        factor=float(rng.choice([1.5, 2.0, 3.0])),
    )  # fmt: skip
    return replace(case, faults=(*case.faults, fault))


def _several(case: Case, rng: np.random.Generator) -> Case:
    kinds = rng.choice(len(TOGETHER), size=int(rng.integers(2, 4)), replace=False)
    for kind in kinds:
        case = TOGETHER[int(kind)](case, rng)
    return case


TOGETHER: tuple[Callable[[Case, np.random.Generator], Case], ...] = (
    _slow_rank, _slow_pair, _data, _host, _throttled,
)  # fmt: skip

MAKERS: dict[str, Callable[[Case, np.random.Generator], Case]] = {
    "slow rank": _slow_rank,
    "throttle": _throttled,
    "slow host": _slow_host,
    "slow pair": _slow_pair,
    "slow nic": _slow_nic,
    "network": _network,
    "data": _data,
    "host": _host,
    "gc": _pauses,
    "skew": _skew,
    "stage": _stage,
    "last stage": _last_stage,
    "sequences": _sequences,
    "experts": _experts,
    "several": _several,
}

FAMILIES_OF = {
    "stage": ("pp", "interleaved"),
    "last stage": ("pp", "interleaved"),
    "experts": ("ep",),
    "skew": ("ddp", "pp"),
    "network": ("pp", "ddp", "fsdp"),
    "slow nic": ("pp",),
    "slow host": ("pp", "ddp", "fsdp"),
}
