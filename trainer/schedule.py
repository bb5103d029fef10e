"""The step's order of micro-batches: 1F1B, which on one stage is plain accumulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from trainer.model import token_loss

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.config import TrainerConfig
    from trainer.model import Stage


def build_schedule(
    stage: Stage, config: TrainerConfig, *, mesh: DeviceMesh, device: torch.device
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
    pipeline_stage = PipelineStage(
        stage,
        stage_number,
        config.layout.pp,
        device,
        input_args=tokens if stage_number == 0 else hidden,
        output_args=logits if is_last else hidden,
        group=mesh.get_group("pp"),
    )
    return Schedule1F1B(pipeline_stage, config.num_microbatches, loss_fn=token_loss)
