"""A loop of accelerate, with gradients accumulated over two batches.

rankscope run accelerate launch --multi_gpu --num_processes 4 accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from tiny_gpt import NUM_STEPS, Texts, TinyGPT
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=2)
model = TinyGPT()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(Texts(), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for index, tokens in enumerate(loader):
    if index == 2 * NUM_STEPS:
        break
    with accelerator.accumulate(model):
        loss = model(tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if index % 10 == 0:
        accelerator.print(index, accelerator.gather(loss.detach()[None]).mean().item())
accelerator.end_training()
