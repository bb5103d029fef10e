"""The optimizer's step, whichever optimizer."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from ..device.span import timed_span
from ..record.device_timer import NO_DEVICE_TIMING
from ..record.steps import OPTIMIZER_KINDS
from ..span import SpanKind
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from ..native.host_span import CancellableSpan
    from ..record.recorder import Recorder


class _Running(threading.local):
    optimizer: Any = None
    span: CancellableSpan | None = None
    caller: FrameType | None = None
    """The call of ``step`` that the span is of."""


class OptimizerSpans:
    """Makes a span of each step of any optimizer; one that another runs inside is part of it."""

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
                if _is_below(running.caller, caller):
                    return
                running.span.cancel()  # its step raised: torch calls no hook then
            running.optimizer, running.caller, running.span = optimizer, caller, None
            is_timed = self._recorder.device_timing is not NO_DEVICE_TIMING
            on = _parameters(optimizer) if is_timed else ()
            span = timed_span(self._recorder, "optimizer", SpanKind.OPTIMIZER, on=on)
            span.__enter__()
            running.span = span  # only now: a signal handler may raise in the line before
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """End its span: it has stepped."""
        if not self._guard.active:
            return
        running = self._running
        try:
            if running.optimizer is optimizer and running.span is not None:
                running.span.__exit__(None, None, None)
                running.optimizer = running.span = running.caller = None
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._guard.fail(problem)


def capture_optimizer(recorder: Recorder) -> Callable[[], None]:
    """Make a span of each step of any optimizer.

    Returns:
        A function that takes the hooks off again.
    """
    from torch.optim import optimizer as hooks

    spans = OptimizerSpans(recorder)
    handles = [
        hooks.register_optimizer_step_pre_hook(spans.before),
        hooks.register_optimizer_step_post_hook(spans.after),
    ]

    def take_off() -> None:
        for handle in handles:
            handle.remove()

    return take_off


def _parameters(optimizer: Any) -> Iterator[object]:  # noqa: ANN401
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_below(outer: FrameType | None, frame: FrameType | None) -> bool:
    """Return whether ``outer`` is still running and has led to ``frame``."""
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False
