"""The training loop of one rank: setup, steps, gradient clipping."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from rankscope import tracer
from rankscope.tracer.span import SpanKind

from .data import iter_batches
from .faults.rank_faults import RankFaults
from .faults.spec import COMPUTE_CAUSES
from .model import Stage, initialize
from .pace import MonotonicPaceClock, PacedSegments, StretchedSegments
from .parallel import build_schedule, parameter_groups, shard_stage
from .segments import time_optimizer, time_segments
from .tracing import note_microbatches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import Schedule1F1B

    from rankscope.tracer.topology import Layout

    from .config import TrainerConfig
    from .data import Batch
    from .pace import SegmentTimer


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
    is_first_stage: bool
    is_last_stage: bool
    stage: Stage
    schedule: Schedule1F1B
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    timer: SegmentTimer
    faults: RankFaults


def warm_up(state: RankState, batch: Batch) -> None:
    """Run a step that changes neither weights nor optimizer nor the counts of the timer.

    The first step fills caches of DTensor, opens connections and creates the optimizer's state:
    as a normal step it would look slow. All ranks must call this.

    Args:
        state: This rank.
        batch: Any batch of the right shape.
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
    config = state.config
    state.faults.begin_step(step)

    # As of a loader that the tracer does not know, the input may have no span.
    is_recorded = state.faults.records_input
    with tracer.span("next batch", kind=SpanKind.DATA) if is_recorded else nullcontext():
        batch = next(state.batches)
        state.faults.read_input()
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
    totals = clip_gradients(
        state.stage.parameters(),
        max_norm=config.max_gradient_norm,
        layout=config.layout,
        loss_share=loss_share,
    )
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
    if not losses:
        return torch.zeros((), device=batch.tokens.device)
    layout = state.config.layout
    return torch.stack(losses).detach().mean() / (layout.dp * layout.tp)


def build_rank(
    config: TrainerConfig, *, rank: int, mesh: DeviceMesh, device: torch.device
) -> RankState:
    """Return the state of a rank: sharded stage, schedule, optimizer, data and timer."""
    stage_number = mesh["pp"].get_local_rank()
    stage = Stage(config.model, stage=stage_number, num_stages=config.layout.pp)
    initialize(stage, seed=config.seed)
    stage.to(device)
    shard_stage(stage, mesh)
    optimizer = torch.optim.AdamW(parameter_groups(stage), lr=config.learning_rate, fused=True)
    timer = _attach_timer(stage, optimizer, config, rank=rank)
    faults = RankFaults(config, rank=rank, stage=stage, timer=timer)
    return RankState(
        config=config,
        rank=rank,
        is_first_stage=stage_number == 0,
        is_last_stage=stage_number == config.layout.pp - 1,
        stage=stage,
        schedule=build_schedule(stage, config, mesh=mesh, device=device, faults=faults),
        optimizer=optimizer,
        batches=iter_batches(config, dp_position=mesh["dp"].get_local_rank(), device=device),
        timer=timer,
        faults=faults,
    )


def _attach_timer(
    stage: Stage, optimizer: torch.optim.Optimizer, config: TrainerConfig, *, rank: int
) -> SegmentTimer:
    """Return the timer of this rank's segments.

    The model gets no hooks if the run is not paced and no fault slows this rank.
    """
    clock = MonotonicPaceClock()
    timer: SegmentTimer
    if config.pace_ms is not None:
        timer = PacedSegments(pace_ns=round(config.pace_ms * 1e6), clock=clock)
    else:
        timer = StretchedSegments(clock=clock)
        if not any(
            fault.cause in COMPUTE_CAUSES and rank in fault.culprits(config.layout)
            for fault in config.faults
        ):
            return timer
    time_segments(stage, timer)
    time_optimizer(optimizer, timer)
    return timer


class StepTotals(NamedTuple):
    """Result of the last collective of a step, equal on all ranks."""

    gradient_norm: float
    """Norm of the whole model's gradient before clipping."""

    loss: float
    """Mean over all tokens of the step, in nats."""


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    *,
    max_norm: float,
    layout: Layout,
    loss_share: torch.Tensor,
) -> StepTotals:
    """Scale all gradients so that the norm over the whole model is at most ``max_norm``.

    One all-reduce over all ranks. Each rank sums the squares of its shards, each divided by the
    number of ranks that hold a copy of it.

    Args:
        parameters: This rank's parameters; those without a gradient are skipped.
        max_norm: Largest norm that is not scaled.
        layout: The job's layout.
        loss_share: Scalar; the shares of all ranks sum to the step's loss.
    """
    gradients: list[torch.Tensor] = []
    total = torch.zeros(2, dtype=torch.float64, device=loss_share.device)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        num_copies = layout.dp * layout.tp // _num_shards(parameter.grad)
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
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
        if isinstance(place, Shard)
    )
