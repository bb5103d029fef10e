"""Forward and backward of each micro-batch on each stage of `torch.distributed.pipelining`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..span import NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..patches import Patches
    from .forward_backward import Compute

METHODS = {
    "forward_one_chunk": ("forward", SpanKind.FORWARD),
    "backward_one_chunk": ("backward", SpanKind.BACKWARD),
    "backward_weight_one_chunk": ("backward weight", SpanKind.BACKWARD),
}
"""What a stage does to one micro-batch; each takes the micro-batch's index first."""


def capture_pipeline(
    compute: Compute, patches: Patches, stage_begins: Callable[[Any], None]
) -> None:
    """Make a span of what any pipeline stage does to a micro-batch, and tell which stage does."""
    from torch.distributed.pipelining import stage

    for method, (name, kind) in METHODS.items():
        wrap = functools.partial(_traced_chunk, compute, stage_begins, name, kind)
        patches.wrap(stage._PipelineStageBase, method, wrap)


def chunk_of(stage: Any) -> int:  # noqa: ANN401 - a private class of torch
    """Return which of this rank's model chunks a stage is; `NONE` where it does not tell.

    Stages are dealt to ranks in rounds, each round as long as the pipeline
    (looped or V-shaped alike), and a rank gets one stage a round.
    """
    index, size = getattr(stage, "stage_index", None), getattr(stage, "group_size", None)
    return index // size if type(index) is int and type(size) is int and size else NONE


def _traced_chunk(
    compute: Compute,
    stage_begins: Callable[[Any], None],
    name: str,
    kind: SpanKind,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(stage: Any, microbatch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # A zero-bubble schedule asks for the gradients of the input alone, by keyword.
        part = f"{name} input" if kwargs.get("full_backward") is False else name
        stage_begins(stage)
        on = (getattr(stage, "device", None),)
        with compute.span(part, kind, microbatch=microbatch, chunk=chunk_of(stage), on=on):
            return original(stage, microbatch, *args, **kwargs)

    return call
