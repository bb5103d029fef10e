"""A rank, see `ranks`, that saves gradients, losses and norms of its first steps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rankscope.trainer.__main__ import _config, _parser
from rankscope.trainer.loop import build_rank, forward_backward, train
from rankscope.trainer.parallel import build_meshes, join_job, pick_device

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUM_STEPS = 3


def main(rank: int, world: int, folder: Path, flags: Sequence[str]) -> None:
    """Write ``RANK.pt``: gradients by name; losses and norms of the next steps."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    args = _parser().parse_args([*flags, "--steps", str(NUM_STEPS)])
    config = _config(args, world_size=world)
    device = pick_device()
    join_job(device)
    state = build_rank(config, rank=rank, meshes=build_meshes(config, device), device=device)
    forward_backward(state, state.loader.next_batch())
    gradients = {}
    for name, parameter in state.stage.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
        gradients[name.partition(".")[2]] = whole.detach()
    state.optimizer.zero_grad()
    reports = [(report.loss, report.gradient_norm) for report in train(state)]
    torch.save({"gradients": gradients, "reports": reports}, folder / f"{rank}.pt")
    dist.destroy_process_group()
