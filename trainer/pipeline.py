"""The pipeline of a rank: its stages with their faults and segments, and the schedule."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from .config import PipelineSchedule
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

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run a part of a backward, with its segments."""
        compute = functools.partial(
            super().backward_maybe_with_nosync, backward_type, *args, **kwargs
        )
        if self.segments is None:
            return compute()
        return self.segments.backward(BackwardPart(backward_type), compute)

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

    Args:
        stages: The chunks of this rank, sharded.
        config: Settings.
        mesh: The mesh, of which the axis ``pp`` is the pipeline.
        device: Device of this rank.
        faults: Faults of this rank.
        segments: Those of each stage, None if they are not timed.
        prefetch: Begins to read the next batch.
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
        pipeline_stage.prefetch = prefetch
        trained.append(pipeline_stage)
    schedule_class: Any = getattr(pipelining, CLASSES[config.schedule])
    of_rank: Any = trained if config.schedule.has_chunks else trained[0]
    return schedule_class(of_rank, config.num_microbatches, loss_fn=loss)


def loss_scale(config: TrainerConfig) -> float:
    """Return the factor on the loss of a rank's rows before its backward.

    With sequence parallelism the ranks of a tp group have different rows, and the gradients of the
    group are summed.
    """
    return 1 / config.layout.tp if config.sequence_parallel else 1.0
