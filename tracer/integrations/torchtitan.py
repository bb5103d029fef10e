"""torchtitan's training loop, which knows no callbacks.

``trace(trainer)`` between making the ``torchtitan.train.Trainer`` and its ``train()``, with
``RANKSCOPE_TRACE=DIR`` or ``spool=``. Saves by `torch.distributed.checkpoint` are captured anyway.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tracer
from tracer.integrations.settings import Placement, harmless, placed

if TYPE_CHECKING:
    import os

CONVENTION = "torchtitan's get_num_flops_per_token, causal mask not halved"


def trace(trainer: Any, *, spool: str | os.PathLike[str] | None = None) -> None:  # noqa: ANN401
    """Record the steps of a trainer that has not begun.

    A step lasts from one ``train_step`` to the next, so that a save belongs to
    the step that it follows. Its loss is the global average that the trainer
    logs, on steps that log; its tokens are those that the trainer counts.

    Args:
        trainer: Has ``train_step``, ``step``, ``close``, ``model_parts``,
            ``parallel_dims``, ``metrics_processor``; ``ntokens_seen`` where it counts.
        spool: Folder for the records; None: ``RANKSCOPE_TRACE``.
    """
    parts = trainer.model_parts
    processor = trainer.metrics_processor
    flops = getattr(processor, "num_flops_per_token", None)
    tracer.install(
        spool=spool,
        model=parts[0] if len(parts) == 1 else None,
        flops_per_token=float(flops) if flops and flops > 0 else None,
        flops_convention=CONVENTION if flops and flops > 0 else "",
        **placement_of(trainer.parallel_dims),
    )
    steps = _Steps(trainer)
    trainer.train_step = steps.around(trainer.train_step)
    trainer.close = steps.before_close(trainer.close)
    processor.log = steps.noting_loss(processor.log)


def placement_of(dims: Any) -> Placement:  # noqa: ANN401 - torchtitan's ParallelDims
    """Return where this rank stands in the mesh that torchtitan makes."""
    from torch import distributed

    rank = distributed.get_rank() if distributed.is_initialized() else 0
    dp = dims.dp_replicate * dims.dp_shard
    return placed(rank, tp=dims.tp, cp=dims.cp, dp=dp, pp=dims.pp)


class _Steps:
    """Which step runs, and what is known of it."""

    def __init__(self, trainer: Any) -> None:  # noqa: ANN401
        self._trainer = trainer
        self._has_begun = False
        self._loss: float | None = None
        self._tokens_before = self._tokens_seen()

    def around(self, original: Any) -> Any:  # noqa: ANN401 - bound methods
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._has_begun:
                self._end()
            else:
                self._has_begun = True
                self._begin()
            return original(*args, **kwargs)

        return train_step

    def noting_loss(self, original: Any) -> Any:  # noqa: ANN401
        @functools.wraps(original)
        def log(step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._loss = global_avg_loss
            return original(step, global_avg_loss, *args, **kwargs)

        return log

    def before_close(self, original: Any) -> Any:  # noqa: ANN401
        @functools.wraps(original)
        def close(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._has_begun:
                self._has_begun = False
                self._end()
            return original(*args, **kwargs)

        return close

    @harmless
    def _begin(self) -> None:
        tracer.begin_steps(self._trainer.step)

    @harmless
    def _end(self) -> None:
        seen, before = self._tokens_seen(), self._tokens_before
        self._tokens_before = seen
        tokens = None if seen is None or before is None else seen - before
        # Each rank of a context-parallel group counts the whole sequence and holds a part.
        cp = self._trainer.parallel_dims.cp
        tracer.step(tokens=tokens // cp if tokens else None, loss=self._loss)
        self._loss = None

    def _tokens_seen(self) -> int | None:
        seen = getattr(self._trainer, "ntokens_seen", None)
        return None if seen is None else int(seen)
