"""DistributedDataParallel, with batches that the script makes itself."""

import torch
import torch.distributed as dist
from tiny import NUM_STEPS, TinyGPT, get_batch, loss_of
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(TinyGPT())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(NUM_STEPS):
    tokens, targets = get_batch()
    optimizer.zero_grad()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(step, loss.item())
dist.destroy_process_group()
