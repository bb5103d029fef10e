"""The training loop of one rank: setup, steps, gradient clipping."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rankscope import tracer
from rankscope.tracer.span import SpanKind

from .config import DataSource, Overlap, coords_of
from .data import Loader
from .faults.rank_faults import RankFaults
from .faults.spec import COMPUTE_CAUSES
from .model import Stage, compile_kernels, initialize, set_kernels
from .optimizer import build_optimizer
from .overlap import EarlyReduction, gather_ahead
from .pace import MonotonicPaceClock, PacedSegments, StretchedSegments
from .parallel import (
    finish_gradients,
    is_of_expert,
    keep_own_experts,
    local_part,
    reduces_early,
    shard_stage,
)
from .pipeline import build_schedule, loss_scale
from .segments import StageSegments, time_optimizer
from .tracing import note_microbatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .config import TrainerConfig
    from .data import Batch
    from .pace import SegmentTimer
    from .parallel import Meshes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Result of one step: loss and norm of the whole job, duration on this rank."""

    step: int
    loss: float
    gradient_norm: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """State of one rank."""

    config: TrainerConfig
    rank: int
    meshes: Meshes
    is_first_stage: bool
    is_last_stage: bool
    stage: nn.ModuleList
    """The rank's part of the model, one `Stage` for each chunk."""

    schedule: Any
    """Of `torch.distributed.pipelining`."""

    optimizer: torch.optim.Optimizer
    loader: Loader
    timer: SegmentTimer
    faults: RankFaults
    reduction: EarlyReduction | None = None


def warm_up(state: RankState, batch: Batch) -> None:
    """Run a step that changes neither weights nor optimizer nor the counts of the timer.

    The first step fills caches of DTensor, opens connections and creates the optimizer's state:
    as a normal step it would look slow. All ranks must call this.
    """
    rates = [group["lr"] for group in state.optimizer.param_groups]
    for group in state.optimizer.param_groups:
        group["lr"] = 0.0
    _forward_backward_update(state, batch)
    for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    state.optimizer.state.clear()
    state.timer.reset_counts()


def train(state: RankState, first_step: int = 0) -> Iterator[StepReport]:
    """Train up to ``config.num_steps`` and yield the report of each step."""
    begin_s = time.monotonic()
    for step in range(first_step, state.config.num_steps):
        report = train_step(state, step, begin_s=begin_s)
        begin_s += report.duration_s
        yield report


def train_step(state: RankState, step: int, *, begin_s: float) -> StepReport:
    """Train on one batch."""
    config, loader = state.config, state.loader
    state.faults.begin_step(step)
    if Overlap.DP in config.overlap:
        gather_ahead(state.stage)

    # As of a loader that the tracer does not know, the input may have no span.
    is_recorded = state.faults.records_input and config.data is DataSource.SYNTHETIC
    with tracer.span("next batch", kind=SpanKind.DATA) if is_recorded else nullcontext():
        state.faults.read_input()
        sequences = loader.read()
    batch = loader.share(sequences)
    note_microbatches(config, state.faults.documents)

    totals = _forward_backward_update(state, batch)
    state.faults.after_update(state.optimizer)

    tracer.step(
        tokens=config.num_tokens_per_position, loss=totals.loss if state.is_last_stage else None
    )
    return StepReport(
        step=step,
        loss=totals.loss,
        gradient_norm=totals.gradient_norm,
        duration_s=time.monotonic() - begin_s,
    )


def _forward_backward_update(state: RankState, batch: Batch) -> StepTotals:
    config = state.config
    loss_share = forward_backward(state, batch)
    totals = clip_gradients(state.stage, config, loss_share=loss_share)
    state.optimizer.step()
    state.optimizer.zero_grad()
    return totals


def forward_backward(state: RankState, batch: Batch) -> torch.Tensor:
    """Run the micro-batches of a step; afterwards the parameters hold the averaged gradients.

    Returns:
        This rank's share of the loss, a scalar; the shares of all ranks sum to the mean over the
        tokens of the step.
    """
    losses: list[torch.Tensor] = []
    state.schedule.step(
        *((batch.tokens,) if state.is_first_stage else ()),
        target=batch.targets if state.is_last_stage else None,
        losses=losses if state.is_last_stage else None,
        return_outputs=False,
    )
    if state.reduction is not None:
        state.reduction.finish()
    finish_gradients(state.stage, state.config, state.meshes)
    if not losses:
        return torch.zeros((), device=batch.tokens.device)
    num_shares = state.config.layout.world_size // state.config.layout.pp
    return torch.stack(losses).detach().mean() / (num_shares * loss_scale(state.config))


def build_rank(
    config: TrainerConfig, *, rank: int, meshes: Meshes, device: torch.device
) -> RankState:
    """Return the state of a rank: sharded stages, schedule, optimizer, data and timer."""
    coords = coords_of(rank, config.layout)
    numbers = config.stages_of(coords.pp)
    reduction = EarlyReduction() if reduces_early(config, device) else None
    stages = [Stage(config.model, stage=number, num_stages=config.num_stages) for number in numbers]
    for stage in stages:
        if meshes.experts is not None:
            keep_own_experts(stage, config, ep=coords.ep)
        initialize(stage, seed=config.seed)
        stage.to(device)
        if config.fused:
            set_kernels(stage, compile_kernels())
        shard_stage(stage, config, meshes, reduction)
    whole = nn.ModuleList(stages)
    optimizer = build_optimizer(whole, config)
    timer, segments = _attach_timer(stages, optimizer, config, rank=rank)
    faults = RankFaults(config, rank=rank, stage=whole, timer=timer)
    loader = Loader(
        config,
        coords=coords,
        device=device,
        group=meshes.mesh.get_group("tp") if config.layout.tp > 1 else None,
    )
    return RankState(
        config=config,
        rank=rank,
        meshes=meshes,
        is_first_stage=0 in numbers,
        is_last_stage=config.num_stages - 1 in numbers,
        stage=whole,
        schedule=build_schedule(
            stages,
            config,
            mesh=meshes.mesh,
            device=device,
            faults=faults,
            segments=segments,
            prefetch=loader.prefetch,
        ),
        optimizer=optimizer,
        loader=loader,
        timer=timer,
        faults=faults,
        reduction=reduction,
    )


def _attach_timer(
    stages: list[Stage], optimizer: torch.optim.Optimizer, config: TrainerConfig, *, rank: int
) -> tuple[SegmentTimer, list[StageSegments | None]]:
    """Return the timer of this rank's segments, and those of each stage.

    The model gets no hooks if the run is not paced and no fault slows this rank.
    """
    clock = MonotonicPaceClock()
    timer: SegmentTimer
    if config.pace_ms is not None:
        timer = PacedSegments(pace_ns=round(config.pace_ms * 1e6), clock=clock)
    else:
        timer = StretchedSegments(clock)
        if not any(
            fault.cause in COMPUTE_CAUSES and rank in fault.culprits(config.layout)
            for fault in config.faults
        ):
            return timer, [None] * len(stages)
    time_optimizer(optimizer, timer)
    return timer, [StageSegments(stage, timer) for stage in stages]


class StepTotals(NamedTuple):
    """Result of the last collective of a step, equal on all ranks."""

    gradient_norm: float
    """Norm of the whole model's gradient before clipping."""

    loss: float
    """Mean over all tokens of the step, in nats."""


def clip_gradients(
    stage: nn.Module, config: TrainerConfig, *, loss_share: torch.Tensor
) -> StepTotals:
    """Scale all gradients so that the norm over the whole model is at most its maximum.

    One all-reduce over all ranks. Each rank sums the squares of its shards, each divided by the
    number of ranks that hold a copy of it. Parameters without a gradient are skipped. The shares
    of the loss of all ranks sum to that of the step.
    """
    layout, max_norm = config.layout, config.max_gradient_norm
    gradients: list[torch.Tensor] = []
    total = torch.zeros(2, dtype=torch.float64, device=loss_share.device)
    for name, parameter in stage.named_parameters():
        local = local_part(parameter.grad)
        if parameter.grad is None or local is None:
            continue
        num_parts = _num_shards(parameter.grad) * (layout.ep if is_of_expert(name) else 1)
        num_copies = layout.world_size // layout.pp // num_parts
        gradients.append(local)
        total[0] += local.double().square().sum() / num_copies
    total[1] = loss_share
    dist.all_reduce(total)
    square, loss = total.tolist()
    norm = math.sqrt(square)
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    return StepTotals(norm, loss)


def _num_shards(tensor: torch.Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    sizes = tensor.device_mesh.shape
    return math.prod(
        size
        for size, place in zip(sizes, tensor.placements, strict=True)
        # FSDP and tp on one dimension make a _StridedShard, which is no Shard.
        if not place.is_replicate()
    )
