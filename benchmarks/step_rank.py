"""One rank of the job that `benchmarks.tracer_step` times: it trains a step whenever told to.

Started by that script. Each line on stdin is one step; the answer is a line on stdout: when the
step began and ended (monotonic clock, ns) and what CPU time the process has used so far (ns).
At the end of stdin a traced rank writes how many records it stored and dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RANKS = 2
NUM_LAYERS, NUM_EXPERTS, WIDTH, TOKENS, NUM_MICROBATCHES = 6, 20, 256, 32, 8
NUM_WARM_STEPS = 3


class Expert(nn.Module):
    """One of the small networks that share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the token's next state, shape (tokens, width)."""
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


class Model(nn.Module):
    """Every expert sees every token: the work does not depend on a router."""

    def __init__(self, span: Callable[[str], contextlib.AbstractContextManager[object]]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_LAYERS * NUM_EXPERTS))
        self.span = span

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last state, with a span around each expert."""
        for expert in self.experts:
            with self.span("expert"):
                x = x + expert(x) / NUM_EXPERTS
        return x


class PlainModel(Model):
    """The same without any call to a tracer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last state."""
        for expert in self.experts:
            x = x + expert(x) / NUM_EXPERTS
        return x


def build(spool: Path | None) -> Callable[[], None]:
    """Return what trains one step, traced into ``spool`` where one is given."""
    torch.manual_seed(7)
    tell: Callable[..., object] | None = None
    if spool is None:
        model = DistributedDataParallel(PlainModel(contextlib.nullcontext), bucket_cap_mb=25)
    else:
        import tracer

        model = DistributedDataParallel(Model(tracer.span), bucket_cap_mb=25)
        tracer.install(spool=spool, run="benchmark", model=model)
        tracer.begin_steps()
        tell = tracer.step
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        total = torch.zeros(())
        for index in range(NUM_MICROBATCHES):
            last = index == NUM_MICROBATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                batch = torch.randn(TOKENS, WIDTH)
                loss = (model(batch) - batch).square().mean()
                loss.backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        if tell is not None:
            tell(tokens=TOKENS * NUM_MICROBATCHES, loss=total)

    return step


def take_turns(step: Callable[[], Any]) -> None:
    """Train a step for each line on stdin."""
    for _ in sys.stdin:
        begin_ns = time.monotonic_ns()
        step()
        end_ns = time.monotonic_ns()
        sys.stdout.write(f"{begin_ns} {end_ns} {time.process_time_ns()}\n")
        sys.stdout.flush()


def fill(path: Path) -> None:
    """Write until the disk holds no more."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def counted(spool: Path) -> tuple[int, int]:
    """Return how many records the process stored and dropped."""
    from tracer.spool import PROCESS_FILE, SEGMENT_GLOB, iter_committed, read_dropped

    (process,) = spool.rglob(PROCESS_FILE)
    stored = sum(1 for path in spool.rglob(SEGMENT_GLOB) for _ in iter_committed(path.read_bytes()))
    return stored, sum(read_dropped(process.read_bytes()).values())


def main() -> None:
    """Be one rank until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--spool", type=Path, help="trace into this folder")
    parser.add_argument("--full", action="store_true", help="fill the spool's disk")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[options.rank % len(cores)]})
    torch.set_num_threads(1)
    store = FileStore(str(options.rendezvous), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=NUM_RANKS)
    step = build(options.spool)
    if options.full:
        fill(options.spool / "filler")
    for _ in range(NUM_WARM_STEPS):
        step()
    take_turns(step)
    if options.spool is not None:
        import tracer

        tracer.shutdown()
        stored, dropped = counted(options.spool)
        print(stored, dropped, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
