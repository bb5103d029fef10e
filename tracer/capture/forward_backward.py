"""Spans of forward and backward, whose micro-batch and chunk the spans inside them inherit."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..device.span import DeviceSpan
from ..native.choice import ComputeSpan
from ..record.device_timer import NO_DEVICE_TIMING
from ..record.interface import NOOP_SPAN
from ..record.steps import COMPUTE_KINDS
from ..span import NONE, SpanKind
from .guard import Guard
from .module_calls import follow_calls
from .optimizer import OptimizerSpans

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ..native.host_span import SpanContext
    from ..patches import Patches
    from ..record.lane import Lane
    from ..record.recorder import Recorder
    from .optimizer import StepCounter

UNSEEN_BACKWARD = (
    "an optimizer stepped, but no backward was recorded: only Tensor.backward and"
    " torch.autograd.backward are captured. Put"
    " tracer.span('backward', kind=SpanKind.BACKWARD) around other calls"
)


MAX_OTHERS, MAX_PARTS = 8, 16
"""Modules beside the root that are followed, and direct parts of each."""

OnBackward = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Callable[..., Any]]


class ThreadState(threading.local):
    """State of one thread."""

    in_span = False
    """Whether the thread is in a compute span."""

    place: tuple[int, int] | None = None
    """Micro-batch and chunk of the thread's next work if known; if None, they are counted."""


class ComputeCapture:
    """Opens compute spans. A span inside another is the same work seen twice and not recorded."""

    def __init__(self, recorder: Recorder, optimizer: OptimizerSpans | None = None) -> None:
        self.optimizer = optimizer or OptimizerSpans(recorder)
        """Spans of the optimizer steps, which a closure interrupts."""

        self.guard = Guard(recorder, "compute", COMPUTE_KINDS)
        """Guard of the hooks that open the spans."""

        self.thread_state = ThreadState()
        """State of the calling thread."""

        self.recorder = recorder
        self._heads: dict[tuple[str, SpanKind], int] = {}
        self._counted_step = NONE
        self._counts: dict[SpanKind, int] = {}
        self.sees_backwards = False
        """Whether a backward of the job was captured."""

        self.forward_mode = True
        """Whether the module of the last forward with gradients was in training mode."""

        self.backward_mode = False
        """Whether the last backward followed a forward in training mode."""

        self.on_backward: OnBackward | None = None
        """Called with a backward and its arguments, in the first step; returns what to call."""

        self._has_reported = False

    def is_training(self, module: Any) -> bool:  # noqa: ANN401 - a Module
        """Return whether a forward with gradients is one of training, not of an evaluation.

        An evaluation is in evaluation mode. So is the training of some jobs, to keep statistics and
        turn dropout off: the mode before the last backward decides.
        """
        self.forward_mode = module.training
        return module.training or not self.backward_mode

    def next_backward(self) -> int:
        """Return the micro-batch of the next backward, if they are counted."""
        is_of_this_step = self._counted_step == self.recorder.step_number
        return self._counts.get(SpanKind.BACKWARD, 0) if is_of_this_step else 0

    def on_optimizer_step(self, *about: object) -> None:
        """Check that a backward was captured before the optimizer stepped.

        If none ever was (`torch.autograd.grad` is not captured), the step's record says that its
        backwards are missing. Else the time would be taken for idle time.
        """
        if self.sees_backwards or not self.guard.active:
            return
        try:
            self._check_backwards()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.guard.fail(problem)

    def _check_backwards(self) -> None:
        recorder = self.recorder
        is_captured = any(kind is SpanKind.BACKWARD for _, kind in self._heads)
        self.sees_backwards = is_captured or recorder.has_begun(SpanKind.BACKWARD)
        is_of_this_step = self._counted_step == recorder.step_number
        if self.sees_backwards or not is_of_this_step or not self._counts.get(SpanKind.FORWARD):
            return
        recorder.missing_kinds.add_in_step(SpanKind.BACKWARD)
        if not self._has_reported:
            self._has_reported = True
            recorder.event("tracer", UNSEEN_BACKWARD, {})

    def span(
        self,
        name: str,
        kind: SpanKind,
        *,
        microbatch: object,
        chunk: int,
        on: Iterable[object] = (),
    ) -> SpanContext:
        """Return a span of work on one micro-batch.

        Communications and waits inside belong to that micro-batch and chunk.

        Args:
            microbatch: Position in the step; if None, the next of this kind in the step.
            chunk: Model chunk on this rank, unless `ThreadState.place` has another.
            on: Tensors or devices of the work; the first one selects the clock.
        """
        # One long function: after a forward nothing of it is in the caches, and each call costs a
        # miss (decision 50).
        state = self.thread_state
        if state.in_span:
            return NOOP_SPAN
        recorder = self.recorder
        try:
            if state.place is not None:
                pipelined, chunk = state.place
                microbatch = pipelined if microbatch is None else microbatch
            if microbatch is not None:
                index = recorder.index(microbatch)
            else:  # the next one: count those of its kind in this step
                if recorder.step_number != self._counted_step:
                    self._counted_step = recorder.step_number
                    self._counts.clear()
                index = self._counts.get(kind, 0)
                self._counts[kind] = index + 1
            head = self._heads.get((name, kind))
            if head is None:
                head = self._heads[name, kind] = recorder.head(name, kind)
            if recorder.sampling.left_out >> (head >> 8 & 0xFF) & 1:
                return _PlacedSpan(self, NOOP_SPAN, index, chunk)
            timing = recorder.device_timing
            device = None if timing is NO_DEVICE_TIMING else timing.device_of(on)
            if device is None:
                return ComputeSpan(state, recorder, recorder.lanes.current(), head, index, chunk)
            inner = DeviceSpan(recorder, head, device=device, microbatch=index, chunk=chunk)
            return _PlacedSpan(self, inner, index, chunk)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            recorder.swallow(problem)
            recorder.missing_kinds.add_in_step(kind)
            return NOOP_SPAN


class _PlacedSpan:
    """Sets the lane's place around a span on a device or a span that is not recorded."""

    __slots__ = ("_chunk", "_lane", "_microbatch", "_recorder", "_span", "_thread_state")

    def __init__(
        self, compute: ComputeCapture, span: SpanContext, microbatch: int, chunk: int
    ) -> None:
        self._recorder = compute.recorder
        self._thread_state = compute.thread_state
        self._span = span
        self._microbatch = microbatch
        self._chunk = chunk
        self._lane: Lane = compute.recorder.lane()

    def __enter__(self) -> _PlacedSpan:
        try:
            self._lane.set_place(self._lane.step, self._microbatch, self._chunk)
            self._span.__enter__()
            self._thread_state.in_span = True  # last: after an error no `__exit__` follows
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._lane.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread_state.in_span = False
        try:
            self._span.__exit__(exc_type, exc, traceback)
            self._lane.set_place(self._recorder.step_number, NONE, NONE)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._lane.swallow(problem)


def capture_forward(
    compute: ComputeCapture,
    model: Any,  # noqa: ANN401 - a Module
    on_forward: Callable[..., None],
    *,
    is_root: bool = True,
) -> Callable[[], None]:
    """Record a span of each forward of ``model``. With gradients it counts as a micro-batch.

    Not if it is in evaluation mode and was last trained in training mode. A model inside a wrapper
    for data parallelism is followed too: evaluations call it without the wrapper. A forward in
    training mode of a module that is not the root is a part of the next micro-batch that ends.

    Args:
        on_forward: Called before the span begins, so that a step that begins with this forward
            contains it: with the module, its arguments, its keyword arguments, and by keyword
            ``is_microbatch``, whether the forward counts as one.

    Returns:
        A function that ends this.
    """
    guard, recorder, state = compute.guard, compute.recorder, compute.thread_state

    # One function for all listeners: after a backward nothing of it is in the processor's caches,
    # so each line is slower than it looks.
    def begin(module: Any, args: Any, kwargs: Any) -> SpanContext:  # noqa: ANN401
        if state.in_span:
            return NOOP_SPAN
        has_gradients = torch.is_grad_enabled()
        is_microbatch = is_root and has_gradients and compute.is_training(module)
        on_forward(module, args, kwargs, is_microbatch=is_microbatch)
        if not guard.active:
            return NOOP_SPAN
        compute.optimizer.pause()
        try:
            is_timed = recorder.device_timing is not NO_DEVICE_TIMING
            number = None if is_microbatch else NONE
            if not is_root and has_gradients and module.training:
                number = compute.next_backward()
            return compute.span(
                "forward",
                SpanKind.FORWARD,
                microbatch=number,
                chunk=0,
                on=itertools.chain(module.parameters(), args) if is_timed else (),
            )
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            guard.fail(problem)
            return NOOP_SPAN

    # The span contains what FSDP gathers for the forward.
    models = wrapped_models(model) if is_root else [model]
    followed = [follow_calls(one, begin) for one in models]

    def stop() -> None:
        for stop_one in followed:
            stop_one()

    return stop


def wrapped_models(model: Any) -> list[Any]:  # noqa: ANN401 - Modules
    """Return the model, and the modules inside its wrappers of data parallelism."""
    models = [model]
    while list(models[-1]._modules) == ["module"]:
        models.append(models[-1]._modules["module"])
    return models


def parts_to_follow(root: Any, others: list[Any]) -> list[Any]:  # noqa: ANN401 - Modules
    """Return the other modules whose forwards are work of the job, and their direct parts.

    They teach, encode, judge or discriminate; a script may call a method that calls parts only
    (`vae.encode`). The `MAX_OTHERS` with most parameters, without those of a class that the root
    has inside, for then each call of that class would pay (`follow_calls`).
    """
    root = wrapped_models(root)[-1]
    inside = {type(part) for part in root.modules() if part is not root}
    sizes = {id(it): sum(1 for _ in it.parameters()) for it in others}
    found: list[Any] = []
    for other in sorted(others, key=lambda it: -sizes[id(it)])[:MAX_OTHERS]:
        models = wrapped_models(other)
        parts = [part for part in models[-1]._modules.values() if part is not None]
        found += [*models, *parts[:MAX_PARTS]]
    return [module for module in found if type(module) not in inside]


def capture_backward(compute: ComputeCapture, patches: Patches, steps: StepCounter) -> None:
    """Record a span of each call of `torch.autograd.backward`, and so of `Tensor.backward`.

    The function that both call is replaced: the compilers of torch know the former by its identity.

    Args:
        steps: Called before the span begins, so that a step that begins here contains it.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        traced = traced_backward(compute, steps, original)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            is_backward = kwargs.get("accumulate_grad")  # else it is `torch.autograd.grad`
            return (traced if is_backward else original)(*args, **kwargs)

        return run

    patches.wrap(torch.autograd.graph, "_engine_run_backward", wrap)


def traced_backward(
    compute: ComputeCapture, steps: StepCounter, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``original``, whose first argument is the root of a backward, with a span."""
    recorder = compute.recorder

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if steps.is_due:
            steps.on_next_work(is_backward=True)
        if torch.compiler.is_compiling() or compute.thread_state.in_span:
            compute.sees_backwards = True
            return original(*args, **kwargs)
        compute.backward_mode = compute.forward_mode
        watch = compute.on_backward
        call = original if watch is None else watch(original, args, kwargs)
        compute.optimizer.pause()
        on: Any = ()
        if recorder.device_timing is not NO_DEVICE_TIMING:
            roots = args[0] if args else kwargs.get("tensors", ())
            on = roots if isinstance(roots, list | tuple) else (roots,)
        try:
            with compute.span("backward", SpanKind.BACKWARD, microbatch=None, chunk=0, on=on):
                return call(*args, **kwargs)
        finally:
            compute.optimizer.resume()
            steps.on_backward_end()

    return backward
