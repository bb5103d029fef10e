"""Tensor parallelism within pairs of ranks, data parallelism by FSDP2 between them."""

import os

import torch
import torch.distributed as dist
from tiny import NUM_STEPS, TinyGPT, get_batch, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))
model = TinyGPT()
for layer in model.layers:
    parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(NUM_STEPS):
    torch.manual_seed(step * 100 + mesh["dp"].get_local_rank())
    tokens, targets = get_batch()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
