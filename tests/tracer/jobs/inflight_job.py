"""Two gloo ranks; rank 0 ends with collectives in flight.

``python -m tests.tracer.jobs.inflight_job RANK STORE CASE``, traced if ``RANKSCOPE_TRACE`` is set.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from rankscope import tracer


def main(rank: int, store_path: str, case: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(store_path, 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tracer.install()
    values = torch.ones(1000)
    dist.all_reduce(values)
    if rank == 1:
        store.wait(["rank 0 is leaving"])
        for _ in range(3):
            dist.all_reduce(values)
        dist.destroy_process_group()  # else torch itself aborts one exit in ten
        return
    works = [dist.all_reduce(values, async_op=True) for _ in range(3)]
    assert len(works) == 3
    if case == "destroy":
        store.set("rank 0 is leaving", "")
        dist.destroy_process_group()
    # The store's key is set as late as Python code can run, so that the works end after that.
    import atexit

    atexit.register(store.set, "rank 0 is leaving", "")
    if case == "raise":
        raise KeyError("dies with work in flight")
    sys.exit(3)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
