"""Parallel trainings of a small model; each returns its root module and a step function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import (
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from rankscope.tracer.topology import Layout
from tests.support.tracer.torch_here import of_this_torch
from tests.tracer.jobs.matrix_calls import calls, plain_calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    Recipe = tuple[nn.Module | None, Callable[[], float]]

MICROBATCHES = 4
WIDTH = 16
ONE_STAGE_A_RANK = (Schedule1F1B, ScheduleGPipe)


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


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def ordinary_step(model: nn.Module, num_microbatches: int = 2) -> Callable[[], float]:
    """Return a step of forward, backward and optimizer that ends with an averaged loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        value = torch.zeros(())
        for _ in range(num_microbatches):
            batch = torch.randn(4, WIDTH)
            loss = mean_square(model(batch), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.detach().clone()
        optimizer.step()
        dist.all_reduce(value)
        return value.item()

    return step


def sharded(rank: int) -> Recipe:
    """DP 2 (FSDP2) x TP 2, gradients clipped over DTensors, and plain calls of every kind."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(tensor_parallel(block, mesh["tp"]), mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    plain = ordinary_step(model)

    def step() -> float:
        value = plain()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain_calls(rank)
        return value

    return model, step


def replicated(rank: int) -> Recipe:
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


def hybrid_sharded(rank: int) -> Recipe:
    """HSDP: replicated over 2, sharded over 2, under autocast."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plain = ordinary_step(model)

    def step() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain()

    return model, step


def static_graph(rank: int) -> Recipe:
    """DDP with a static graph: its first backward delays all launches."""
    model = nn.Sequential(*[Block() for _ in range(3)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005, static_graph=True)
    return ddp, ordinary_step(ddp)


def hooked(rank: int) -> Recipe:
    """DDP with one of torch's communication hooks, and parameters that stay unused."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    ddp = DistributedDataParallel(Half(), bucket_cap_mb=0.005, find_unused_parameters=True)
    ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    return ddp, ordinary_step(ddp)


def compiled(rank: int) -> Recipe:
    """DDP around compiled blocks, and a collective inside of compiled code."""

    world = distributed_c10d._get_default_group()

    class Reducing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.block(x)
            mean = out.detach().mean(0)
            dist.all_reduce(mean)
            summed: torch.Tensor = out + functional.all_reduce(mean, "sum", world)
            return summed

    model: Any = torch.compile(Reducing(), backend="aot_eager")
    ddp = DistributedDataParallel(nn.Sequential(model, Block()))
    return ddp, ordinary_step(ddp)


def expert_parallel(rank: int) -> Recipe:
    """DP 2 x EP 2: tokens go to their expert and back by uneven, differentiable all-to-alls."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    group = mesh.get_group("ep")
    position = mesh.get_local_rank("ep")
    expert = Block()
    fully_shard(expert, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(expert.parameters(), lr=1e-2)
    send = [1, 3] if position == 0 else [2, 2]
    take = [1, 2] if position == 0 else [3, 2]

    def step() -> float:
        optimizer.zero_grad()
        tokens = torch.randn(4, WIDTH, requires_grad=True)
        there = functional.all_to_all_single_autograd(tokens, take, send, group)
        done = expert(functional.wait_tensor(there))  # type: ignore[no-untyped-call]
        back = functional.all_to_all_single_autograd(done, send, take, group)
        loss = mean_square(back, tokens.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return expert, step


def context_parallel(rank: int) -> Recipe:
    """CP 4 on a mesh of 2 x 2 with dp: keys and values go round a ring, and are gathered once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group = mesh.get_group("cp")
    model = Block()
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    peer = dist.get_global_rank(group, 1 - mesh.get_local_rank("cp"))

    def step() -> float:
        optimizer.zero_grad()
        query = torch.randn(4, WIDTH)
        mine = model(query)
        theirs = torch.empty(4, WIDTH)
        ring = [
            dist.P2POp(dist.isend, mine.detach(), peer, group=group),
            dist.P2POp(dist.irecv, theirs, peer, group=group),
        ]
        works = dist.batch_isend_irecv(ring)
        local = torch.nn.functional.scaled_dot_product_attention(query, mine, mine)
        for work in works:
            work.wait()
        rest = torch.nn.functional.scaled_dot_product_attention(query, theirs, theirs)
        loss = mean_square(local + rest, query)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value = loss.detach().clone()
        dist.all_reduce(value, group=group)
        return value.item()

    return model, step


def pipeline(
    schedule_class: Any,  # noqa: ANN401
    mesh: DeviceMesh,
    wrap: Callable[[nn.Module], nn.Module],
    axis: str = "pp",
) -> Any:  # noqa: ANN401
    """Return the modules and the step of a pipeline over ``axis``; ``wrap`` makes stages."""
    group, position = mesh.get_group(axis), mesh.get_local_rank(axis)
    size = group.size()
    if schedule_class in ONE_STAGE_A_RANK:
        numbers = [position]
    elif schedule_class is ScheduleZBVZeroBubble:
        numbers = [position, 2 * size - 1 - position]
    else:
        numbers = [position, position + size]
    num_stages = len(numbers) * size
    stages, modules = [], nn.ModuleList()
    example = torch.empty(2, WIDTH, requires_grad=True)
    for number in numbers:
        module = wrap(Block())
        modules.append(module)
        stage = PipelineStage(
            module,
            number,
            num_stages,
            torch.device("cpu"),
            input_args=example,
            output_args=example,
            group=group,
        )
        stages.append(stage)
    schedule = schedule_class(
        stages[0] if schedule_class in ONE_STAGE_A_RANK else stages,
        MICROBATCHES,
        loss_fn=mean_square,
        scale_grads=False,
    )
    optimizer = torch.optim.SGD(modules.parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        batch = torch.randn(2 * MICROBATCHES, WIDTH)
        losses: list[torch.Tensor] = []
        inputs = (batch,) if 0 in numbers else ()
        if num_stages - 1 in numbers:
            schedule.step(*inputs, target=batch, losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total.item()

    return modules, step


def pipeline_and_tensor_parallel(schedule_class: Any) -> Any:  # noqa: ANN401
    """PP 2 x TP 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    return pipeline(schedule_class, mesh, lambda module: tensor_parallel(module, mesh["tp"]))


def interleaved_ddp(rank: int) -> Recipe:
    """PP 2 with interleaved 1F1B x DP 2 with DDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, process_group=mesh.get_group("dp"))

    return pipeline(ScheduleInterleaved1F1B, mesh, wrap)  # type: ignore[no-any-return]


def zero_bubble_fsdp(rank: int) -> Recipe:
    """PP 2 with the interleaved zero-bubble schedule x DP 2 with FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(module: nn.Module) -> nn.Module:
        fully_shard(module, mesh=mesh["dp"])
        return module

    return pipeline(ScheduleInterleavedZeroBubble, mesh, wrap)  # type: ignore[no-any-return]


def zero_bubble_v(rank: int) -> Recipe:
    """PP 2 with the V-shaped zero-bubble schedule, twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return pipeline(ScheduleZBVZeroBubble, mesh, lambda module: module)  # type: ignore[no-any-return]


def three_axes(rank: int) -> Recipe:
    """PP 2 with interleaved 1F1B x FSDP2 over the rest x TP 2."""
    sizes = (2, dist.get_world_size() // 4, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))

    def wrap(module: nn.Module) -> nn.Module:
        fully_shard(tensor_parallel(module, mesh["tp"]), mesh=mesh["dp"])
        return module

    return pipeline(ScheduleInterleaved1F1B, mesh, wrap)  # type: ignore[no-any-return]


RECIPES: dict[str, tuple[Callable[[int], Any], Layout]] = of_this_torch(
    {
        "pipeline": (lambda _: pipeline_and_tensor_parallel(Schedule1F1B), Layout(pp=2, tp=2)),
        "sharded": (sharded, Layout(dp=2, tp=2)),
        "replicated": (replicated, Layout(dp=4)),
        "calls": (calls, Layout(dp=2, tp=2)),
        "hybrid_sharded": (hybrid_sharded, Layout(dp=4)),
        "static_graph": (static_graph, Layout(dp=4)),
        "hooked": (hooked, Layout(dp=4)),
        "compiled": (compiled, Layout(dp=4)),
        "expert_parallel": (expert_parallel, Layout(dp=4, ep=2)),
        "context_parallel": (context_parallel, Layout(dp=2, cp=2)),
        "gpipe": (lambda _: pipeline_and_tensor_parallel(ScheduleGPipe), Layout(pp=2, tp=2)),
        "interleaved": (interleaved_ddp, Layout(pp=2, dp=2, vpp=2)),
        "zero_bubble": (zero_bubble_fsdp, Layout(pp=2, dp=2, vpp=2)),
        "zero_bubble_v": (zero_bubble_v, Layout(pp=2, dp=2, vpp=2)),
        "three_axes": (three_axes, Layout(pp=2, dp=2, tp=2, vpp=2)),
    }
)
"""The trainings, and the layout that the job declares."""

NUM_RANKS = {recipe: 8 if recipe == "three_axes" else 4 for recipe in RECIPES}

COMPILED = {"compiled"}
"""Recipes for which the compiler must be enabled."""
