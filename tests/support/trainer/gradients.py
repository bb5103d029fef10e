"""A rank that saves gradients, losses and norms of its first steps: ``gradients FOLDER FLAGS``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rankscope.trainer.__main__ import _config, _parser
from rankscope.trainer.loop import build_rank, forward_backward, train
from rankscope.trainer.parallel import build_meshes, join_job, pick_device

NUM_STEPS = 3


def main() -> None:
    """Write ``RANK.pt``: gradients by name; losses and norms of the next steps."""
    folder, *flags = sys.argv[1:]
    rank = int(os.environ.get("RANK", "0"))
    args = _parser().parse_args([*flags, "--steps", str(NUM_STEPS)])
    config = _config(args, world_size=int(os.environ.get("WORLD_SIZE", "1")))
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
    torch.save({"gradients": gradients, "reports": reports}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
