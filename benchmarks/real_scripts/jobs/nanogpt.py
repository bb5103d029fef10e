"""A loop like nanoGPT's: accumulation of gradients, clipping, and evaluation now and then."""

import contextlib
import math
import os

import torch
from tiny import NUM_STEPS, TinyGPT, get_batch, loss_of
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATION_STEPS = 2
EVAL_INTERVAL, EVAL_BATCHES = 10, 4

init_process_group(backend="gloo")
rank = int(os.environ["RANK"])
is_master = rank == 0
torch.manual_seed(1337 + rank)
raw_model = TinyGPT()
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3, betas=(0.9, 0.95))
model = DDP(raw_model)


@torch.no_grad()
def estimate_loss() -> float:
    """Return the mean loss of some batches."""
    model.eval()
    losses = torch.zeros(EVAL_BATCHES)
    for k in range(EVAL_BATCHES):
        x, y = get_batch()
        losses[k] = loss_of(raw_model(x), y).item()
    model.train()
    return float(losses.mean())


def get_lr(step: int) -> float:
    """Return the learning rate: cosine decay."""
    return 1e-3 * 0.5 * (1 + math.cos(math.pi * step / NUM_STEPS))


X, Y = get_batch()
for step in range(NUM_STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    if step and step % EVAL_INTERVAL == 0 and is_master:
        print(f"step {step}: loss {estimate_loss():.4f}")
    for micro_step in range(ACCUMULATION_STEPS):
        is_last = micro_step == ACCUMULATION_STEPS - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = loss_of(model(X), Y) / ACCUMULATION_STEPS
            X, Y = get_batch()
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if is_master and step % 10 == 0:
        print(f"iter {step}: loss {loss.item() * ACCUMULATION_STEPS:.4f}")
destroy_process_group()
