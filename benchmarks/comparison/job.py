"""One small job of data-parallel training, with a fault, for each tool of the comparison.

    torchrun --nproc-per-node 4 job.py [--fault slow-compute | slow-loader | hang] [--tool TOOL]

Forward and backward sleep for a set time, so four processes keep their pace on two cores. Without
a tool the job is what a user writes; a tool that must be called from inside is called here, with
the lines that its documentation asks for (`TOOLS`).

* slow-compute: forward and backward of rank 2 take 1.4 times as long from step 20.
* slow-loader: every fourth batch of rank 1 takes 150 ms longer to load.
* hang: in step 30 rank 2 calls a barrier, the other ranks the all-reduce of their gradients.

With `--pipeline` the ranks are four stages (1F1B, 4 micro-batches), of which rank 2 may be slow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

FORWARD_S = 0.03
SLOW_RANK, SLOW_FACTOR, SLOW_FROM = 2, 1.4, 20
LOADER_RANK, LOADER_S, LOADER_EVERY = 1, 0.15, 4
HANG_RANK, HANG_STEP = 2, 30
NUM_MICROBATCHES = 4
TIMEOUT_S = int(os.environ.get("TIMEOUT", "600"))
OUT = Path(os.environ.get("COMPARISON_OUT", "."))


class Sleep(torch.autograd.Function):
    """Returns its input, `seconds` later; its backward takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Model(nn.Module):
    """Two layers, with a pause between them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = FORWARD_S
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Sleep.apply(torch.relu(self.first(x)), self.seconds))


class Samples(Dataset[torch.Tensor]):
    """Random batches of which every fourth may be slow to load."""

    def __init__(self, num: int, *, slow: bool) -> None:
        self.num, self.slow = num, slow

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow and index % LOADER_EVERY == 0:
            time.sleep(LOADER_S)
        return torch.randn(32, 64)


@contextmanager
def profiler(rank: int) -> Iterator[Callable[[], object]]:
    from torch.profiler import ProfilerActivity, profile, schedule

    def save(done: profile) -> None:
        OUT.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(OUT / f"rank{rank}.json.gz"))
        if rank in (0, 2):
            table = done.key_averages().table(sort_by="cpu_time_total", row_limit=8)
            (OUT / f"table{rank}.txt").write_text(table)

    steps = schedule(wait=25, warmup=5, active=20, repeat=1)
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, schedule=steps, on_trace_ready=save) as done:
        yield done.step


class WithoutCupti:
    """Answers for the part of NVRx that times kernels, which a host without a GPU cannot load."""

    def __init__(self, **_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., dict[str, object]]:
        return lambda *_: {}


@contextmanager
def nvrx(rank: int) -> Iterator[Callable[[], object]]:
    if not torch.cuda.is_available():
        sys.modules["nvrx_cupti_module"] = SimpleNamespace(CuptiProfiler=WithoutCupti)
        torch.cuda.synchronize = lambda *_: None
    from nvidia_resiliency_ext import straggler

    straggler.Detector.initialize(gather_on_rank0=True)
    step = 0

    def after_step() -> None:
        nonlocal step
        step += 1
        if step % 50 or not (report := straggler.Detector.generate_report()):
            return
        scores = report.section_relative_perf_scores
        print("relative", json.dumps(scores), "individual", report.section_individual_perf_scores)
        print("stragglers", report.identify_stragglers())

    yield after_step
    straggler.Detector.shutdown()


@contextmanager
def wandb(rank: int) -> Iterator[Callable[[], object]]:
    import wandb as client

    settings = client.Settings(x_stats_sampling_interval=1.0)
    with client.init(project="comparison", mode="offline", dir=OUT, settings=settings) as run:
        last = time.monotonic()

        def after_step() -> None:
            nonlocal last
            now = time.monotonic()
            run.log({"step_s": now - last})
            last = now

        yield after_step


@contextmanager
def traceml(rank: int) -> Iterator[Callable[[], object]]:
    import traceml_ai as client

    client.init(mode="auto")
    yield lambda: None


@contextmanager
def flight_recorder(rank: int) -> Iterator[Callable[[], object]]:
    """Write this rank's dump once no step has ended for 10 s; NCCL's watchdog does so by itself."""
    from torch._C import _distributed_c10d as c10d

    def dump() -> None:
        text = c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / f"rank_{rank}.json").write_bytes(text)

    timer = threading.Timer(10, dump)
    timer.daemon = True
    timer.start()

    def after_step() -> None:
        nonlocal timer
        timer.cancel()
        timer = threading.Timer(10, dump)
        timer.daemon = True
        timer.start()

    yield after_step
    timer.cancel()


TOOLS = {
    "flight-recorder": flight_recorder,
    "profiler": profiler,
    "nvrx": nvrx,
    "wandb": wandb,
    "traceml": traceml,
}


def around_step(tool: str | None, model: nn.Module) -> AbstractContextManager[Any]:
    """Return what the tool asks to wrap around a step."""
    if tool == "traceml":
        import traceml_ai as client

        return client.trace_step(model)
    return nullcontext()


def around_section(tool: str | None, name: str) -> AbstractContextManager[Any]:
    """Return what the tool asks to wrap around a section of code."""
    if tool == "nvrx":
        from nvidia_resiliency_ext import straggler

        return straggler.Detector.detection_section(name, profile_cuda=False)
    return nullcontext()


def train(fault: str | None, tool: str | None, num_steps: int) -> None:
    """Train `num_steps` steps on this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    with TOOLS[tool](rank) if tool else nullcontext(lambda: None) as after_step:
        model = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        slow_loader = fault == "slow-loader" and rank == LOADER_RANK
        batches = DataLoader(Samples(num_steps, slow=slow_loader), batch_size=None)
        started = time.perf_counter()
        for step, batch in enumerate(batches):
            if fault == "slow-compute" and rank == SLOW_RANK and step >= SLOW_FROM:
                model.module.seconds = FORWARD_S * SLOW_FACTOR
            with around_step(tool, model.module):
                if fault == "hang" and rank == HANG_RANK and step == HANG_STEP:
                    dist.barrier()
                optimizer.zero_grad()
                with around_section(tool, "forward"):
                    loss = model(batch).square().mean()
                with around_section(tool, "backward"):
                    loss.backward()
                optimizer.step()
            after_step()
        if rank == 0:
            print(f"mean step {(time.perf_counter() - started) / num_steps * 1e3:.1f} ms")
    dist.destroy_process_group()


def train_pipeline(fault: str | None, tool: str | None, num_steps: int) -> None:
    """Train `num_steps` steps of this rank's stage."""
    dist.init_process_group("gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    with TOOLS[tool](rank) if tool else nullcontext(lambda: None) as after_step:
        model = Model()
        model.seconds = FORWARD_S / NUM_MICROBATCHES
        stage = PipelineStage(model, rank, num_stages, torch.device("cpu"))
        schedule = Schedule1F1B(
            stage, NUM_MICROBATCHES, loss_fn=lambda out, want: (out - want).square().mean()
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step, batch in enumerate(DataLoader(Samples(num_steps, slow=False), batch_size=None)):
            if fault == "slow-compute" and rank == SLOW_RANK and step >= SLOW_FROM:
                model.seconds = FORWARD_S * SLOW_FACTOR / NUM_MICROBATCHES
            with around_step(tool, model):
                optimizer.zero_grad()
                with around_section(tool, "schedule"):
                    given = (batch,) if rank == 0 else ()
                    schedule.step(*given, target=batch if rank == num_stages - 1 else None)
                optimizer.step()
            after_step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=["slow-compute", "slow-loader", "hang"])
    parser.add_argument("--tool", choices=sorted(TOOLS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pipeline", action="store_true")
    args = parser.parse_args()
    run = train_pipeline if args.pipeline else train
    run(args.fault, args.tool, args.steps)
