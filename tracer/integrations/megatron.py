"""Megatron-LM's training loop, with or without its own callbacks (added in 2026).

Call ``trace()`` before ``pretrain(...)``, with ``RANKSCOPE_TRACE=DIR`` or ``spool=``.
"""

from __future__ import annotations

import contextlib
import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankscope import tracer

from ..job.decoder import ModelFlops, UnknownFlopsError
from ..job.flops import megatron_flops, megatron_shape
from ..patches import Patches
from ..topology import Coords, Layout
from .settings import LayoutAndCoords, harmless, install_for, read_attributes, traced_save

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
    "train_iters",
)
"""Arguments that explain a job's speed."""

PACKED = ("sequence_packing_scheduler", "rl_use_sequence_packing")
"""Arguments with which the data determines the number of micro-batches or their tokens."""


def trace(*, spool: str | os.PathLike[str] | None = None) -> Patches:
    """Record the steps of ``megatron.training.training.train`` from now on.

    A step lasts from one ``train_step`` to the next, so that a save belongs to the step before it.
    A ``train_step`` that raised is not a step. Losses stay on the device and are not read.

    Args:
        spool: Folder for the records; if None, ``RANKSCOPE_TRACE``.

    Returns:
        The functions replaced in ``megatron.training.training``; ``undo()`` restores them.
    """
    training = import_module("megatron.training.training")
    patches = Patches()
    steps = _Steps(spool)
    patches.wrap(training, "train_step", steps.wrap_train_step)
    for name in ("train", "save_checkpoint"):
        if hasattr(training, name):
            patches.wrap(training, name, steps.wrap_train if name == "train" else traced_save)
    return patches


class _Steps:
    def __init__(self, spool: str | os.PathLike[str] | None) -> None:
        self._spool = spool
        self._is_installed = False
        self._runs = False
        self._number = -1
        self._tokens: int | None = None

    def wrap_train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(
            forward_step_func: Any,  # noqa: ANN401
            data_iterator: Any,  # noqa: ANN401
            model: Any,  # noqa: ANN401 - a list of chunks
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            self._end()
            self._begin(model)
            try:
                return original(forward_step_func, data_iterator, model, *args, **kwargs)
            except BaseException:
                self._runs = False
                raise

        return train_step

    def wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                return original(*args, **kwargs)
            finally:
                self._end()

        return train

    @harmless
    def _end(self) -> None:
        if self._runs:
            self._runs = False
            tracer.step(tokens=self._tokens)

    @harmless
    def _begin(self, model: Any) -> None:  # noqa: ANN401
        args = import_module("megatron.training").get_args()
        is_first = not self._is_installed
        if is_first:
            self._is_installed = True
            install(args, model, spool=self._spool)
        number = getattr(args, "curr_iteration", None)
        if number is None:
            number = args.iteration if is_first else self._number + 1
        # The loop skips iterations that are not trained: the step number then jumps.
        if is_first or number != self._number + 1:
            tracer.begin_steps(number)
        self._number = number
        self._runs = True
        # Now, because the next step's batch size is set before that step begins.
        self._tokens = count_step_tokens(args)


def install(
    args: Any,  # noqa: ANN401 - a Namespace
    model: Any,  # noqa: ANN401 - a list of chunks
    *,
    spool: str | os.PathLike[str] | None,
) -> None:
    """Install the tracer with the layout and settings from Megatron's arguments and groups."""
    flops = read_flops(args)
    install_for(
        spool,
        model=model[0] if len(model) == 1 else None,
        flops_per_token=None if flops is None else flops.flops_per_token,
        flops_convention="" if flops is None else flops.convention,
        recomputed_flops_per_token=None if flops is None else flops.recomputed_flops_per_token,
        shape=megatron_shape(args),
        dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else "",
        config=read_attributes(args, CONFIG),
        seeds={"seed": getattr(args, "seed", None)},
        **read_layout(len(model)),
    )


def count_step_tokens(args: Any) -> int | None:  # noqa: ANN401 - a Namespace
    """Return this rank's tokens of the step, including padding; None if sequences are packed."""
    if any(getattr(args, name, None) for name in PACKED):
        return None
    calculator = import_module("megatron.core.num_microbatches_calculator")
    whole = calculator.get_num_microbatches() * args.micro_batch_size * args.seq_length
    groups = import_module("megatron.core.parallel_state")
    return int(whole // groups.get_context_parallel_world_size())


def read_flops(args: Any) -> ModelFlops | None:  # noqa: ANN401 - a Namespace
    """Return the FLOPs per token; None if a part of the model, or an argument of it, is unknown."""
    with contextlib.suppress(UnknownFlopsError, AttributeError):
        return megatron_flops(args)
    return None


def read_layout(num_chunks: int) -> LayoutAndCoords:
    """Return layout and coordinates of this rank from Megatron's own groups.

    Both are unknown if there are other axes than those of `Layout`.
    """
    from torch import distributed

    groups = import_module("megatron.core.parallel_state")
    layout = Layout(
        dp=groups.get_data_parallel_world_size(),
        tp=groups.get_tensor_model_parallel_world_size(),
        pp=groups.get_pipeline_model_parallel_world_size(),
        cp=groups.get_context_parallel_world_size(),
        vpp=num_chunks,
    )
    if layout.world_size != distributed.get_world_size():
        return {"layout": None, "coords": None}
    coords = Coords(
        dp=groups.get_data_parallel_rank(),
        tp=groups.get_tensor_model_parallel_rank(),
        pp=groups.get_pipeline_model_parallel_rank(),
        cp=groups.get_context_parallel_rank(),
    )
    return {"layout": layout, "coords": coords}
