"""Optimizer steps: a span of each, and the counting of training steps by them."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from typing import TYPE_CHECKING, Any

from ..device.span import timed_span
from ..record.device_timer import NO_DEVICE_TIMING
from ..record.steps import OPTIMIZER_KINDS
from ..span import STEPS_COUNTED, SpanKind
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from ..native.host_span import CancellableSpan
    from ..patches import Patches
    from ..record.recorder import Recorder

MAX_SKIPPED_EVENTS = 100
"""Events of a process. Of a run that has diverged each step is one."""


class _Running(threading.local):
    optimizer: Any = None
    span: CancellableSpan | None = None
    caller: FrameType | None = None
    """The call of ``step`` that the span records."""

    is_paused = False
    """Whether the span ended early, because a forward or backward began in ``step``."""

    is_first = True
    """Whether no backward has ended in ``step`` yet."""


class OptimizerSpans:
    """Records a span of each step of any optimizer; a step inside another is part of it.

    A closure may run forward and backward inside the step (Lightning, L-BFGS). They are no part of
    the span: it begins after the backward, and again after each later one. Before the first there
    is only the call of the closure, which is not recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._guard = Guard(recorder, "optimizer", OPTIMIZER_KINDS)
        self._running = _Running()

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Begin a span: ``optimizer`` is about to step."""
        if not self._guard.active:
            return
        running = self._running
        try:
            caller = sys._getframe(1)
            if running.span is not None:
                if _is_called_from(running.caller, caller):
                    return
                if not running.is_paused:
                    running.span.cancel()  # its step raised, for which torch calls no hook
            running.optimizer, running.caller, running.span = optimizer, caller, None
            running.is_first = True
            self._begin(running)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """End its span."""
        if not self._guard.active:
            return
        running = self._running
        try:
            if running.optimizer is optimizer and running.span is not None:
                if not running.is_paused:
                    running.span.__exit__(None, None, None)
                running.optimizer = running.span = running.caller = None
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)

    def pause(self) -> None:
        """End the span of this thread, if one is open: a forward or backward begins."""
        running = self._running
        if running.span is None or running.is_paused or not self._guard.active:
            return
        try:
            running.is_paused = True
            if not running.is_first and _is_called_from(running.caller, sys._getframe(1)):
                running.span.__exit__(None, None, None)
            else:
                running.span.cancel()  # nothing was done yet, or its step raised
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)

    def resume(self) -> None:
        """Begin another span for the rest of the step, if it was paused: a backward has ended."""
        running = self._running
        if not running.is_paused or not self._guard.active:
            return
        try:
            if _is_called_from(running.caller, sys._getframe(1)):
                running.is_first = False
                self._begin(running)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)

    def _begin(self, running: _Running) -> None:
        on: Iterable[object] = ()
        if self._recorder.device_timing is not NO_DEVICE_TIMING:
            groups = running.optimizer.param_groups
            on = (parameter for group in groups for parameter in group["params"])
        span = timed_span(self._recorder, "optimizer", SpanKind.OPTIMIZER, on=on)
        span.__enter__()
        # Only now: a signal handler may raise in the line before.
        running.span, running.is_paused = span, False


def capture_optimizer(spans: OptimizerSpans) -> Callable[[], None]:
    """Record a span of each step of any optimizer.

    Returns:
        A function that removes the hooks.
    """
    from torch.optim import optimizer as hooks

    handles = [
        hooks.register_optimizer_step_pre_hook(spans.before),
        hooks.register_optimizer_step_post_hook(spans.after),
    ]

    def remove_hooks() -> None:
        for handle in handles:
            handle.remove()

    return remove_hooks


def _is_called_from(outer: FrameType | None, frame: FrameType | None) -> bool:
    """Return whether ``outer`` is still running and has led to ``frame``."""
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False


class StepCounter:
    """Counts the steps of a job that does not report them.

    A step ends when, after an optimizer stepped, the next batch, forward or backward begins. So a
    step may contain several micro-batches and optimizers, and work between steps (logging, a save)
    belongs to the step before. The counter stops for good when the job itself begins or ends a
    step.

    A job may have no optimizer of torch, and change its parameters by itself. Its step ends when,
    after a backward, the next batch or forward begins.
    """

    def __init__(self, recorder: Recorder, *, from_start: bool) -> None:
        """Create the counter.

        Args:
            from_start: Whether step 0 begins with the first batch, forward or backward. If False,
                it begins after the first optimizer step, which then belongs to the start-up; a job
                that reports its steps has done so by then.
        """
        self._recorder = recorder
        self._guard = Guard(recorder, "step")
        self.is_due = True
        """Whether `on_next_work` may have something to do. A hot path need not call it otherwise.
        """

        self._from_start = from_start
        self._has_stepped = False
        self._saw_backward = False
        """Whether a backward has ended in this step, of a job that may have no optimizer."""

        self._has_optimizer: bool | None = True
        """Whether the job has an optimizer; None: not known yet."""

        self._start_ns: int | None = None
        self._thread_id = threading.get_ident()

    def count(self) -> Callable[[], None]:
        """Count the steps of all optimizers, or the backwards of a job without any.

        Returns:
            A function that removes the hook.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._has_optimizer = None
        return register_optimizer_step_post_hook(self.on_optimizer_step).remove

    def on_optimizer_step(self, *about: object) -> None:
        """Note that an optimizer has stepped."""
        # Batches may be prefetched by another thread than the one that trains.
        self._thread_id = threading.get_ident()
        self._has_stepped = self._has_optimizer = True
        self.is_due = self._guard.active

    def on_backward_end(self) -> None:
        """Note that a backward has ended."""
        if not self._has_optimizer:
            self._saw_backward, self.is_due = True, self._guard.active

    def on_next_work(self, *, is_backward: bool = False) -> None:
        """Note that a batch, a forward or a backward begins."""
        if self.is_due:
            self._guard.call(self._begin_step_if_due, is_backward=is_backward)

    def finish(self) -> None:
        """End the last step, after which nothing began."""
        if self._start_ns is not None:
            self.on_next_work()

    def _begin_step_if_due(self, *, is_backward: bool) -> None:
        recorder = self._recorder
        if threading.get_ident() != self._thread_id:
            return
        if recorder.step_start_ns != self._start_ns:
            self._guard.active = self.is_due = False  # the job reports its steps
            return
        has_ended = self._has_stepped or (not is_backward and self._ends_without_optimizer())
        if self._start_ns is None:
            if not has_ended and not self._from_start:
                return
            recorder.begin_steps()
            recorder.event(STEPS_COUNTED, "steps are counted from 0: the job reports none", {})
        elif has_ended:
            recorder.step()
        elif is_backward and self._saw_backward:
            return  # another loss of the same step, if there is no optimizer
        self._has_stepped = self._saw_backward = self.is_due = False
        self._start_ns = recorder.step_start_ns

    def _ends_without_optimizer(self) -> bool:
        if self._saw_backward and self._has_optimizer is None:
            self._has_optimizer = has_optimizer()
            if not self._has_optimizer:
                text = "no optimizer exists: a step ends with the last backward before a forward"
                self._recorder.event("tracer", text, {})
        return self._saw_backward and not self._has_optimizer


def has_optimizer() -> bool:
    """Return whether the process has an optimizer of torch."""
    torch = sys.modules["torch"]
    kinds = set(map(type, gc.get_objects()))
    return any(issubclass(kind, torch.optim.Optimizer) for kind in kinds)


class SkippedSteps:
    """Counts a step that a `torch.amp.GradScaler` skips as a training step, and reports an event.

    It skips the optimizer if gradients are infinite or NaN.

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
        if self._num_skipped <= MAX_SKIPPED_EVENTS:
            self._recorder.event(
                "optimizer-skipped",
                "the gradient scaler skipped the optimizer: infinite or NaN gradients",
                {"step": self._recorder.step_number, "num_skipped": self._num_skipped},
            )
