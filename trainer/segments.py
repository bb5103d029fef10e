"""Where the local compute segments of a rank begin and end.

Under tp each block communicates four times: after attention and after the MLP
in forward (their outputs are partial sums), and before each of the two in
backward (the gradients of their inputs are). Between two of these lies one
local segment; a deadline around any of them would swallow the wait for the tp
partner. In forward order, ``|`` marking the communication::

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

Where tp is 1 there is no communication and the same places hold, so that pace
means the same on every layout. FSDP gathers weights at a block's entry before
its forward begins, and reduces gradients after the last backward: outside too.
The optimizer's update is a segment too. What is left out is small: residual add
and head at the stage's forward end, the first norm and the embedding at its
backward end, the shards' norms.
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
    """Make ``timer`` see each local segment of ``stage``, in forward and backward.

    Call it when the stage is already sharded: the ends must come before the tp
    communication that the sharding put behind `wo` and `w2`.
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
    """Make ``timer`` see each update, which touches this rank's shards alone."""

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
            # DTensor leaves the wait for the all-reduce to whoever reads the
            # result: begin only when it is there, else the wait is inside.
            output.trigger_wait()  # type: ignore[no-untyped-call]
        timer.begin()

    module.register_forward_hook(hook)


def _end_forward_at_output(module: nn.Module, timer: SegmentTimer) -> None:
    def hook(_module: nn.Module, _inputs: object, _output: torch.Tensor) -> None:
        timer.end(FORWARD_PACES)

    # Prepended: tp's own hook on this module, which comes next, all-reduces.
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
        # A node of its own: where tp is 1, x is the norm's very output, whose
        # hook begins the next segment and would run before this end.
        x = x.view_as(x)
        x.register_hook(end)  # type: ignore[no-untyped-call]
        return (x,)

    # Appended: tp's own hook, which came first, made x a DTensor whose
    # gradient is still partial when it arrives here.
    module.register_forward_pre_hook(hook)
