"""Forward of the root module, and backward, where no pipeline schedules them."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..record.device_timer import NO_DEVICE_TIMING
from ..span import NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ..patches import Patches
    from .forward_backward import Compute
    from .steps import StepCounter


class Begins(Protocol):
    """Who is told that a forward begins."""

    def __call__(
        self,
        module: Any,  # noqa: ANN401 - a Module
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        /,
        *,
        is_microbatch: bool,
    ) -> None:
        """Hear of it."""
        ...


def capture_forward(
    compute: Compute,
    model: Any,  # noqa: ANN401 - a Module
    begins: Begins,
) -> Callable[[], None]:
    """Make a span of each forward of ``model``; with gradients it counts as a micro-batch.

    Args:
        compute: What opens the spans.
        model: The root module.
        begins: Told module, arguments, keyword arguments and whether it counts as a micro-batch,
            before the span begins: so a step that begins here holds it.

    Returns:
        A function that takes the hooks off again.
    """
    guard, recorder, state = compute.guard, compute.recorder, compute.thread_state

    # One hook, not one for each that wants to know: after a backward nothing of them is
    # in the processor's caches, and each line of code costs more than it seems to.
    def before(module: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        # A compiler that looks into this forward must find nothing here to stop at.
        if torch.compiler.is_compiling() or (state.in_span and not _was_interrupted(compute)):
            return
        is_microbatch = torch.is_grad_enabled()
        begins(module, args, kwargs, is_microbatch=is_microbatch)
        if not guard.active:
            return
        try:
            is_timed = recorder.device_timing is not NO_DEVICE_TIMING
            span = compute.span(
                "forward",
                SpanKind.FORWARD,
                microbatch=None if is_microbatch else NONE,
                chunk=0,
                on=itertools.chain(module.parameters(), args) if is_timed else (),
            )
            # Not the module: an interrupted forward never ends, and must not keep a model alive.
            state.forward = (id(module), span)
            span.__enter__()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            guard.fail(problem)

    def after(module: Any, args: Any, output: Any) -> None:  # noqa: ANN401
        if torch.compiler.is_compiling():
            return
        opened = state.forward
        if opened is not None and opened[0] == id(module):
            state.forward = None
            opened[1].__exit__(*sys.exc_info())

    handles = [
        # First, so that what FSDP gathers for the forward lies inside it.
        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
    ]

    def take_off() -> None:
        for handle in handles:
            handle.remove()

    return take_off


def _was_interrupted(compute: Compute) -> bool:
    """Return whether the forward that is open was left by what torch calls no hook for.

    That is whatever is no `Exception`, a `KeyboardInterrupt` say, which a notebook outlives. When
    it was left nobody knows: it is not recorded, and the step's record says so.
    """
    opened = compute.thread_state.forward
    if opened is None:
        return False  # in the span of a schedule, which ends it whatever is raised
    try:
        caller: FrameType | None = sys._getframe(2)
        if caller is None or "self" not in caller.f_locals:
            return False  # not called as a module calls its hooks: nothing to go by
        calls = caller.f_code
        while (caller := caller.f_back) is not None:
            if caller.f_code is calls and id(caller.f_locals.get("self")) == opened[0]:
                return False  # a module within itself, or within another one
        compute.thread_state.forward = None
        opened[1].cancel()
        compute.recorder.missing_kinds.add_in_step(SpanKind.FORWARD)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        compute.guard.fail(problem)
        return False
    return True


def capture_backward(compute: Compute, patches: Patches, steps: StepCounter) -> None:
    """Make a span of each call of `torch.autograd.backward`, and so of `Tensor.backward`.

    Args:
        compute: What opens the spans.
        patches: Where the replaced function is noted.
        steps: Told before the span begins: so a step that begins here holds it.
    """
    wrap = functools.partial(traced_backward, compute, steps)
    patches.wrap(torch.autograd, "backward", wrap)


def traced_backward(
    compute: Compute, steps: StepCounter, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``original``, whose first argument a backward begins at, with a span of each call."""
    recorder = compute.recorder

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if steps.is_due:
            steps.next_begins()
        if torch.compiler.is_compiling() or compute.thread_state.in_span:
            compute.sees_backwards = True
            return original(*args, **kwargs)
        on: Any = ()
        if recorder.device_timing is not NO_DEVICE_TIMING:
            roots = args[0] if args else kwargs.get("tensors", ())
            on = roots if isinstance(roots, list | tuple) else (roots,)
        with compute.span("backward", SpanKind.BACKWARD, microbatch=None, chunk=0, on=on):
            return original(*args, **kwargs)

    return backward
