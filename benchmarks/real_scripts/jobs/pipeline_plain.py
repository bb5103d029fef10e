"""A pipeline of all ranks over the default group, without a mesh."""

import torch
import torch.distributed as dist
from tiny import BATCH_SIZE, NUM_LAYERS, NUM_STEPS, TinyGPT, get_batch, loss_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
whole = TinyGPT()
share = NUM_LAYERS // world
parts: list[nn.Module] = list(whole.layers)[rank * share : (rank + 1) * share]
if rank == 0:
    parts.insert(0, whole.embed)
if rank == world - 1:
    parts.append(whole.head)
stage = PipelineStage(nn.Sequential(*parts), rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=BATCH_SIZE, loss_fn=loss_of)
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-2)
for step in range(NUM_STEPS):
    torch.manual_seed(step)
    tokens, targets = get_batch()
    if rank == 0:
        schedule.step(tokens)
    elif rank == world - 1:
        schedule.step(target=targets)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
# The process group is left to the end of the process, as many scripts do.
