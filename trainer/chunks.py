"""Products of attention and MLP over tp in chunks of rows, each sent while the next is computed.

What PyTorch has for this (`torch.ops.symm_mem`) works on CUDA alone. Weights stay DTensors of the
same shards as without chunks; only their local parts are multiplied here.

A product is a local segment for `SegmentTimer`, half of its attention's or MLP's pace, with a
deadline for each chunk; it does not count waits for chunks that are gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .model import Products
from .pace import FORWARD_PACES, INPUT_PACES, WEIGHT_PACES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from .pace import SegmentTimer

NUM_CHUNKS = 4
SHARE = 0.5
"""Share of the products into attention or MLP in its pace; the other half is the one out of it."""


class ChunkedProducts(Products):
    """The products of one half of a block, divided over a tp group.

    Args:
        group: The group.
        divides_rows: Whether its ranks have different rows outside (sequence parallelism): then
            they are gathered before the products, and reduced and scattered after them.
    """

    def __init__(self, group: dist.ProcessGroup, *, divides_rows: bool) -> None:
        self.group = group
        self.size = group.size() if divides_rows else 1
        self.timer: SegmentTimer | None = None

    def enter(self, x: torch.Tensor, *linears: nn.Module) -> tuple[torch.Tensor, ...]:
        """Return the product of each linear, of which this rank has a part of the outputs.

        Args:
            x: Shape ``(rows of this rank, hidden)``.
            linears: Modules with a weight.

        Returns:
            Each of shape ``(rows, its outputs)``.
        """
        weights = [linear.weight.to_local() for linear in linears]  # type: ignore[operator,union-attr]
        outputs: tuple[torch.Tensor, ...] = _Enter.apply(self, x, *weights)  # type: ignore[no-untyped-call]
        return outputs

    def leave(self, x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
        """Return the sum over the group of the products of its parts of the inputs.

        Args:
            x: Shape ``(rows, this rank's inputs)``.
            linear: A module with a weight.

        Returns:
            Shape ``(rows of this rank, hidden)``.
        """
        output: torch.Tensor = _Leave.apply(self, x, linear.weight.to_local())  # type: ignore[no-untyped-call,operator,union-attr]
        return output

    def gather_multiply(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], *, paces: float
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Gather the rows of the group, and multiply each chunk while the next ones are gathered.

        Returns:
            The product with each of ``weights``, and the gathered rows.
        """
        if self.size == 1:
            return self.timed(lambda: [x @ weight for weight in weights], paces), x
        launched = []
        for part in x.chunk(NUM_CHUNKS):
            gathered = part.new_empty((self.size, *part.shape))
            # In a list: the function for one tensor has another name in each version of torch.
            work = dist.all_gather(
                list(gathered.unbind()), part.contiguous(), group=self.group, async_op=True
            )
            launched.append((work, gathered))
        products = []
        timer, num = self.timer, len(launched)
        if timer is not None:
            timer.begin()
        for index, (work, gathered) in enumerate(launched):
            if timer is None:
                work.wait()
            else:
                timer.exclude(work.wait)
            products.append([gathered @ weight for weight in weights])
            self._pass(paces, index + 1, num)
        whole = torch.cat([gathered for _, gathered in launched], dim=1).flatten(0, 1)
        return [
            torch.cat(parts, dim=1).flatten(0, 1) for parts in zip(*products, strict=True)
        ], whole

    def multiply_reduce(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, paces: float
    ) -> Callable[[], torch.Tensor]:
        """Multiply in chunks, and sum each over the group while the next one is multiplied.

        Args:
            pairs: Rows and weight of each product; the products are summed.
            paces: Length of the segment.

        Returns:
            Waits for the sums and returns those of this rank's rows.
        """
        divided = [
            (x.reshape(self.size, -1, x.shape[-1]).chunk(NUM_CHUNKS, dim=1), weight)
            for x, weight in pairs
        ]
        num = len(divided[0][0])
        launched = []
        if self.timer is not None:
            self.timer.begin()
        for index in range(num):
            first, *others = (chunks[index] @ weight for chunks, weight in divided)
            product = sum(others, start=first)
            self._pass(paces, index + 1, num)
            launched.append(self._reduce(product))

        def finish() -> torch.Tensor:
            for work, _ in launched:
                work.wait()
            return torch.cat([own for _, own in launched])

        return finish

    def timed(self, compute: Callable[[], Any], paces: float) -> Any:  # noqa: ANN401
        """Return the result of a segment."""
        if self.timer is not None:
            self.timer.begin()
        result = compute()
        if self.timer is not None:
            self.timer.end(paces)
        return result

    def _pass(self, paces: float, num_done: int, num: int) -> None:
        if self.timer is None:
            return
        if num_done < num:
            self.timer.reach(paces * num_done / num)
        else:
            self.timer.end(paces)

    def _reduce(self, product: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        """Launch the sum of a chunk, shape ``(parts, rows of each, columns)``."""
        if self.size == 1:
            own = product.squeeze(0)
            return dist.all_reduce(own, group=self.group, async_op=True), own
        parts = list(product.unbind())
        own = torch.empty_like(parts[0])
        return dist.reduce_scatter(own, parts, group=self.group, async_op=True), own


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        products: ChunkedProducts,
        x: torch.Tensor,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        transposed = [weight.t() for weight in weights]
        outputs, whole = products.gather_multiply(x, transposed, paces=FORWARD_PACES * SHARE)
        ctx.products = products
        ctx.save_for_backward(whole, *weights)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        whole, *weights = ctx.saved_tensors
        pairs = list(zip(gradients, weights, strict=True))
        finish = ctx.products.multiply_reduce(pairs, paces=INPUT_PACES * SHARE)
        of_weights = ctx.products.timed(
            lambda: [gradient.t() @ whole for gradient in gradients], WEIGHT_PACES * SHARE
        )
        return None, finish(), *of_weights


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        products: ChunkedProducts,
        x: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        ctx.products = products
        ctx.save_for_backward(x, weight)
        return products.multiply_reduce([(x, weight.t())], paces=FORWARD_PACES * SHARE)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        (of_x,), whole = ctx.products.gather_multiply(gradient, [weight], paces=INPUT_PACES * SHARE)
        of_weight = ctx.products.timed(lambda: whole.t() @ x, WEIGHT_PACES * SHARE)
        return None, of_x, of_weight
