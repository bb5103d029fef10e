"""FSDP2, as in PyTorch's own example: batches of random tokens, no loader."""

import os

import torch
import torch.distributed as dist
from tiny import NUM_STEPS, TinyGPT, get_batch, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
model = TinyGPT()
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(NUM_STEPS):
    tokens, targets = get_batch()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
