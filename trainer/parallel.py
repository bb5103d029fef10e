"""Device, process group, mesh, sharding and pipeline schedule, all by PyTorch's own means."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from .model import token_loss

if TYPE_CHECKING:
    from rankscope.tracer.topology import Layout

    from .config import TrainerConfig
    from .faults.rank_faults import RankFaults
    from .model import Stage


def pick_device() -> torch.device:
    """Return this rank's CUDA device, or the CPU with one thread if there is none.

    One thread, because the ranks of a machine without CUDA share its cores.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def join_job(device: torch.device) -> None:
    """Join the process group: NCCL on CUDA, else gloo. Without torchrun it has one rank."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if "WORLD_SIZE" in os.environ:
        # torchrun restarts its ranks with the store of those before (torch 2.13), which has their
        # addresses.
        store, rank, world_size = next(iter(rendezvous("env://")))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            backend,
            store=torch._C._distributed_c10d.PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=world_size,
            device_id=device_id,
        )
    else:
        dist.init_process_group(
            backend,
            store=torch._C._distributed_c10d.HashStore(),
            rank=0,
            world_size=1,
            device_id=device_id,
        )


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the device mesh with the axes `MESH_AXES`; the process group must exist."""
    return init_device_mesh(
        device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=MESH_AXES
    )


def shard_stage(stage: Stage, mesh: DeviceMesh) -> None:
    """Shard the stage's weights in place: blocks over tp by DTensor, all over dp by FSDP2.

    Embedding and head are replicated over tp. Weights stay gathered from their first use in a
    step to its end, because a pipeline needs them in every micro-batch.
    """
    if mesh["tp"].size() > 1:
        for block in stage.blocks.values():
            parallelize_module(block, mesh["tp"], _tp_plan(), src_data_rank=None)
    if mesh["dp"].size() > 1:
        for block in stage.blocks.values():
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)


def parameter_groups(stage: Stage) -> list[dict[str, list[torch.nn.Parameter]]]:
    """Return the weights in groups for a fused update: DTensors, and plain tensors.

    A stage has both kinds if it is sharded by tp and not by dp.
    """
    groups: dict[bool, list[torch.nn.Parameter]] = {}
    for parameter in stage.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _tp_plan() -> dict[str, ParallelStyle]:
    """Return the tensor-parallel plan of one block: an all-reduce per half and direction.

    The inputs of attention and MLP become DTensors once, not for each matmul that reads them, so
    that their gradients are summed once.
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


MESH_AXES = ("pp", "dp", "tp")
"""Axes of the device mesh, the slowest-changing first."""


class FaultyStage(PipelineStage):
    """A pipeline stage that applies the faults of its rank before it launches work."""

    faults: RankFaults

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run one forward."""
        self.faults.before_forward(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run one backward."""
        self.faults.before_backward(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the step's gradients."""
        self.faults.before_reduction()
        super().perform_reduce_grad(grad_scale_factor)


def build_schedule(
    stage: Stage,
    config: TrainerConfig,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    faults: RankFaults,
) -> Schedule1F1B:
    """Return the 1F1B schedule of this rank's stage.

    Shapes are given, so that no rank runs an extra forward to infer them.
    """
    stage_number = mesh["pp"].get_local_rank()
    is_last = stage_number == config.layout.pp - 1
    model = config.model
    tokens = torch.empty(config.microbatch_size, model.seq_length, dtype=torch.int64, device=device)
    hidden, logits = (
        torch.empty(tokens.numel(), width, device=device, requires_grad=True)
        for width in (model.hidden_size, model.vocab_size)
    )
    pipeline_stage = FaultyStage(
        stage,
        stage_number,
        config.layout.pp,
        device,
        input_args=tokens if stage_number == 0 else hidden,
        output_args=logits if is_last else hidden,
        group=mesh.get_group("pp"),
    )
    pipeline_stage.faults = faults
    return Schedule1F1B(pipeline_stage, config.num_microbatches, loss_fn=token_loss)
