"""The optimizer's step, whichever optimizer."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from tracer.capture.guard import Guard
from tracer.device.span import timed_span
from tracer.span import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from tracer.device.span import DeviceSpan
    from tracer.host_span import HostSpan
    from tracer.recorder import Recorder


class _Running(threading.local):
    optimizer: Any = None
    span: HostSpan | DeviceSpan | None = None
    caller: FrameType | None = None
    """The call of ``step`` that the span is of."""


def capture_optimizer(recorder: Recorder) -> Callable[[], None]:
    """Make a span of each step of any optimizer; one that another runs inside is part of it.

    Returns:
        A function that takes the hooks off again.
    """
    from torch.optim import optimizer as hooks

    running, guard = _Running(), Guard(recorder, "optimizer")

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        guard.call(begin, optimizer, sys._getframe(1))

    def begin(optimizer: Any, caller: FrameType) -> None:  # noqa: ANN401
        if running.span is not None:
            if _is_below(running.caller, caller):
                return
            running.span.cancel()  # its step raised: torch calls no hook then
        running.optimizer, running.caller = optimizer, caller
        running.span = timed_span(
            recorder, "optimizer", SpanKind.OPTIMIZER, on=_parameters(optimizer)
        )
        running.span.__enter__()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        guard.call(end, optimizer)

    def end(optimizer: Any) -> None:  # noqa: ANN401
        if running.optimizer is optimizer and running.span is not None:
            running.span.__exit__(None, None, None)
            running.optimizer = running.span = running.caller = None

    handles = [
        hooks.register_optimizer_step_pre_hook(before),
        hooks.register_optimizer_step_post_hook(after),
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
