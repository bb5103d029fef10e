"""Device, process group, meshes and sharding, all by PyTorch's own means."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from .chunks import ChunkedProducts
from .config import NUM_REPLICAS, DataParallel, Overlap, context_positions
from .exchange import ExchangeRows, GatherSequence
from .model import Experts

if TYPE_CHECKING:
    from torch import nn

    from .config import TrainerConfig
    from .model import Block, Stage
    from .overlap import EarlyReduction


T = TypeVar("T")


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
    store: torch._C._distributed_c10d.Store = torch._C._distributed_c10d.HashStore()
    rank, world_size = 0, 1
    if "WORLD_SIZE" in os.environ:
        # torchrun restarts its ranks with the store of those before (torch 2.13), which has their
        # addresses.
        shared, rank, world_size = next(iter(rendezvous("env://")))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = torch._C._distributed_c10d.PrefixStore(f"attempt-{attempt}", shared)
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if is_cuda else None,
    )


def broadcast_plain(value: T, *, src: int, group: dist.ProcessGroup | None) -> T:
    """Return the value of rank ``src``, which must be plain JSON, on all ranks of a group.

    A tuple becomes a list.
    """
    sent = torch.tensor(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor(len(sent))
    dist.broadcast(size, src=src, group=group)
    text = sent if dist.get_rank() == src else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, src=src, group=group)
    return cast("T", json.loads(bytes(text.tolist())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The device meshes of a job."""

    mesh: DeviceMesh
    """Axes ``pp``, one or of HSDP two for dp and cp together, and ``tp``."""

    data: DeviceMesh
    """The ranks that hold the same weights: all axes of ``mesh`` between pp and tp."""

    sequence: DeviceMesh | None
    """The ranks that divide a sequence; None without cp."""

    experts: DeviceMesh | None
    """The ranks that divide the experts; None without ep."""

    expert_data: DeviceMesh
    """The ranks that hold the same experts."""

    alone: DeviceMesh | None
    """This rank; None without overlap of ddp."""


def build_meshes(config: TrainerConfig, device: torch.device) -> Meshes:
    """Return the device meshes; the process group must exist."""
    layout = config.layout
    pp, tp, cp = {"pp": layout.pp}, {"tp": layout.tp}, {"cp": layout.cp}
    suffix = "_cp" if layout.cp > 1 else ""
    num_shards = layout.dp * layout.cp
    names = {f"dp{suffix}": num_shards}
    if config.data_parallel is DataParallel.HSDP:
        names = {"dp_replicate": NUM_REPLICAS, f"dp_shard{suffix}": num_shards // NUM_REPLICAS}
    is_ddp = config.data_parallel is DataParallel.DDP
    own = {"own": 1} if is_ddp and reduces_early(config, device) else {}
    mesh = _init_mesh(device, pp | names | own | tp)
    data = mesh[tuple(names)]
    sequence = experts = None
    expert_data = data
    if layout.cp > 1:
        sequence = _init_mesh(device, pp | {"dp": layout.dp} | cp | tp)["cp"]
    if layout.ep > 1:
        whole = _init_mesh(device, pp | {"edp": layout.dp // layout.ep, "ep": layout.ep} | cp | tp)
        experts = whole["ep"]
        expert_data = whole["edp", "cp"]._flatten("dp_mod_ep") if layout.cp > 1 else whole["edp"]
    return Meshes(
        mesh=mesh,
        data=data,
        sequence=sequence,
        experts=experts,
        expert_data=expert_data,
        alone=mesh["own"] if own else None,
    )


def _init_mesh(device: torch.device, sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def reduces_early(config: TrainerConfig, device: torch.device) -> bool:
    """Return whether gradients need an `EarlyReduction`."""
    return Overlap.DP in config.overlap and device.type == "cpu"


def shard_stage(
    stage: Stage, config: TrainerConfig, meshes: Meshes, reduction: EarlyReduction | None = None
) -> None:
    """Shard a stage in place: blocks over tp, sequences over cp, experts over ep, all over dp.

    Embedding, head, norms and experts are replicated over tp. Weights stay gathered from their
    first use in a step to its end, because a pipeline needs them in every micro-batch. Without a
    ``reduction``, FSDP reduces the gradients.
    """
    layout, mesh = config.layout, meshes.mesh
    blocks: list[Block] = list(stage.blocks.values())  # type: ignore[arg-type]
    if config.sequence_parallel:
        num_rows = config.rows_per_microbatch // layout.tp
        first = mesh["tp"].get_local_rank() * num_rows
        stage.rows = slice(first, first + num_rows)
    if config.scatter_gather:
        _divide_sends(stage, mesh["tp"])
    for block in blocks:
        if layout.tp > 1:
            parallelize_module(block, mesh["tp"], _tp_plan(block, config), src_data_rank=None)
        if Overlap.TP in config.overlap:
            for half in (block.attention, block.mlp):
                if not isinstance(half, Experts):
                    half.products = ChunkedProducts(
                        mesh.get_group("tp"), divides_rows=config.sequence_parallel
                    )
        if meshes.sequence is not None:
            _divide_sequences(block, config, meshes.sequence)
        if meshes.experts is not None and isinstance(block.mlp, Experts):
            block.mlp.exchange = ExchangeRows(
                meshes.experts.get_group(), num_experts=config.model.num_experts
            )
    share = functools.partial(_share_weights, config=config, meshes=meshes, reduction=reduction)
    own: set[nn.Parameter] = set()
    for block in blocks:
        if meshes.experts is not None and isinstance(block.mlp, Experts):
            share(block.mlp.experts, meshes.expert_data)
            own.update(block.mlp.experts.parameters())
    # Experts that no other rank has are not sharded, and not with the rest of the block.
    alone = own if meshes.expert_data.size() == 1 else None
    # The head on its own: its gradient is the first.
    heads = [stage.head] if stage.head is not None and Overlap.DP in config.overlap else []
    for module in (*blocks, *heads, stage):
        share(module, meshes.data, ignored=alone)


def keep_own_experts(stage: Stage, config: TrainerConfig, *, ep: int) -> None:
    """Leave only the experts of one position on ep."""
    num_own = config.model.num_experts // config.layout.ep
    for module in stage.modules():
        if isinstance(module, Experts):
            for number in list(module.experts):
                if int(number) // num_own != ep:
                    del module.experts[number]


def parameter_groups(stage: nn.Module) -> list[dict[str, list[torch.nn.Parameter]]]:
    """Return the weights in groups for a fused update: plain tensors, and DTensors by mesh."""
    groups: dict[DeviceMesh | None, list[torch.nn.Parameter]] = {}
    for parameter in stage.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def finish_gradients(stage: nn.Module, config: TrainerConfig, meshes: Meshes) -> None:
    """Complete the gradients that dp has averaged.

    Those of experts are a mean over the ranks with the same experts, and their rows came from
    ``ep`` times as many. Weights that are replicated over tp have seen only a part of the rows with
    sequence parallelism, and experts always: one all-reduce sums them.
    """
    partial = []
    for name, parameter in stage.named_parameters():
        gradient = local_part(parameter.grad)
        if gradient is None:
            continue
        if config.layout.ep > 1 and is_of_expert(name):
            gradient.div_(config.layout.ep)
        if config.layout.tp > 1 and _is_partial(name, config):
            partial.append(gradient)
    if partial:
        flat = torch.cat([gradient.flatten() for gradient in partial])
        dist.all_reduce(flat, group=meshes.mesh.get_group("tp"))
        sizes = [gradient.numel() for gradient in partial]
        for gradient, total in zip(partial, torch.split(flat, sizes), strict=True):
            gradient.copy_(total.view_as(gradient))


def is_of_expert(name: str) -> bool:
    """Return whether a parameter is that of an expert, by its name."""
    return ".experts." in name


@overload
def local_part(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def local_part(tensor: torch.Tensor | None) -> torch.Tensor | None: ...
def local_part(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's shard of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


SHARDED_BY_TP = tuple(f".{name}.weight" for name in ("wq", "wk", "wv", "wo", "w1", "w2", "w3"))
"""Ends of the names of weights of which tp gives each rank a part, except those of experts."""


def _is_partial(name: str, config: TrainerConfig) -> bool:
    if config.model.num_experts and ".mlp." in name:
        return True
    return config.sequence_parallel and not name.endswith(SHARDED_BY_TP)


def _share_weights(
    module: nn.Module,
    data: DeviceMesh,
    *,
    config: TrainerConfig,
    meshes: Meshes,
    reduction: EarlyReduction | None,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    if data.size() == 1:
        return
    if reduction is not None:
        shards, replicas = data, None
        if meshes.alone is not None:
            shards, replicas = meshes.alone, data.get_group()
        elif data.ndim > 1:
            names = data.mesh_dim_names or ()
            shards, replicas = data[names[1]], data.get_group(names[0])
        reduction.share_weights(module, shards=shards, replicas=replicas, ignored=ignored)
    elif config.data_parallel is DataParallel.DDP:
        # DDP as a composable function: unlike the class, it takes DTensors and split backwards.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(module, mesh=data, ignored_params=ignored)
    else:
        fully_shard(module, mesh=data, reshard_after_forward=False, ignored_params=ignored)


def _divide_sends(stage: Stage, tp: DeviceMesh) -> None:
    """Let each rank of a tp group send its part of the rows, and gather them where they arrive.

    Source:
        Narayanan et al., arXiv 2104.04473, section 4.1.
    """
    if stage.embedding is None:
        gather = PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
        )
        parallelize_module(stage, tp, gather, src_data_rank=None)
    if stage.head is None:
        scatter = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
        parallelize_module(stage, tp, scatter, src_data_rank=None)
        # A split backward detaches the output in place, which a part of a tensor does not allow.
        stage.register_forward_hook(lambda _stage, _inputs, output: output.clone())


def _divide_sequences(block: Block, config: TrainerConfig, sequence: DeviceMesh) -> None:
    size, length = config.layout.cp, config.model.seq_length
    positions = [context_positions(cp, num_ranks=size, seq_length=length) for cp in range(size)]
    device = block.attention.cos.device
    block.attention.divide_sequences(
        GatherSequence(sequence.get_group()),
        torch.tensor(positions[sequence.get_local_rank()], device=device),
        torch.tensor(positions, device=device).flatten(),
    )


def _tp_plan(block: Block, config: TrainerConfig) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel plan of one block: an all-reduce per half and direction.

    Of a parallel block the norm's output becomes a DTensor, once for both halves, and their parts
    are added up together: one all-reduce in each direction.

    With sequence parallelism it is a gather before each half and a reduce-scatter after it. The
    inputs of attention and MLP become DTensors once, not for each matmul that reads them, so that
    their gradients are summed once. Experts are not divided: each tp rank sends its part of the
    rows.
    """
    outside = Shard(0) if config.sequence_parallel else Replicate()
    if config.model.parallel_block:
        return {
            "attention_norm": PrepareModuleOutput(
                output_layouts=outside,
                desired_output_layouts=Replicate(),
                use_local_output=False,
            ),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            **{f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")},
            **{
                name: RowwiseParallel(output_layouts=Partial(), use_local_output=False)
                for name in ("attention.wo", "mlp.w2")
            },
            "total": PrepareModuleInput(
                input_layouts=(Partial(),),
                desired_input_layouts=(outside,),
                use_local_output=True,
            ),
        }
    whole = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "attention": whole,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=outside),
    }
    if Overlap.TP in config.overlap:
        del plan["attention"]  # the products communicate
    if not isinstance(block.mlp, Experts):
        if Overlap.TP not in config.overlap:
            plan["mlp"] = whole
        return plan | {
            "mlp.w1": ColwiseParallel(),
            "mlp.w3": ColwiseParallel(),
            "mlp.w2": RowwiseParallel(output_layouts=outside),
        }
    if config.sequence_parallel:
        return plan
    parts = PrepareModuleInputOutput(
        input_layouts=(outside,),
        desired_input_layouts=(Shard(0),),
        use_local_input=True,
        output_layouts=(Shard(0),),
        desired_output_layouts=(outside,),
    )
    return plan | {"mlp": parts}
