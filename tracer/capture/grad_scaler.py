"""Optimizer steps that a `torch.amp.GradScaler` skips, because gradients are infinite or NaN."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..patches import Patches
    from ..record.recorder import Recorder
    from .optimizer import StepCounter

EVENT = "optimizer-skipped"

MAX_EVENTS = 100
"""Events of a process. Of a run that has diverged each step is one."""


class SkippedSteps:
    """Counts a skipped optimizer step as a training step, and reports it as an event.

    A fused optimizer is called in any case and skips on the device: its step is one as always, and
    only the device knows.
    """

    def __init__(self, recorder: Recorder, steps: StepCounter) -> None:
        self._recorder = recorder
        self._steps = steps
        self._guard = Guard(recorder, "gradient scaler")
        self._num_steps = 0
        self._num_skipped = 0

    def watch(self, patches: Patches) -> Callable[[], None]:
        """Watch all scalers.

        Returns:
            A function that removes the hook.
        """
        from torch.amp.grad_scaler import GradScaler
        from torch.optim.optimizer import register_optimizer_step_post_hook

        patches.wrap(GradScaler, "step", self._wrap)
        return register_optimizer_step_post_hook(self._on_optimizer_step).remove

    def _on_optimizer_step(self, *about: object) -> None:
        self._num_steps += 1

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            before = self._num_steps
            result = original(*args, **kwargs)
            if self._num_steps == before:
                self._guard.call(self._report)
            return result

        return step

    def _report(self) -> None:
        self._num_skipped += 1
        self._steps.on_optimizer_step()
        if self._num_skipped <= MAX_EVENTS:
            self._recorder.event(
                EVENT,
                "the gradient scaler skipped the optimizer: infinite or NaN gradients",
                {"step": self._recorder.step_number, "num_skipped": self._num_skipped},
            )
