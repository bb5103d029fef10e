"""Megatron-LM's training loop, which knows no callbacks.

``trace()`` before ``pretrain(...)``, with ``RANKSCOPE_TRACE=DIR`` or ``spool=``.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

import tracer
from tracer.capture.patch import Patches
from tracer.flops import ModelFlops, megatron_flops
from tracer.integrations.settings import Placement, harmless, named, traced_save
from tracer.topology import Coords, Layout

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

CONFIG = (
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "recompute_granularity",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "sequence_parallel",
)
"""Arguments that explain a job's speed."""


def trace(*, spool: str | os.PathLike[str] | None = None) -> Patches:
    """Record the steps of ``megatron.training.training.train`` from now on.

    A step lasts from one ``train_step`` to the next, so that a save belongs to
    the step that it follows. Losses stay on the device and are not read.

    Args:
        spool: Folder for the records; None: ``RANKSCOPE_TRACE``.

    Returns:
        What was replaced in ``megatron.training.training``; ``undo()`` puts it back.
    """
    training = import_module("megatron.training.training")
    patches = Patches()
    steps = _Steps(spool)
    patches.wrap(training, "train_step", steps.around)
    for name in ("train", "save_checkpoint"):
        if hasattr(training, name):
            patches.wrap(training, name, steps.ending if name == "train" else traced_save)
    return patches


class _Steps:
    """Which step runs."""

    def __init__(self, spool: str | os.PathLike[str] | None) -> None:
        self._spool = spool
        self._has_begun = False

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(
            forward_step_func: Any,  # noqa: ANN401
            data_iterator: Any,  # noqa: ANN401
            model: Any,  # noqa: ANN401 - a list of chunks
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            if self._has_begun:
                self._end()
            else:
                self._has_begun = True
                self._begin(model)
            return original(forward_step_func, data_iterator, model, *args, **kwargs)

        return train_step

    def ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                return original(*args, **kwargs)
            finally:
                if self._has_begun:
                    self._has_begun = False
                    self._end()

        return train

    @harmless
    def _end(self) -> None:
        tracer.step(tokens=tokens_of_step())

    @harmless
    def _begin(self, model: Any) -> None:  # noqa: ANN401
        args = import_module("megatron.training").get_args()
        flops = flops_of(args)
        tracer.install(
            spool=self._spool,
            model=model[0] if len(model) == 1 else None,
            flops_per_token=None if flops is None else flops.flops_per_token,
            flops_convention="" if flops is None else flops.convention,
            dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else "",
            config=named(args, CONFIG),
            seeds={"seed": getattr(args, "seed", None)},
            **placement_of(len(model)),
        )
        tracer.begin_steps(getattr(args, "curr_iteration", None) or args.iteration)


def tokens_of_step() -> int:
    """Return the tokens of this rank's data position in the step, padding counted."""
    args = import_module("megatron.training").get_args()
    calculator = import_module("megatron.core.num_microbatches_calculator")
    whole = calculator.get_num_microbatches() * args.micro_batch_size * args.seq_length
    groups = import_module("megatron.core.parallel_state")
    return int(whole // groups.get_context_parallel_world_size())


def flops_of(args: Any) -> ModelFlops | None:  # noqa: ANN401 - a Namespace
    """Return the FLOPs of a token; None where the model is no dense GPT of one kind of layer."""
    others = ("num_experts", "multi_latent_attention", "hybrid_override_pattern", "mtp_num_layers")
    if any(getattr(args, name, None) for name in others):
        return None
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return megatron_flops(
        hidden=args.hidden_size,
        num_layers=args.num_layers,
        num_heads=args.num_attention_heads,
        num_groups=groups,
        ffn=args.ffn_hidden_size,
        vocabulary=args.padded_vocab_size,
        seq_length=args.seq_length,
        is_gated=bool(args.swiglu),
        head_size=args.kv_channels,
    )


def placement_of(num_chunks: int) -> Placement:
    """Return where this rank stands, as Megatron's own groups have it."""
    groups = import_module("megatron.core.parallel_state")
    return {
        "layout": Layout(
            dp=groups.get_data_parallel_world_size(),
            tp=groups.get_tensor_model_parallel_world_size(),
            pp=groups.get_pipeline_model_parallel_world_size(),
            cp=groups.get_context_parallel_world_size(),
            vpp=num_chunks,
        ),
        "coords": Coords(
            dp=groups.get_data_parallel_rank(),
            tp=groups.get_tensor_model_parallel_rank(),
            pp=groups.get_pipeline_model_parallel_rank(),
            cp=groups.get_context_parallel_rank(),
        ),
    }
