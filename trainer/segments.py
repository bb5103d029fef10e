"""Begin and end of the local compute segments of a rank.

A local segment is the compute between two communications: a deadline around a communication would
hide the wait for its partners. In each half of a block it is, in forward,

* attention: from its input to the output of `wo`, which with tp is a partial sum. With cp it is two
  segments of half the length, before and after the keys and values are gathered;
* a dense MLP: from its input to the output of `w2`, a partial sum too;
* experts: from the tokens that they received to those that they send back;

and in backward from the gradient of that output to that of that input, which with tp is a partial
sum as well. So the marks are inside of what tp, sp, cp and ep add before and after these modules,
and at the same places without them: pace means the same on every layout. A backward that is split
computes the gradients of the weights of all layers of a chunk in one segment. Communication of
FSDP is outside of segments: it gathers weights before the forward of a block and reduces gradients
after the last backward. The optimizer's update is also a segment. Not covered, and small: norms,
residuals, router, embedding, head and the norms of the shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from .chunks import ChunkedProducts
from .model import Experts
from .optimizer import Lamb
from .pace import (
    BACKWARD_PACES,
    FORWARD_PACES,
    INPUT_PACES,
    OPTIMIZER_PACES,
    SEGMENTS_PER_LAYER,
    WEIGHT_PACES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

    from .model import Block, Stage
    from .pace import SegmentTimer


Result = TypeVar("Result")


class BackwardPart(StrEnum):
    """Part of a backward, in the words of `torch.distributed.pipelining`."""

    FULL = "full"
    INPUT = "input"
    """The gradient of the stage's input; those of the weights follow."""

    WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the forward of a block."""

    module: nn.Module
    side: Literal["input", "output"]


class StageSegments:
    """The segments of one stage, which must be sharded already."""

    def __init__(self, stage: Stage, timer: SegmentTimer) -> None:
        self._timer = timer
        self._backward_paces = BACKWARD_PACES
        self._is_deferred = False
        self._num_segments = SEGMENTS_PER_LAYER * len(stage.blocks)
        for block in stage.blocks.values():
            for half in (block.attention, block.mlp):
                products = getattr(half, "products", None)
                if isinstance(products, ChunkedProducts):
                    products.timer = timer
            for begin, end, share in _halves(block):  # type: ignore[arg-type]
                self._begin_at(begin, share)
                self._end_at(end, share)

    def backward(self, part: BackwardPart, compute: Callable[[], Result]) -> Result:
        """Run a part of the backward of a micro-batch, with its segments."""
        self._backward_paces = INPUT_PACES if part is BackwardPart.INPUT else BACKWARD_PACES
        self._is_deferred = part is BackwardPart.WEIGHT
        if self._is_deferred:
            self._timer.begin()
        result = compute()
        if self._is_deferred:
            self._timer.end(WEIGHT_PACES * self._num_segments)
            self._is_deferred = False
        return result

    def _begin_at(self, mark: Mark, share: float) -> None:
        def end_backward(_gradient: torch.Tensor) -> None:
            if not self._is_deferred:
                self._timer.end(self._backward_paces * share)

        def begin(x: torch.Tensor) -> torch.Tensor:
            _wait(x)
            self._timer.begin()
            if x.requires_grad:
                # A new node of the graph: only here is the gradient complete, and the sum over a
                # group, which tp adds, has not begun.
                x = x.view_as(x)
                x.register_hook(end_backward)  # type: ignore[no-untyped-call]
            return x

        # Appended, so that it runs after the hooks of tp.
        _hook(mark, begin, prepend=False)

    def _end_at(self, mark: Mark, share: float) -> None:
        def begin_backward(gradient: torch.Tensor) -> None:
            _wait(gradient)
            if not self._is_deferred:
                self._timer.begin()

        def end(x: torch.Tensor) -> torch.Tensor:
            self._timer.end(FORWARD_PACES * share)
            if x.requires_grad:
                x.register_hook(begin_backward)  # type: ignore[no-untyped-call]
            return x

        # The output's is prepended, so that it runs before that of tp, which sums over the group.
        _hook(mark, end, prepend=mark.side == "output")


def time_optimizer(optimizer: torch.optim.Optimizer, timer: SegmentTimer) -> None:
    """Time each update, of LAMB the part before its communication."""

    def begin(*_: object) -> None:
        timer.begin()

    def end(*_: object) -> None:
        timer.end(OPTIMIZER_PACES)

    optimizer.register_step_pre_hook(begin)
    if isinstance(optimizer, Lamb):
        optimizer.before_exchange = end
    else:
        optimizer.register_step_post_hook(end)


def _halves(block: Block) -> Iterator[tuple[Mark, Mark, float]]:
    """Yield begin and end of each forward segment of a block, and its share of a whole one."""
    attention, mlp = block.attention, block.mlp
    if isinstance(attention.products, ChunkedProducts):
        pass  # it times itself
    elif attention.gather is None:
        yield Mark(attention, "input"), Mark(attention.wo, "output"), 1.0
    else:
        yield Mark(attention, "input"), Mark(attention.gather, "input"), 0.5
        yield Mark(attention.gather, "output"), Mark(attention.wo, "output"), 0.5
    if isinstance(mlp, Experts):
        yield Mark(mlp.experts, "input"), Mark(mlp.experts, "output"), 1.0
    elif not isinstance(mlp.products, ChunkedProducts):
        yield Mark(mlp, "input"), Mark(mlp.w2, "output"), 1.0


def _hook(mark: Mark, change: Callable[[torch.Tensor], torch.Tensor], *, prepend: bool) -> None:
    """Let ``change`` replace the first input or the output of a module."""
    if mark.side == "input":

        def before(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return change(inputs[0]), *inputs[1:]

        mark.module.register_forward_pre_hook(before, prepend=prepend)
    else:

        def after(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            return change(output)

        mark.module.register_forward_hook(after, prepend=prepend)


def _wait(x: torch.Tensor) -> None:
    """Wait for the communication of which ``x`` is the result, before a segment begins.

    DTensor does so only when the result is first read, which would be inside of the segment.
    """
    local = x._local_tensor if isinstance(x, DTensor) else x
    if isinstance(local, AsyncCollectiveTensor):
        local.trigger_wait()  # type: ignore[no-untyped-call]
