"""The step's last collective: the gradients' norm and the loss, over the whole mesh at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.tracer.topology import Layout


class StepTotals(NamedTuple):
    """What all ranks know after the step's last collective."""

    gradient_norm: float
    """Of the whole model's gradient, before clipping."""

    loss: float
    """Mean over all tokens of the step, nats."""


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    *,
    max_norm: float,
    layout: Layout,
    loss_share: torch.Tensor,
) -> StepTotals:
    """Scale all gradients so that the whole model's norm is at most ``max_norm``.

    One all-reduce over the world. Each rank adds up the squares of its shards,
    each divided by the number of ranks that hold a copy of it.

    Args:
        parameters: This rank's parameters; those without a gradient are passed over.
        max_norm: Largest norm that is left alone.
        layout: The job's layout.
        loss_share: Scalar; the shares of all ranks sum to the step's loss.
    """
    gradients: list[torch.Tensor] = []
    total = torch.zeros(2, dtype=torch.float64, device=loss_share.device)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        num_copies = layout.dp * layout.tp // _num_shards(parameter.grad)
        local = _local(parameter.grad)
        gradients.append(local)
        total[0] += local.double().square().sum() / num_copies
    total[1] = loss_share
    dist.all_reduce(total)
    square, loss = total.tolist()
    norm = math.sqrt(square)
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    return StepTotals(norm, loss)


def _num_shards(tensor: torch.Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    sizes = tensor.device_mesh.shape
    return math.prod(
        size
        for size, place in zip(sizes, tensor.placements, strict=True)
        if isinstance(place, Shard)
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
