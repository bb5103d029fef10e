"""The optimizer's step, whichever optimizer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tracer.span import SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracer.host_span import HostSpan
    from tracer.recorder import Recorder


class _Running(threading.local):
    optimizer: Any = None
    span: HostSpan | None = None


def capture_optimizer(recorder: Recorder) -> Callable[[], None]:
    """Make a span of each step of any optimizer; one that another runs inside is part of it.

    Returns:
        A function that takes the hooks off again.
    """
    from torch.optim import optimizer as hooks

    running = _Running()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if running.span is not None:
            if running.optimizer is not optimizer:
                return
            running.span.cancel()  # its step raised: torch calls no hook then
        running.optimizer = optimizer
        running.span = recorder.host_span("optimizer", SpanKind.OPTIMIZER)
        running.span.__enter__()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if running.optimizer is optimizer and running.span is not None:
            running.span.__exit__(None, None, None)
            running.optimizer = running.span = None

    handles = [
        hooks.register_optimizer_step_pre_hook(before),
        hooks.register_optimizer_step_post_hook(after),
    ]

    def take_off() -> None:
        for handle in handles:
            handle.remove()

    return take_off
