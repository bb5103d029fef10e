"""A job under torchrun whose rank 1 dies once, when both ranks have finished step 1."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rankscope import tracer


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store = dist.distributed_c10d._get_default_store()
    tracer.install()
    tracer.begin_steps()
    values = torch.ones(4)
    for step in range(3):
        with tracer.span("work"):
            dist.all_reduce(values)
        tracer.step()
        store.set(f"{restarts}: rank {rank} finished step {step}", "")
        if (rank, step, restarts) == (1, 1, 0):
            store.wait(["0: rank 0 finished step 1"])
            os._exit(7)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
