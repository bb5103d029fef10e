"""A training step traced and untraced, in the same two processes, block by block.

    python benchmarks/tracer_step.py [--quads 10] [--json FILE]

Two gloo ranks, each pinned to a core of its own, train a small mixture of experts by DDP. A
step is eight micro-batches; what torch does is captured, and a span by hand stands around each
expert, so that a traced step has about 1,000 spans. Steps come in blocks, traced (T) and untraced
(U) in the order T U U T and U T T U; an untraced block runs the same code with the tracer shut
down and without any call to it. The first step of a block is not counted. For each four blocks
one ratio is taken, median traced step over median untraced step; told is the median ratio, with a
95 % interval by bootstrap over the fours. `cpu` is the same of the CPU time of the whole process,
background thread included, which neighbours on a shared machine disturb less than wall time.

Three scenarios: ``healthy`` (room for all records), ``agent-dead`` (nobody takes the segments away
and the spool's budget is used up: each record is dropped), ``disk-full`` (a tmpfs of a
few MiB, filled up after the tracer began, so that no further segment can be made).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[1]
NUM_RANKS = 2
TIMED_STEPS = 3
SMALL_BYTES = 1 << 16
"""A segment that one step fills."""

ONLY = "TRACER_STEP_ONLY"
"""Environment: scenarios to run, with spaces between."""

SCENARIOS = {
    "healthy": {"RANKSCOPE_SEGMENT_BYTES": str(1 << 20)},
    "agent-dead": {
        "RANKSCOPE_SEGMENT_BYTES": str(SMALL_BYTES),
        "RANKSCOPE_SPOOL_BYTES": str(4 * SMALL_BYTES),
    },
    "disk-full": {"RANKSCOPE_SEGMENT_BYTES": str(SMALL_BYTES)},
}
DISK = "8m"
ORDERS = ("TUUT", "UTTU")


# -- what is trained ---------------------------------------------------------


class Step(Protocol):
    """Trains one step."""

    def __call__(self, *, spans: bool) -> None:
        """Train one step, with spans by hand or without any call to the tracer."""
        ...


def build() -> tuple[Any, Step]:
    """Return the root module and what trains it."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import tracer

    num_layers, num_experts, width, tokens, num_microbatches = 6, 20, 256, 32, 8

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.relu(self.up(x)))
            return out

    class Model(nn.Module):
        """Every expert sees every token: the work does not depend on a router."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(num_layers * num_experts))

        def forward(self, x: torch.Tensor, spans: bool) -> torch.Tensor:  # noqa: FBT001
            for expert in self.experts:
                if spans:
                    with tracer.span("expert"):
                        x = x + expert(x) / num_experts
                else:
                    x = x + expert(x) / num_experts
            return x

    torch.manual_seed(7)
    model = DistributedDataParallel(Model(), bucket_cap_mb=25)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(*, spans: bool) -> None:
        optimizer.zero_grad()
        total = torch.zeros(())
        for index in range(num_microbatches):
            last = index == num_microbatches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                batch = torch.randn(tokens, width)
                loss = (model(batch, spans) - batch).square().mean()
                loss.backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        if spans:
            tracer.step(tokens=tokens * num_microbatches, loss=total)

    return model, step


def chosen() -> list[str]:
    """Return the scenarios to run: all, or those that `ONLY` names."""
    return os.environ.get(ONLY, " ".join(SCENARIOS)).split()


# -- one rank ----------------------------------------------------------------


def run_rank(rank: int, folder: Path, quads: int) -> None:
    """Train through all scenarios and write each block's step times."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    store = FileStore(str(folder / "rendezvous"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    model, step = build()
    for _ in range(3):
        step(spans=False)
    told = {
        name: [
            [run_block(letter == "T", name, rank, folder, (model, step)) for letter in order]
            for quad in range(quads)
            for order in (ORDERS[quad % 2],)
        ]
        for name in chosen()
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def run_block(
    traced: bool,  # noqa: FBT001
    scenario: str,
    rank: int,
    folder: Path,
    training: tuple[Any, Step],
) -> dict[str, Any]:
    """Train one step that is not counted and `TIMED_STEPS` that are; return their times."""
    import torch.distributed as dist

    import tracer

    model, step = training
    disk = folder / ("disk" if scenario == "disk-full" else "spool") / str(rank)
    if traced:
        disk.mkdir(parents=True, exist_ok=True)
        os.environ.update(SCENARIOS[scenario])
        tracer.install(spool=disk, run="benchmark", model=model)
        tracer.begin_steps()
        if scenario == "disk-full":
            fill(disk / "filler")
    dist.barrier()
    step(spans=traced)
    times = []
    for _ in range(TIMED_STEPS):
        wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        step(spans=traced)
        times.append((time.monotonic_ns() - wall_ns, time.process_time_ns() - cpu_ns))
    block = {"traced": traced, "times": times}
    if traced:
        tracer.shutdown()
        block |= counted(disk)
        for name in SCENARIOS[scenario]:
            del os.environ[name]
        shutil.rmtree(disk)
    return block


def fill(path: Path) -> None:
    """Write until the disk holds no more."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def counted(disk: Path) -> dict[str, int]:
    """Return how many records the process stored and dropped."""
    from tracer.spool import PROCESS_FILE, SEGMENT_GLOB, iter_committed, read_dropped

    (process,) = disk.rglob(PROCESS_FILE)
    stored = sum(1 for path in disk.rglob(SEGMENT_GLOB) for _ in iter_committed(path.read_bytes()))
    return {"stored": stored, "dropped": sum(read_dropped(process.read_bytes()).values())}


# -- what is told ------------------------------------------------------------


def ratios(quads: list[list[dict[str, Any]]], column: int) -> list[float]:
    """Return traced over untraced, one value for each four blocks."""

    def middle(quad: list[dict[str, Any]], *, traced: bool) -> float:
        blocks = [block["times"] for block in quad if block["traced"] == traced]
        values: list[int] = [times[column] for block in blocks for times in block]
        return statistics.median(values)

    return [middle(quad, traced=True) / middle(quad, traced=False) for quad in quads]


def interval(values: list[float], *, rounds: int = 2_000) -> list[float]:
    """Return the 95 % bootstrap interval of the median."""
    dice = random.Random(7)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(rounds))
    return [medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]]


def summary(told: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Return one row a scenario: ratios by wall clock (the slower rank's) and by CPU (both)."""
    rows: list[dict[str, object]] = []
    for name in chosen():
        by_rank = [rank[name] for rank in told]
        blocks = [block for rank in by_rank for quad in rank for block in quad]
        traced = [block for block in blocks if block["traced"]]
        steps = len(traced) * (TIMED_STEPS + 1)
        plain_ns = [times[0] for block in blocks if not block["traced"] for times in block["times"]]
        wall = ratios(by_rank[0], 0)
        cpu = [value for rank in by_rank for value in ratios(rank, 1)]
        rows.append(
            {
                "scenario": name,
                "step_ms": round(statistics.median(plain_ns) / 1e6, 1),
                "records_per_step": round(
                    sum(block["stored"] + block["dropped"] for block in traced) / steps
                ),
                "dropped_per_step": round(sum(block["dropped"] for block in traced) / steps),
                "wall_ratio": round(statistics.median(wall), 4),
                "wall_interval": [round(value, 4) for value in interval(wall)],
                "cpu_ratio": round(statistics.median(cpu), 4),
                "cpu_interval": [round(value, 4) for value in interval(cpu)],
            }
        )
    return rows


def start_ranks(folder: Path, quads: int) -> list[subprocess.Popen[bytes]]:
    """Start both ranks, each with a small disk of its own at ``folder/disk``."""
    (folder / "disk").mkdir()
    mount = f'mount -t tmpfs -o size={DISK} tmpfs "{folder}/disk" && exec "$@"'
    command = [sys.executable, str(Path(__file__)), "--folder", str(folder), "--quads", str(quads)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ["PYTHONPATH"] = str(ROOT)
    return [
        subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", mount, "sh", *command, "--rank", str(rank)], env=environ
        )
        for rank in range(NUM_RANKS)
    ]


def measure(quads: int) -> dict[str, object]:
    """Run both ranks and return the document."""
    import torch

    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        codes = [process.wait() for process in start_ranks(folder, quads)]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}, expected 0: see their messages above")
        told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "quads": quads,
        "timed_steps_per_block": TIMED_STEPS,
        "rows": summary(told),
    }


def main() -> None:
    """Measure and print, or be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quads", type=int, default=10, help="fours of blocks a scenario")
    parser.add_argument("--json", type=Path, help="write the document here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.folder, options.quads)
        return
    start_ns = time.monotonic_ns()
    document = measure(options.quads)
    document["duration_s"] = round((time.monotonic_ns() - start_ns) / 1e9)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
