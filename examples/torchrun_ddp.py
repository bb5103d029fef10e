"""DistributedDataParallel under torchrun.

rankscope run torchrun --standalone --nproc-per-node 4 torchrun_ddp.py
"""

import torch
import torch.distributed as dist
from tiny_gpt import NUM_STEPS, Texts, TinyGPT
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
model = DistributedDataParallel(TinyGPT())
optimizer = torch.optim.AdamW(model.parameters())
texts = Texts()
loader = DataLoader(texts, batch_size=8, sampler=DistributedSampler(texts))
for step, tokens in enumerate(loader):
    if step == NUM_STEPS:
        break
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
