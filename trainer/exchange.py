"""Communication inside a layer: keys and values over cp, rows of experts over ep.

Each blocks its thread until it is done, in forward and backward, so that its span is its wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from .model import LocalExperts

SEQUENCE_DIM = 3


class GatherSequence(nn.Module):
    """Gathers keys and values of all parts of a sequence, as ring attention's all-gather form.

    Source:
        Dubey et al., "The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.2.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, shape ``(2, batch, heads, seq, head_size)``, of all ranks along seq."""
        output: torch.Tensor = _Gather.apply(x, self._group)  # type: ignore[no-untyped-call]
        return output


class ExchangeRows:
    """Sends rows to the ranks of their experts by all-to-all, and the results back."""

    def __init__(self, group: dist.ProcessGroup, *, num_experts: int) -> None:
        self._group = group
        self._shape = (group.size(), num_experts // group.size())

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, experts: LocalExperts
    ) -> torch.Tensor:
        """Return each row's result, in the order of ``rows``."""
        sent = counts.view(self._shape)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        num_sent, num_received = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = _exchange(rows, num_sent, num_received, self._group)
        # They arrive by source, then by expert.
        expert = torch.arange(self._shape[1], device=rows.device).repeat(self._shape[0])
        order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
        output = experts(arrived[order], received.sum(0).tolist())
        return _exchange(output[order.argsort()], num_received, num_sent, self._group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ANN401
        ctx.group = group
        gathered = x.new_empty((group.size(), *x.shape))
        # In a list: the function for one tensor has another name in each version of torch.
        dist.all_gather(list(gathered.unbind()), x.contiguous(), group=group)
        return torch.cat(gathered.unbind(), dim=SEQUENCE_DIM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        chunks = gradient.chunk(ctx.group.size(), dim=SEQUENCE_DIM)
        parts = [part.contiguous() for part in chunks]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: torch.Tensor,
        num_sent: list[int],
        num_received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (num_sent, num_received), group
        return _all_to_all(rows, num_sent, num_received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        num_sent, num_received = ctx.sizes
        return _all_to_all(gradient, num_received, num_sent, ctx.group), None, None, None


def _exchange(
    rows: torch.Tensor, num_sent: list[int], num_received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    output: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        rows, num_sent, num_received, group
    )
    return output


def _all_to_all(
    rows: torch.Tensor, num_sent: list[int], num_received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    output = rows.new_empty((sum(num_received), *rows.shape[1:]))
    dist.all_to_all_single(output, rows.contiguous(), num_received, num_sent, group=group)
    return output
