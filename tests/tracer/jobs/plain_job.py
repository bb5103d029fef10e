"""A training script without any call of the tracer: DDP on gloo, a loader, 3 steps."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def train(num_steps: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.arange(num_steps * 2 * 4).remainder(16).reshape(num_steps * 2, 4)
    loader: DataLoader[torch.Tensor] = DataLoader(samples, batch_size=2)  # type: ignore[arg-type]
    for tokens in loader:
        optimizer.zero_grad()
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sys.stdout.write(f"{dist.get_rank()} {float(loss.item()).hex()}\n")


def main(num_steps: int) -> None:
    dist.init_process_group("gloo")
    train(num_steps)
    gc.collect()  # the model keeps the group alive, whose threads should end before Python does
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
