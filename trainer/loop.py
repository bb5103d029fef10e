"""The training loop: one step reads from top to bottom."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankscope import tracer
from rankscope.tracer.span import SpanKind

from .gradients import clip_gradients
from .tracing import note_microbatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.pipelining import Schedule1F1B

    from .config import TrainerConfig
    from .data import Batch
    from .faults.planted import PlantedFaults
    from .gradients import StepTotals
    from .model import Stage
    from .pace import SegmentTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step came to; loss and norm are the whole job's, the time is this rank's."""

    step: int
    loss: float
    gradient_norm: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Everything of one rank that a step works on."""

    config: TrainerConfig
    rank: int
    is_first_stage: bool
    is_last_stage: bool
    stage: Stage
    schedule: Schedule1F1B
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    timer: SegmentTimer
    planted: PlantedFaults


def warm_up(state: RankState, batch: Batch) -> None:
    """Run a step that leaves weights, optimizer and the timer's counts as they were.

    The first step fills DTensor's caches, opens connections and makes the
    optimizer's state: were it counted, it would look slow.

    Args:
        state: This rank; all ranks must call.
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


def train(state: RankState) -> Iterator[StepReport]:
    """Train ``config.num_steps`` steps, yielding after each; weights change in place."""
    begin_s = time.monotonic()
    for step in range(state.config.num_steps):
        report = train_step(state, step, begin_s=begin_s)
        begin_s += report.duration_s
        yield report


def train_step(state: RankState, step: int, *, begin_s: float) -> StepReport:
    """Train on one batch."""
    config = state.config
    state.planted.begin_step(step)

    with tracer.span("next batch", kind=SpanKind.DATA):
        batch = next(state.batches)
        state.planted.read_input(in_span=True)
    state.planted.read_input(in_span=False)
    note_microbatches(config, state.planted.documents)

    totals = _forward_backward_update(state, batch)
    state.planted.after_update(state.optimizer)

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
    """Run the step's micro-batches and leave the averaged gradients in the parameters.

    Returns:
        This rank's share of the loss: a scalar; the shares of all ranks sum to
        the mean over the step's tokens.
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
