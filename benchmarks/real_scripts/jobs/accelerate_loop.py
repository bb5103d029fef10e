"""A loop with accelerate: a prepared loader, accumulation of gradients, gathered losses."""

import torch
from accelerate import Accelerator
from tiny import BATCH_SIZE, NUM_STEPS, Texts, TinyGPT, loss_of
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = TinyGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Texts(8 * NUM_STEPS * BATCH_SIZE), batch_size=BATCH_SIZE, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for index, batch in enumerate(loader):
    if index == 2 * NUM_STEPS:
        break
    with accelerator.accumulate(model):
        loss = loss_of(model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if index % 10 == 0:
        mean = accelerator.gather(loss.detach()[None]).mean()
        accelerator.print(index, mean.item())
accelerator.end_training()
