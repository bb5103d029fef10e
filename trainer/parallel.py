"""Device, mesh and sharding: PyTorch's own parallelism, put together once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from .ranks import MESH_AXES

if TYPE_CHECKING:
    from rankscope.tracer.topology import Layout

    from .model import Stage


def pick_device() -> torch.device:
    """Return this rank's CUDA device where there is one, else the CPU with one thread.

    One thread: the ranks of a machine without CUDA share its cores.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def join_job(device: torch.device) -> None:
    """Join the job's process group: NCCL on CUDA, gloo else; alone where torchrun is absent."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, device_id=device_id)
    else:
        dist.init_process_group(
            backend,
            store=torch._C._distributed_c10d.HashStore(),
            rank=0,
            world_size=1,
            device_id=device_id,
        )


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh with the axes `MESH_AXES`; the process group must stand."""
    return init_device_mesh(
        device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=MESH_AXES
    )


def shard_stage(stage: Stage, mesh: DeviceMesh) -> None:
    """Shard the stage's weights in place: blocks over tp by DTensor, all over dp by FSDP2.

    Embedding and head are replicated over tp. Weights stay gathered from their
    first use in a step to its end, since a pipeline needs them once a micro-batch.
    """
    if mesh["tp"].size() > 1:
        for block in stage.blocks.values():
            parallelize_module(block, mesh["tp"], _tp_plan(), src_data_rank=None)
    if mesh["dp"].size() > 1:
        for block in stage.blocks.values():
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)


def parameter_groups(stage: Stage) -> list[dict[str, list[torch.nn.Parameter]]]:
    """Return the weights in groups that one fused update can take: DTensors apart from tensors.

    With tp and without dp the stage has both.
    """
    groups: dict[bool, list[torch.nn.Parameter]] = {}
    for parameter in stage.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _tp_plan() -> dict[str, ParallelStyle]:
    """Return how one block is split: one all-reduce a half and direction.

    The inputs of attention and MLP become DTensors once, not once for each of
    the matmuls that read them, so that their gradients are summed once.
    """
    replicated = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
    )
    return {
        "attention": replicated,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "mlp": replicated,
        "mlp.w1": ColwiseParallel(),
        "mlp.w3": ColwiseParallel(),
        "mlp.w2": RowwiseParallel(),
    }
