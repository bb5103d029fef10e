"""Forward of the root module, and backward, where no pipeline schedules them."""

from __future__ import annotations

import functools
import itertools
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
    opened, guard = threading.local(), compute.guard

    def before(module: Any, args: Any) -> None:  # noqa: ANN401
        # A compiler that looks into this forward must find nothing here to stop at.
        if torch.compiler.is_compiling() or compute.inside:
            return
        guard.call(begin, module, args)

    def begin(module: Any, args: Any) -> None:  # noqa: ANN401
        microbatch = compute.count(SpanKind.FORWARD) if torch.is_grad_enabled() else NONE
        opened.span = compute.span(
            "forward",
            SpanKind.FORWARD,
            microbatch=microbatch,
            chunk=0,
            on=itertools.chain(module.parameters(), args),
        )
        opened.span.__enter__()

    def after(module: Any, args: Any, output: Any) -> None:  # noqa: ANN401
        if torch.compiler.is_compiling():
            return
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
        if torch.compiler.is_compiling() or compute.inside:
            return original(*args, **kwargs)
        microbatch = compute.count(SpanKind.BACKWARD)
        roots = args[0] if args else kwargs.get("tensors", ())
        on = roots if isinstance(roots, list | tuple) else (roots,)
        with compute.span("backward", SpanKind.BACKWARD, microbatch=microbatch, chunk=0, on=on):
            return original(*args, **kwargs)

    return backward
