"""Forward of the root module, and backward, where no pipeline schedules them."""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from tracer.span import NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracer.capture.compute import Compute
    from tracer.capture.patch import Patches


def capture_forward(compute: Compute, model: Any) -> Callable[[], None]:  # noqa: ANN401 - a Module
    """Make a span of each forward of ``model``; with gradients it counts as a micro-batch.

    Returns:
        A function that takes the hooks off again.
    """
    opened = threading.local()

    def before(module: Any, args: Any) -> None:  # noqa: ANN401
        if compute.inside:
            return
        microbatch = compute.count(SpanKind.FORWARD) if torch.is_grad_enabled() else NONE
        opened.span = compute.span("forward", SpanKind.FORWARD, microbatch=microbatch, chunk=0)
        opened.span.__enter__()

    def after(module: Any, args: Any, output: Any) -> None:  # noqa: ANN401
        span = opened.__dict__.pop("span", None)
        if span is not None:
            span.__exit__(*sys.exc_info())

    handles = [
        # First, so that what FSDP gathers for the forward lies inside it.
        model.register_forward_pre_hook(before, prepend=True),
        model.register_forward_hook(after, always_call=True),
    ]

    def take_off() -> None:
        for handle in handles:
            handle.remove()

    return take_off


def capture_backward(compute: Compute, patches: Patches) -> None:
    """Make a span of each call of `torch.autograd.backward`, and so of `Tensor.backward`."""
    patches.wrap(torch.autograd, "backward", functools.partial(_traced_backward, compute))


def _traced_backward(compute: Compute, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if compute.inside:
            return original(*args, **kwargs)
        microbatch = compute.count(SpanKind.BACKWARD)
        with compute.span("backward", SpanKind.BACKWARD, microbatch=microbatch, chunk=0):
            return original(*args, **kwargs)

    return backward
