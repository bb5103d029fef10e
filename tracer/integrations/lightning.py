"""A callback for Lightning's ``Trainer``.

``Trainer(..., callbacks=[RankscopeCallback()])``, with ``RANKSCOPE_TRACE=DIR`` or ``spool=``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rankscope import tracer

from .settings import LayoutAndCoords, data_parallel_layout, harmless, install_for

if TYPE_CHECKING:
    import os

    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

DTYPES = {"bf16": "bfloat16", "16": "float16"}
"""Number type of the matrix products by the first part of the trainer's ``precision``."""


class RankscopeCallback(Callback):
    """Reports the trainer's steps, their loss, and its saves.

    A step ends with the batch after which the trainer's ``global_step`` has changed. Its loss is
    that of its last micro-batch, if it is on the CPU. Micro-batches and tokens come from the
    loader.
    """

    def __init__(self, *, spool: str | os.PathLike[str] | None = None) -> None:
        """Create the callback.

        Args:
            spool: Folder for the records; if None, ``RANKSCOPE_TRACE``.
        """
        self._spool = spool
        self._global_step = 0

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
        """Install the tracer and begin the steps."""
        declared: LayoutAndCoords = {"layout": None, "coords": None}
        if type(trainer.strategy).__name__ != "ModelParallelStrategy":
            declared = data_parallel_layout(trainer.world_size, trainer.global_rank)
        install_for(
            self._spool,
            model=find_network(pl_module),
            model_name=type(pl_module).__name__,
            dtype=DTYPES.get(str(trainer.precision).partition("-")[0], ""),
            config={
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "precision": str(trainer.precision),
                "strategy": type(trainer.strategy).__name__,
            },
            **declared,
        )
        self._global_step = trainer.global_step
        tracer.begin_steps(trainer.global_step)

    @harmless
    def on_train_batch_end(
        self,
        trainer: Any,  # noqa: ANN401
        pl_module: Any,  # noqa: ANN401
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """End the step if an optimizer has stepped."""
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            tracer.step(loss=loss_on_cpu(outputs))

    @harmless
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ANN401
        """Record the save as an event; `torch.save` is captured with its duration."""
        tracer.event("checkpoint", f"saving at step {trainer.global_step}")


def find_network(module: Any) -> Any:  # noqa: ANN401 - Modules
    """Return the module whose forward is called: the only child with weights, or the module itself.

    If no strategy wraps the LightningModule, Lightning calls ``training_step`` instead of its
    forward.
    """
    parts = [part for part in module.children() if next(part.parameters(), None) is not None]
    return parts[0] if len(parts) == 1 else module


def loss_on_cpu(outputs: Any) -> Any | None:  # noqa: ANN401 - a tensor
    """Return the loss of a training step if it can be read without waiting for a device."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss if getattr(getattr(loss, "device", None), "type", "") == "cpu" else None
