"""Trainings of four gloo ranks that communicate in every way that the tracer captures."""

from __future__ import annotations

import gc
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope import tracer
from rankscope.tracer.topology import Layout
from tests.support.tracer.torch_here import of_this_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Build = Callable[[int], tuple[nn.Module, Callable[[], float]]]

MICROBATCHES = 2
WIDTH = 16


class Train(Protocol):
    """Trains a recipe from the same state; returns what torch saw and the losses."""

    def __call__(self, recipe: str, rank: int, *, spool: Path | None) -> dict[str, Any]: ...


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts communication operators by name, as torch reports them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if any(issubclass(item, DTensor) for item in types):
            return NotImplemented  # first what DTensor makes of it, then the operator itself
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[f"{func.namespace}.{func.__name__.split('.')[0]}"] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def pipeline_and_tensor_parallel(rank: int) -> tuple[nn.Module, Callable[[], float]]:
    """PP 2 x TP 2 with 1F1B, gradients clipped over DTensors."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage_number = mesh.get_local_rank("pp")
    block = Block()
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    example = torch.empty(4, WIDTH, requires_grad=True)
    stage = PipelineStage(
        block,
        stage_number,
        2,
        torch.device("cpu"),
        input_args=example,
        output_args=example,
        group=mesh.get_group("pp"),
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_square)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        batch = torch.randn(4 * MICROBATCHES, WIDTH)
        losses: list[torch.Tensor] = []
        if stage_number == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total.item()

    return block, step


def sharded(rank: int) -> tuple[nn.Module, Callable[[], float]]:
    """DP 2 (FSDP2) x TP 2 without a pipeline, and plain calls of every kind."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        value = torch.zeros(())
        for _ in range(MICROBATCHES):
            batch = torch.randn(4, WIDTH)
            loss = mean_square(model(batch), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.detach().clone()
        optimizer.step()
        plain_calls(rank)
        dist.all_reduce(value)
        return value.item()

    return model, step


def replicated(rank: int) -> tuple[nn.Module, Callable[[], float]]:
    """DP 4 by DDP with several buckets, waited for inside C++."""
    model = nn.Sequential(*[Block() for _ in range(4)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        with ddp.no_sync():
            batch = torch.randn(4, WIDTH)
            mean_square(ddp(batch), batch).backward()  # type: ignore[no-untyped-call]
        batch = torch.randn(4, WIDTH)
        loss = mean_square(ddp(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return ddp, step


def plain_calls(rank: int) -> None:
    """One call of every other operation that a job may use."""
    world = dist.get_world_size()
    mine = torch.full((4,), float(rank))
    everyone = [torch.empty(4) for _ in range(world)]
    dist.all_gather(everyone, mine)
    dist.broadcast(mine, src=1)
    dist.reduce(mine, dst=0)
    dist.barrier()
    dist.scatter(mine, everyone if rank == 2 else None, src=2)
    dist.gather(mine, everyone if rank == 0 else None, dst=0)
    dist.all_to_all_single(torch.empty(4), torch.ones(4))
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    if rank == 0:
        dist.send(mine, dst=3)
    if rank == 3:
        dist.recv(mine, src=0)


RECIPES: dict[str, tuple[Build, Layout]] = of_this_torch(
    {
        "pipeline": (pipeline_and_tensor_parallel, Layout(pp=2, tp=2)),
        "sharded": (sharded, Layout(dp=2, tp=2)),
        "replicated": (replicated, Layout(dp=4)),
    }
)


def train_steps(step: Callable[[], float], num_steps: int) -> list[str]:
    """Train and report each step to the tracer; return the losses as hexadecimal floats."""
    losses = []
    for _ in range(num_steps):
        loss = step()
        losses.append(loss.hex())
        tracer.step(tokens=8, loss=loss)
    return losses


def train_all(recipes: Iterable[str], train: Train, *, rank: int, world: int, folder: Path) -> None:
    """Run a rank of a gloo group that trains each recipe untraced and traced; write the results."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / f"rendezvous-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for recipe in recipes:
        plain = train(recipe, rank, spool=None)
        traced = train(recipe, rank, spool=folder / "spool")
        document = json.dumps({"plain": plain, "traced": traced})
        (folder / f"{recipe}-{rank}.json").write_text(document)
    gc.collect()  # models keep the group alive, whose threads must end before Python does
    dist.destroy_process_group()
