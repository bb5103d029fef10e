"""The optimizers: PyTorch's fused AdamW, and LAMB, which PyTorch lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from .config import OptimizerKind
from .parallel import local_part, parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from .config import TrainerConfig

BETAS = (0.9, 0.999)
EPSILON = 1e-6
WEIGHT_DECAY = 1e-2


def build_optimizer(stage: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a rank's part of the model, which must be sharded already."""
    if config.optimizer is OptimizerKind.LAMB:
        return Lamb(stage.parameters(), lr=config.learning_rate)
    return torch.optim.AdamW(parameter_groups(stage), lr=config.learning_rate, fused=True)


class Lamb(torch.optim.Optimizer):
    """Adam whose step of each weight is in proportion to the weight's norm.

    With Adam's direction ``u = m / (sqrt(v) + eps) + decay * w`` of a weight ``w``::

        w -= lr * |w| / |u| * u

    The norms are those of whole weights, on every layout: squares of shards are summed over the
    mesh, of all weights at once. A weight or direction that is zero has the ratio 1.

    Source:
        You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
        (arXiv 1904.00962), algorithm 2, with the identity for phi.
    """

    def __init__(self, parameters: Any, *, lr: float, weight_decay: float = WEIGHT_DECAY) -> None:  # noqa: ANN401 - as of the base
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self.before_exchange: Callable[[], None] | None = None
        """Called between the local part of an update and its communication."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient."""
        weights: list[torch.Tensor] = []
        directions: list[torch.Tensor] = []
        rates: list[float] = []
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weights.append(weight)
                    directions.append(
                        self._direction(weight, local_part(weight.grad), group["weight_decay"])
                    )
                    rates.append(group["lr"])
        squares = torch.stack(
            [
                torch.stack([part.double().square().sum() for part in (local_part(w), u)])
                for w, u in zip(weights, directions, strict=True)
            ]
        )
        if self.before_exchange is not None:
            self.before_exchange()
        _sum_over_shards(squares, weights)
        norms = squares.sqrt()
        ratios = torch.where((norms > 0).all(1), norms[:, 0] / norms[:, 1], 1.0).tolist()
        for weight, direction, rate, ratio in zip(weights, directions, rates, ratios, strict=True):
            local_part(weight).sub_(direction, alpha=rate * ratio)

    def _direction(
        self, weight: torch.Tensor, gradient: torch.Tensor, decay: float
    ) -> torch.Tensor:
        """Update the moments of a weight, and return its direction on this rank."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(weight) for _ in range(2))
        state["step"] += 1
        mean, square = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        unbiased, unbiased_square = (
            moment / (1 - beta ** state["step"].item())
            for moment, beta in zip((mean, square), BETAS, strict=True)
        )
        direction: torch.Tensor = unbiased / (unbiased_square.sqrt() + EPSILON)
        return direction.add_(local_part(weight), alpha=decay)


def _sum_over_shards(squares: torch.Tensor, weights: list[torch.Tensor]) -> None:
    """Sum the rows of ``squares``, one for each weight, over the ranks that share the weight."""
    rows: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for row, weight in enumerate(weights):
        rows.setdefault(_shard_groups(weight), []).append(row)
    for groups, own in rows.items():
        total = squares[own]
        for group in groups:
            dist.all_reduce(total, group=group)
        squares[own] = total


def _shard_groups(weight: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(weight, DTensor):
        return ()
    mesh = weight.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, place in enumerate(weight.placements)
        if not isinstance(place, Replicate) and mesh.size(axis) > 1
    )
