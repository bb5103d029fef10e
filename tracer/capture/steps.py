"""Optimizer steps of a job that does not tell them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..record.recorder import Recorder


class StepCounter:
    """Ends a step where, after an optimizer stepped, the next batch, forward or backward begins.

    So one step may hold many micro-batches and several optimizers; work
    between steps (logging, a save) belongs to the step before. It stops for
    good when the job itself begins or ends a step.
    """

    def __init__(self, recorder: Recorder, *, from_start: bool) -> None:
        """Count steps.

        Args:
            recorder: Whose steps.
            from_start: Begin step 0 with the first batch, forward or backward.
                False: after the first optimizer step, which belongs to the
                start then; a job that tells its steps has told one by then.
        """
        self._recorder = recorder
        self._guard = Guard(recorder, "step")
        self.is_due = True
        """Whether `next_begins` may have something to do; who is hot need not call it else."""

        self._from_start = from_start
        self._has_stepped = False
        self._start_ns: int | None = None
        self._thread_id = threading.get_ident()

    def stepped(self, *about: object) -> None:
        """Note that an optimizer has stepped."""
        # A thread that fetches batches ahead is not the one that trains.
        self._thread_id = threading.get_ident()
        self._has_stepped = True
        self.is_due = self._guard.active

    def next_begins(self) -> None:
        """Note that a batch, a forward or a backward begins."""
        if self.is_due:
            self._guard.call(self._maybe_turn)

    def finish(self) -> None:
        """End the last step, which nothing came after."""
        if self._start_ns is not None:
            self.next_begins()

    def _maybe_turn(self) -> None:
        recorder = self._recorder
        if threading.get_ident() != self._thread_id:
            return
        if recorder.step_start_ns != self._start_ns:
            self._guard.active = self.is_due = False  # the job tells its steps
            return
        if self._start_ns is None:
            if not self._has_stepped and not self._from_start:
                return
            recorder.begin_steps()
        elif self._has_stepped:
            recorder.step()
        self._has_stepped = self.is_due = False
        self._start_ns = recorder.step_start_ns


def capture_steps(steps: StepCounter) -> Callable[[], None]:
    """Count the steps of any optimizer.

    Returns:
        A function that takes the hook off again.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(steps.stepped).remove
