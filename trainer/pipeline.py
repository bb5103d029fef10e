"""The pipeline of a rank: its stages with their faults and segments, and the schedule."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from .config import Overlap, PipelineSchedule
from .model import token_loss
from .segments import BackwardPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .config import TrainerConfig
    from .faults.rank_faults import RankFaults
    from .model import Stage
    from .segments import StageSegments

CLASSES = {
    PipelineSchedule.ONE_F_ONE_B: "Schedule1F1B",
    PipelineSchedule.INTERLEAVED: "ScheduleInterleaved1F1B",
    PipelineSchedule.ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    PipelineSchedule.ZBV: "ScheduleZBVZeroBubble",
    PipelineSchedule.DUALPIPEV: "ScheduleDualPipeV",
}
"""Classes of `torch.distributed.pipelining`; older versions of torch have only some of them."""


class TrainedStage(PipelineStage):
    """A pipeline stage that applies the faults of its rank before it launches work."""

    faults: RankFaults
    segments: StageSegments | None
    reduces_early: bool
    """Whether gradients are reduced behind the last backward, not after it."""

    prefetch: Callable[[], None]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run one forward."""
        self.faults.before_forward(fwd_chunk_id, stage=self.stage_index)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Run one backward, or the part of it that computes the gradient of the input."""
        self.faults.before_backward(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Compute the gradients of the weights; on the first stage, which has no input, all."""
        self.faults.before_backward(bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self,
        backward_type: str,
        bwd_kwargs: dict[str, Any],
        last_backward: bool = False,  # noqa: FBT001, FBT002 - as of the base
    ) -> Any:  # noqa: ANN401
        """Run a part of a backward, with its segments."""
        compute = functools.partial(
            super().backward_maybe_with_nosync, backward_type, bwd_kwargs, last_backward
        )
        if (
            self.reduces_early
            and last_backward
            and backward_type == BackwardPart.FULL
            and isinstance(self.submod, FSDPModule)
        ):
            compute = functools.partial(self._backward_and_reduce, self.submod, bwd_kwargs)
        if self.segments is None:
            return compute()
        return self.segments.backward(BackwardPart(backward_type), compute)

    def _backward_and_reduce(self, module: FSDPModule, of: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the last backward, in which FSDP reduces the gradients of each module at its end."""
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(True)
        return stage_backward(of["stage_output"], of["output_grads"], of["input_values"]), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the step's gradients, and read the next batch meanwhile."""
        self.prefetch()
        self.faults.before_reduction()
        super().perform_reduce_grad(grad_scale_factor)


def build_schedule(  # noqa: PLR0913 - what a stage calls
    stages: Sequence[Stage],
    config: TrainerConfig,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    faults: RankFaults,
    segments: Sequence[StageSegments | None],
    prefetch: Callable[[], None],
) -> Any:  # noqa: ANN401 - of one of two private bases
    """Return the schedule of this rank's stages.

    Shapes are given, so that no rank runs an extra forward to infer them.
    """
    model, layout = config.model, config.layout
    num_rows = num_sent = config.rows_per_microbatch
    tokens = torch.empty(
        config.microbatch_size, model.seq_length // layout.cp, dtype=torch.int64, device=device
    )
    if config.sequence_parallel:
        num_rows //= layout.tp
    if config.sequence_parallel or config.scatter_gather:
        num_sent //= layout.tp
    hidden, logits = (
        torch.empty(*shape, device=device, requires_grad=True)
        for shape in ((num_sent, model.hidden_size), (num_rows, model.vocab_size))
    )
    rows, scale = stages[0].rows, loss_scale(config)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss(output, targets.flatten()[rows]) * scale

    trained = []
    for number, stage, timed in zip(
        config.stages_of(mesh["pp"].get_local_rank()), stages, segments, strict=True
    ):
        pipeline_stage = TrainedStage(
            stage,
            number,
            config.num_stages,
            device,
            input_args=tokens if number == 0 else hidden,
            output_args=logits if number == config.num_stages - 1 else hidden,
            group=mesh.get_group("pp"),
        )
        pipeline_stage.faults = faults
        pipeline_stage.segments = timed
        pipeline_stage.reduces_early = Overlap.DP in config.overlap
        pipeline_stage.prefetch = prefetch
        trained.append(pipeline_stage)
    num = config.num_microbatches
    schedule: Any
    if Overlap.PP in config.overlap and not config.schedule.has_chunks:
        runtime: Any = _PipelineScheduleRuntime
        schedule = runtime(trained, num, loss_fn=loss, scale_grads=False)
        schedule._prepare_schedule_with_comms(order_1f1b(config.layout.pp, num))
    else:
        schedule_class: Any = getattr(pipelining, CLASSES[config.schedule])
        of_rank: Any = trained if config.schedule.has_chunks else trained[0]
        schedule = schedule_class(of_rank, num, loss_fn=loss, scale_grads=False)
    if Overlap.DP in config.overlap and isinstance(schedule, _PipelineScheduleRuntime):
        # Weights are on their way since the step began; each module waits for its own.
        schedule.register_custom_function(
            _ComputationType.UNSHARD,
            lambda action, context: context.schedule_ref.unsharded_stages.add(action.stage_index),
        )
    return schedule


def order_1f1b(num_stages: int, num_microbatches: int) -> dict[int, list[_Action]]:
    """Return the work of each stage in the order of 1F1B, by rank."""
    order = {}
    for stage in range(num_stages):
        forward, backward = (
            [_Action(stage, kind, number) for number in range(num_microbatches)]
            for kind in (_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD)
        )
        ahead = num_stages - 1 - stage
        pairs = zip(forward[ahead:], backward, strict=False)
        order[stage] = [
            *forward[:ahead],
            *itertools.chain.from_iterable(pairs),
            *backward[num_microbatches - ahead :],
        ]
    return order


def loss_scale(config: TrainerConfig) -> float:
    """Return the factor on the loss of a rank's rows before its backward.

    The gradients of a step's micro-batches are summed. With sequence parallelism the ranks of a tp
    group have different rows, and the gradients of the group are summed too.
    """
    num_parts = config.layout.tp if config.sequence_parallel else 1
    return 1 / (num_parts * config.num_microbatches)
