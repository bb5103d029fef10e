"""Begin and end of the local compute segments of a rank.

With tp each block communicates four times: after attention and after the MLP in forward, whose
outputs are partial sums, and before each of the two in backward, for the gradients of their inputs.
A local segment is the compute between two of these. A deadline around a communication would hide
the wait for the tp partner. In forward order, with ``|`` for the communication::

    place                        forward    backward
    block input                  begin
    attention_norm output                   begin  (not in the stage's first block)
    | attention input                       end    before its gradient is summed
    wo output, still partial     end
    | attention output           begin
    mlp_norm output                         begin
    | mlp input                             end
    w2 output, still partial     end
    |
    stage output                            begin

With tp 1 there is no communication, and the marks are at the same places, so that pace means the
same on every layout. Communication of FSDP is outside of segments: it gathers weights before the
forward of a block and reduces gradients after the last backward. The optimizer's update is also a
segment. Not covered, and small: residual add and head at the end of a stage's forward, the first
norm and the embedding at the end of its backward, the norms of the shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .pace import BACKWARD_PACES, FORWARD_PACES, OPTIMIZER_PACES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .model import Block, Stage
    from .pace import SegmentTimer


def time_segments(stage: Stage, timer: SegmentTimer) -> None:
    """Time each local segment of a stage, in forward and backward.

    The stage must already be sharded: the end of a segment must come before the tp communication
    that sharding adds after `wo` and `w2`.
    """
    blocks: list[Block] = list(stage.blocks.values())  # type: ignore[arg-type]
    for number, block in enumerate(blocks):
        _begin_forward_at_input(block, timer)
        if number:
            _begin_backward_at_output(block.attention_norm, timer)
        _end_backward_at_input(block.attention, timer)
        _end_forward_at_output(block.attention.wo, timer)
        _begin_forward_at_output(block.attention, timer)
        _begin_backward_at_output(block.mlp_norm, timer)
        _end_backward_at_input(block.mlp, timer)
        _end_forward_at_output(block.mlp.w2, timer)
    _begin_backward_at_output(stage, timer)


def time_optimizer(optimizer: torch.optim.Optimizer, timer: SegmentTimer) -> None:
    """Time each update, which is local to this rank."""

    def begin(*_: object) -> None:
        timer.begin()

    def end(*_: object) -> None:
        timer.end(OPTIMIZER_PACES)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)


def _begin_forward_at_input(module: nn.Module, timer: SegmentTimer) -> None:
    def hook(_module: nn.Module, _inputs: tuple[torch.Tensor, ...]) -> None:
        timer.begin()

    module.register_forward_pre_hook(hook)


def _begin_forward_at_output(module: nn.Module, timer: SegmentTimer) -> None:
    def hook(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        if isinstance(output, AsyncCollectiveTensor):
            # DTensor waits for the all-reduce when the result is first read. Wait here, so that
            # the segment does not include it.
            output.trigger_wait()  # type: ignore[no-untyped-call]
        timer.begin()

    module.register_forward_hook(hook)


def _end_forward_at_output(module: nn.Module, timer: SegmentTimer) -> None:
    def hook(_module: nn.Module, _inputs: object, _output: torch.Tensor) -> None:
        timer.end(FORWARD_PACES)

    # Prepended, so that it runs before the hook of tp, which all-reduces.
    module.register_forward_hook(hook, prepend=True)


def _begin_backward_at_output(module: nn.Module, timer: SegmentTimer) -> None:
    def begin(_gradient: torch.Tensor) -> None:
        timer.begin()

    def hook(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(begin)  # type: ignore[no-untyped-call]

    module.register_forward_hook(hook)


def _end_backward_at_input(module: nn.Module, timer: SegmentTimer) -> None:
    def end(_gradient: torch.Tensor) -> None:
        timer.end(BACKWARD_PACES)

    def hook(
        _module: nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        (x,) = inputs
        if not x.requires_grad:
            return None
        # A new node of the graph: with tp 1, x is the output of the norm, whose hook begins the
        # next segment and would run before this end.
        x = x.view_as(x)
        x.register_hook(end)  # type: ignore[no-untyped-call]
        return (x,)

    # Appended, so that it runs after the hook of tp, which makes x a DTensor whose gradient is
    # still partial here.
    module.register_forward_pre_hook(hook)
