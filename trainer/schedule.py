"""The step's order of micro-batches: 1F1B, which on one stage is plain accumulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from .model import token_loss

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .config import TrainerConfig
    from .faults.planted import PlantedFaults
    from .model import Stage


class FaultyStage(PipelineStage):
    """A pipeline stage whose host does what is planted before it launches the work."""

    planted: PlantedFaults

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run one forward."""
        self.planted.before_forward(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run one backward."""
        self.planted.before_backward(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the step's gradients."""
        self.planted.before_reduction()
        super().perform_reduce_grad(grad_scale_factor)


def build_schedule(
    stage: Stage,
    config: TrainerConfig,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    planted: PlantedFaults,
) -> Schedule1F1B:
    """Return the 1F1B schedule of this rank's stage.

    Shapes are given here, so that no rank runs an extra forward to learn them.
    """
    stage_number = mesh["pp"].get_local_rank()
    is_last = stage_number == config.layout.pp - 1
    model = config.model
    tokens = torch.empty(config.microbatch_size, model.seq_length, dtype=torch.int64, device=device)
    hidden, logits = (
        torch.empty(tokens.numel(), width, device=device, requires_grad=True)
        for width in (model.hidden_size, model.vocab_size)
    )
    pipeline_stage = FaultyStage(
        stage,
        stage_number,
        config.layout.pp,
        device,
        input_args=tokens if stage_number == 0 else hidden,
        output_args=logits if is_last else hidden,
        group=mesh.get_group("pp"),
    )
    pipeline_stage.planted = planted
    return Schedule1F1B(pipeline_stage, config.num_microbatches, loss_fn=token_loss)
