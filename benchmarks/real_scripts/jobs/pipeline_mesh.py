"""A pipeline of two stages with data parallelism by DDP, over a mesh with names."""

import torch
import torch.distributed as dist
from tiny import BATCH_SIZE, NUM_LAYERS, NUM_STEPS, TinyGPT, get_batch, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

NUM_STAGES = 2

mesh = init_device_mesh("cpu", (NUM_STAGES, 2), mesh_dim_names=("pp", "dp"))
index = mesh["pp"].get_local_rank()
whole = TinyGPT()
half = NUM_LAYERS // NUM_STAGES
layers = list(whole.layers)[index * half : (index + 1) * half]
part = nn.Sequential(whole.embed, *layers) if index == 0 else nn.Sequential(*layers, whole.head)
model = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
stage = PipelineStage(model, index, NUM_STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
schedule = Schedule1F1B(stage, n_microbatches=BATCH_SIZE, loss_fn=loss_of)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(NUM_STEPS):
    torch.manual_seed(step * 100 + mesh["dp"].get_local_rank())
    tokens, targets = get_batch()
    if index == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=targets)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
