"""The trainings of the other jobs, by ranks that declare no layout."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from rankscope import tracer
from tests.support.tracer.torch_here import of_this_torch
from tests.tracer.jobs import matrix_recipes
from tests.tracer.jobs.matrix_recipes import Block, ordinary_step, pipeline, tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Recipe = tuple[nn.Module | None, Callable[[], float]]


def sharded_over_all(rank: int) -> Recipe:
    """FSDP2 over all ranks, with nothing declared."""
    model = nn.Sequential(Block(), Block())
    fully_shard(model[0])
    fully_shard(model)
    return model, ordinary_step(model)


def wrapped_afterwards(rank: int) -> Recipe:
    """DDP over all ranks, in a job that passes the wrapped module."""
    inner = Block()
    return inner, ordinary_step(DistributedDataParallel(inner))


def hybrid_of_other_names(rank: int) -> Recipe:
    """HSDP over a mesh whose axes have the names of torch's own tutorial."""
    model = Block()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return model, ordinary_step(model)


def reduced_manually(rank: int) -> Recipe:
    """Gradients that the script itself reduces over all ranks."""
    model = Block()
    step = ordinary_step(model)

    def reduce_too() -> float:
        loss = step()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss

    return model, reduce_too


def experts_distributed_manually(rank: int) -> Recipe:
    """DDP over all ranks whose tokens go to experts by an all-to-all over the same ranks."""
    model = DistributedDataParallel(Block())
    step = ordinary_step(model)

    def exchange_too() -> float:
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        return step()

    return model, exchange_too


def ring_manually(rank: int) -> Recipe:
    """DDP over all ranks that pass something round by p2p."""
    model = DistributedDataParallel(Block())
    step = ordinary_step(model)

    def pass_on_too() -> float:
        world = dist.get_world_size()
        ring = [
            dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % world),
            dist.P2POp(dist.irecv, torch.empty(2), (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        return step()

    return model, pass_on_too


def halves_manually(rank: int) -> Recipe:
    """DDP over all ranks, half of which share something in their own group."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(Block())
    step = ordinary_step(model)

    def share_too() -> float:
        dist.all_reduce(torch.ones(2), group=halves[rank // 2])
        return step()

    return model, share_too


def part_of_the_job(rank: int) -> Recipe:
    """DDP in each half of the ranks; how the halves are related is unknown."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(Block(), process_group=halves[rank // 2])
    return model, ordinary_step(model)


def tensor_parallel_over_all(rank: int) -> Recipe:
    """TP over all ranks: the mesh's only axis has no group of its own."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = tensor_parallel(Block(), mesh)
    return model, ordinary_step(model)


def pipeline_over_all(rank: int) -> Recipe:
    """A pipeline of all ranks, over the default group."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("stages",))
    return pipeline(ScheduleGPipe, mesh, lambda module: module, axis="stages")  # type: ignore[no-any-return]


def fully_sharded_wrapper(rank: int) -> Recipe:
    """The first version of FSDP over all ranks."""
    model = FullyShardedDataParallel(Block(), device_id=torch.device("cpu"))
    return model, ordinary_step(model)


def half_wrapped(rank: int) -> Recipe:
    """DDP around one of two trained modules."""
    model = nn.Sequential(DistributedDataParallel(Block()), Block())
    return model, ordinary_step(model)


def plain_loop(rank: int) -> Recipe:
    """DDP in a loop without a loader, in a job that reports nothing."""
    model = DistributedDataParallel(Block())
    return model, ordinary_step(model)


STEPS = 3

UNREPORTED = ("plain_loop", "unreported_pipeline")
"""Jobs that report neither model nor steps."""

RECIPES: dict[str, Callable[[int], Any]] = of_this_torch(
    {
        **{name: build for name, (build, _) in matrix_recipes.RECIPES.items() if name != "calls"},
        "unreported_pipeline": pipeline_over_all,
        **{
            build.__name__: build
            for build in (
                sharded_over_all,
                wrapped_afterwards,
                hybrid_of_other_names,
                reduced_manually,
                experts_distributed_manually,
                ring_manually,
                halves_manually,
                part_of_the_job,
                half_wrapped,
                tensor_parallel_over_all,
                pipeline_over_all,
                fully_sharded_wrapper,
                plain_loop,
            )
        },
    }
)


def train_recipe(recipe: str, rank: int, world: int, folder: Path) -> None:
    """Train one of `RECIPES`, traced."""
    # Here, because after a fork torch must replace its thread pool, and threads race to do it.
    torch.set_num_threads(1)
    store = FileStore(str(folder / f"rendezvous-{recipe}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model, step = RECIPES[recipe](rank)
    is_reported = recipe not in UNREPORTED
    tracer.install(
        spool=folder / "spool",
        run=recipe,
        model=model if is_reported else None,
        count_steps=not is_reported,
    )
    if is_reported:
        tracer.begin_steps()
    for _ in range(STEPS):
        step()
        if is_reported:
            tracer.step()
    tracer.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def main(rank: int, world: int, folder: Path, arguments: Sequence[str]) -> None:
    """Run as one rank, in one process per recipe: torch keeps destroyed groups in caches."""
    warnings.simplefilter("ignore")
    for recipe in arguments:
        pid = os.fork()
        if pid == 0:
            train_recipe(recipe, rank, world, folder)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            sys.exit(f"{recipe}: rank {rank} failed")
