"""One rank of the job that `benchmarks.tracer_step` times: its tracing is turned on and off.

Started by that script. For each letter of ``--turns`` it trains a few steps, traced where the
letter is T, the first of them untimed. Each timed step is a line on stdout: the letter, when the
step began and ended (monotonic clock, ns), and what CPU time the process used in it (ns). A last
line says how many records the timed steps of the traced turns stored, and how many they dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RANKS = 2
NUM_LAYERS, NUM_EXPERTS, WIDTH, TOKENS, NUM_MICROBATCHES = 6, 20, 256, 32, 8
NUM_UNTIMED = 1
"""Steps at the begin of a turn."""


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

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_LAYERS * NUM_EXPERTS))
        self.run: Callable[[torch.Tensor], torch.Tensor] = self.plainly
        """What `forward` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last state."""
        return self.run(x)

    def plainly(self, x: torch.Tensor) -> torch.Tensor:
        """Do so without any call to a tracer."""
        for expert in self.experts:
            x = x + expert(x) / NUM_EXPERTS
        return x

    def with_spans(self, x: torch.Tensor) -> torch.Tensor:
        """Do so with a span around each expert."""
        from rankscope.tracer import span

        for expert in self.experts:
            with span("expert"):
                x = x + expert(x) / NUM_EXPERTS
        return x


class Job:
    """The training of one rank, which can be traced for a while."""

    def __init__(self, spool: Path, *, fills_disk: bool) -> None:
        torch.manual_seed(7)
        self.spool = spool
        self._fills_disk = fills_disk
        self._module = Model()
        self._model = DistributedDataParallel(self._module, bucket_cap_mb=25)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._tell: Callable[..., object] | None = None
        self._total = torch.zeros(())
        self._before = (0, 0)
        self.stored = self.dropped = 0

    @property
    def model(self) -> DistributedDataParallel:
        """What is trained, wrapped."""
        return self._model

    def step(self) -> None:
        """Train one step."""
        self.begin_step()
        for index in range(NUM_MICROBATCHES):
            self.microbatch(TOKENS, is_last=index == NUM_MICROBATCHES - 1)
        self.end_step(self._tell, TOKENS)

    def begin_step(self) -> None:
        """Forget gradients and loss of the step before."""
        self._optimizer.zero_grad()
        self._total = torch.zeros(())

    def microbatch(self, num_tokens: int, *, is_last: bool) -> None:
        """Run forward and backward of one; after the last the ranks add up their gradients."""
        with contextlib.nullcontext() if is_last else self._model.no_sync():
            batch = torch.randn(num_tokens, WIDTH)
            loss = (self._model(batch) - batch).square().mean()
            loss.backward()
        self._total += loss.detach()

    def meet(self) -> None:
        """Wait for the other rank."""
        dist.all_reduce(torch.zeros(1))

    def end_step(self, tell: Callable[..., object] | None, num_tokens: int) -> None:
        """Let the optimizer step, add up the loss, and tell of the step."""
        self._optimizer.step()
        dist.all_reduce(self._total)
        if tell is not None:
            tell(tokens=num_tokens * NUM_MICROBATCHES, loss=self._total)

    def run_experts(self, *, traced: bool) -> None:
        """Put a span by hand around each expert from now on, or nothing."""
        self._module.run = self._module.with_spans if traced else self._module.plainly

    def begin_tracing(self) -> None:
        """Trace from now on."""
        from rankscope import tracer

        tracer.install(spool=self.spool, run="benchmark", model=self._model)
        if self._fills_disk:
            fill(self.spool / "filler")
        tracer.begin_steps()
        self._tell = tracer.step
        self.run_experts(traced=True)

    def begin_counting(self) -> None:
        """Count the records from now on."""
        self._before = counted(self.spool)

    def end_tracing(self) -> None:
        """Trace no more, leave nothing on the disk, and add up what was recorded."""
        from rankscope import tracer

        after = counted(self.spool)
        self.stored += after[0] - self._before[0]
        self.dropped += after[1] - self._before[1]
        self._tell = None
        self.run_experts(traced=False)
        tracer.shutdown()
        for path in self.spool.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def take_turns(job: Job, turns: str, num_timed: int) -> None:
    """Train and time a few steps for each letter."""
    for turn in turns:
        if turn == "T":
            job.begin_tracing()
        for _ in range(NUM_UNTIMED):
            job.step()
        if turn == "T":
            job.begin_counting()
        for _ in range(num_timed):
            begin_ns, begin_cpu_ns = time.monotonic_ns(), time.process_time_ns()
            job.step()
            end_ns, end_cpu_ns = time.monotonic_ns(), time.process_time_ns()
            sys.stdout.write(f"{turn} {begin_ns} {end_ns} {end_cpu_ns - begin_cpu_ns}\n")
        sys.stdout.flush()
        if turn == "T":
            job.end_tracing()
    print(job.stored, job.dropped)


def fill(path: Path) -> None:
    """Write until the disk holds no more."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def counted(spool: Path) -> tuple[int, int]:
    """Return how many records the process that writes there has stored and dropped."""
    from rankscope.tracer.spool import PROCESS_FILE, SEGMENT_GLOB, iter_committed, read_dropped

    (process,) = spool.rglob(PROCESS_FILE)
    stored = sum(1 for path in spool.rglob(SEGMENT_GLOB) for _ in iter_committed(path.read_bytes()))
    return stored, sum(read_dropped(process.read_bytes()).values())


def main() -> None:
    """Be one rank for all turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--spool", type=Path, required=True, help="an empty folder")
    parser.add_argument("--turns", required=True)
    parser.add_argument("--timed", type=int, required=True, help="timed steps of a turn")
    parser.add_argument("--full", action="store_true", help="fill the spool's disk")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[options.rank % len(cores)]})
    torch.set_num_threads(1)
    store = FileStore(str(options.rendezvous), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=NUM_RANKS)
    job = Job(options.spool, fills_disk=options.full)
    for _ in range(2):  # DDP makes its buckets anew after the first
        job.step()
    take_turns(job, options.turns, options.timed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
