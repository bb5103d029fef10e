"""torchtitan's training loop, which has no callbacks.

Call ``trace(trainer)`` after making the ``Trainer`` (of ``torchtitan.train``, from 0.3 on
``torchtitan.trainer``) and before its ``train()``, with ``RANKSCOPE_TRACE=DIR`` or ``spool=``.
Saves by `torch.distributed.checkpoint` are captured anyway.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rankscope import tracer

from ..job.flops import find_window
from .settings import LayoutAndCoords, harmless, install_for, mesh_layout, read_attributes

if TYPE_CHECKING:
    import os

CONVENTION = "torchtitan's get_num_flops_per_token, causal mask not halved"

CONFIG = (
    "local_batch_size",
    "global_batch_size",
    "seq_len",
    "steps",
    "dtype",
    "mixed_precision_param",
    "enable_cpu_offload",
)
"""Training settings that explain a job's speed."""


@harmless
def trace(trainer: Any, *, spool: str | os.PathLike[str] | None = None) -> None:  # noqa: ANN401
    """Record the steps of a trainer that has not started.

    A step lasts from one iteration of the loop to the next, so that a save belongs to the step
    before it. An iteration that ran out of data or raised is not a step. The loss is the global
    average that the trainer logs, on steps that log, in the last stage of a pipeline. The tokens
    are those of the labels that the step took from the loader.

    Args:
        trainer: Has ``train_step``, ``step``, ``close``, ``model_parts``, ``parallel_dims``,
            ``metrics_processor``.
        spool: Folder for the records; if None, ``RANKSCOPE_TRACE``.
    """
    parts = trainer.model_parts
    processor = trainer.metrics_processor
    flops = getattr(processor, "num_flops_per_token", None)
    if any(map(find_window, parts)):
        flops = None  # It counts no windows; the tracer derives them, of a whole model.
    settings = getattr(trainer, "config", None) or getattr(trainer, "job_config", None)
    debug = getattr(settings, "debug", None) or getattr(settings, "training", None)
    install_for(
        spool,
        model=parts[0] if len(parts) == 1 else None,
        flops_per_token=float(flops) if flops and flops > 0 else None,
        flops_convention=CONVENTION if flops and flops > 0 else "",
        config=read_attributes(getattr(settings, "training", None), CONFIG),
        seeds={"seed": getattr(debug, "seed", None)},
        **read_layout(trainer.parallel_dims),
    )
    steps = _Steps(trainer)
    trainer.train_step = steps.wrap_train_step(trainer.train_step)
    trainer.close = steps.wrap_step_end(trainer.close)
    if hasattr(trainer, "should_continue_training"):
        trainer.should_continue_training = steps.wrap_step_end(trainer.should_continue_training)
    processor.log = steps.wrap_log(processor.log)


def read_layout(dims: Any) -> LayoutAndCoords:  # noqa: ANN401 - torchtitan's ParallelDims
    """Return layout and coordinates of this rank in torchtitan's mesh."""
    from torch import distributed

    rank = distributed.get_rank() if distributed.is_initialized() else 0
    dp = dims.dp_replicate * dims.dp_shard
    return mesh_layout(rank, tp=dims.tp, cp=dims.cp, dp=dp, pp=dims.pp)


class _Batches:
    def __init__(self, batches: Any) -> None:  # noqa: ANN401 - an iterator of (inputs, labels)
        self._batches = batches
        self.num_tokens = 0

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:  # noqa: ANN401
        batch = next(self._batches)
        self._count(batch)
        return batch

    @harmless
    def _count(self, batch: Any) -> None:  # noqa: ANN401
        _, labels = batch
        self.num_tokens += labels.numel()


class _Steps:
    def __init__(self, trainer: Any) -> None:  # noqa: ANN401
        self._trainer = trainer
        self._has_begun = False
        self._runs = False
        self._batches: _Batches | None = None
        self._loss: float | None = None

    def wrap_train_step(self, original: Any) -> Any:  # noqa: ANN401 - bound methods
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._end()
            self._begin()
            self._batches = None
            if args and hasattr(args[0], "__next__"):
                self._batches = _Batches(args[0])
                args = (self._batches, *args[1:])
            try:
                return original(*args, **kwargs)
            except BaseException:
                self._runs = False
                raise

        return train_step

    def wrap_log(self, original: Any) -> Any:  # noqa: ANN401
        @functools.wraps(original)
        def log(step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            # A pipeline stage without the loss logs -1.
            if getattr(self._trainer, "pp_has_last_stage", True):
                self._loss = global_avg_loss
            return original(step, global_avg_loss, *args, **kwargs)

        return log

    def wrap_step_end(self, original: Any) -> Any:  # noqa: ANN401
        """Return ``original``, before which the running step ends.

        The trainer asks before each step whether to continue. After the last step rank 0 sleeps for
        2 s, which is not part of that step.
        """

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._end()
            return original(*args, **kwargs)

        return call

    @harmless
    def _begin(self) -> None:
        self._runs = True
        if not self._has_begun:
            self._has_begun = True
            tracer.begin_steps(self._trainer.step)

    @harmless
    def _end(self) -> None:
        if not self._runs:
            return
        self._runs = False
        loss, self._loss = self._loss, None
        # Each rank of a context-parallel group takes the whole sequence and keeps a part. The
        # trainer's own count is the whole in 0.2 and the part in 0.3.
        cp = self._trainer.parallel_dims.cp
        tokens = self._batches.num_tokens // cp if self._batches else 0
        tracer.step(tokens=tokens or None, loss=loss)
