"""A callback for the Hugging Face `transformers.Trainer`.

``Trainer(..., callbacks=[RankscopeCallback()])``, with ``RANKSCOPE_TRACE=DIR`` or ``spool=``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from rankscope import tracer

from ..patches import Patches
from .settings import data_parallel_layout, harmless, install_for, read_attributes, traced_save

if TYPE_CHECKING:
    import os

CONFIG = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "max_steps",
    "num_train_epochs",
    "bf16",
    "fp16",
    "torch_compile",
    "dataloader_num_workers",
    "optim",
    "seed",
)
"""Arguments that explain a job's speed. Others may contain secrets."""


class RankscopeCallback(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Reports the trainer's steps, their loss if it is logged, and its saves.

    The loss of a step is the one that the trainer logs after it: on steps that log, the mean since
    the last log. Micro-batches and tokens come from the loader. No tensor is read.
    """

    def __init__(self, *, spool: str | os.PathLike[str] | None = None) -> None:
        """Create the callback.

        Args:
            spool: Folder for the records; if None, ``RANKSCOPE_TRACE``.
        """
        self._spool = spool
        self._is_due = False
        self._patches = Patches()

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:  # noqa: ANN401
        """Install the tracer and begin the steps."""
        config = getattr(about.get("model"), "config", None)
        dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else ""
        install_for(
            self._spool,
            # A compiled model is wrapped: the wrapper is found at the first batch.
            model=None if args.torch_compile else about.get("model"),
            model_name=str(getattr(config, "model_type", "")),
            dtype=dtype,
            config=read_attributes(args, CONFIG) | {"max_steps": state.max_steps},
            seeds={"seed": args.seed},
            **data_parallel_layout(args.world_size, args.process_index),
        )
        if hasattr(transformers.Trainer, "_save_checkpoint"):
            self._patches.wrap(transformers.Trainer, "_save_checkpoint", traced_save)
        tracer.begin_steps(state.global_step)

    @harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:  # noqa: ANN401
        """End the previous step if the trainer logged nothing after it."""
        self._end_step()

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:  # noqa: ANN401
        """End the step; a step that will be logged ends in `on_log`, when its loss is known."""
        self._is_due = True
        if not control.should_log:
            self._end_step()

    @harmless
    def on_log(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        logs: dict[str, Any] | None = None,
        **about: Any,  # noqa: ANN401
    ) -> None:
        """End the logged step, with its loss."""
        loss = (logs or {}).get("loss")
        self._end_step(loss if isinstance(loss, float) else None)

    @harmless
    def on_save(self, args: Any, state: Any, control: Any, **about: Any) -> None:  # noqa: ANN401
        """Record the save as an event."""
        tracer.event("checkpoint", f"saved after step {state.global_step - 1}")

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:  # noqa: ANN401
        """Restore the trainer's method. The tracer continues to the end of the process."""
        self._end_step()
        self._patches.undo()

    def _end_step(self, loss: float | None = None) -> None:
        if self._is_due:
            self._is_due = False
            tracer.step(loss=loss)
