"""Spans of forward and backward, whose micro-batch and chunk the spans inside them inherit."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..device.span import DeviceSpan
from ..native.choice import ComputeSpan
from ..record.device_timer import NO_DEVICE_TIMING
from ..record.interface import NOOP_SPAN
from ..record.steps import COMPUTE_KINDS
from ..span import NONE, SpanKind
from .guard import Guard
from .optimizer import OptimizerSpans

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from ..native.host_span import CancellableSpan
    from ..patches import Patches
    from ..record.lane import Lane
    from ..record.recorder import Recorder
    from .optimizer import StepCounter

UNSEEN_BACKWARD = (
    "an optimizer stepped, but no backward was recorded: only Tensor.backward and"
    " torch.autograd.backward are captured. Put"
    " tracer.span('backward', kind=SpanKind.BACKWARD) around other calls"
)


OnBackward = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Callable[..., Any]]


class ThreadState(threading.local):
    """State of one thread."""

    in_span = False
    """Whether the thread is in a compute span."""

    place: tuple[int, int] | None = None
    """Micro-batch and chunk of the thread's next work if known; if None, they are counted."""

    forward: tuple[int, CancellableSpan] | None = None
    """The `id` of the root module whose forward is open, and its span."""


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
    ) -> CancellableSpan:
        """Return a span of work on one micro-batch.

        Communications and waits inside belong to that micro-batch and chunk.

        Args:
            name: Name of the span.
            kind: Kind of the work.
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
                known, chunk = state.place
                microbatch = known if microbatch is None else microbatch
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
        self, compute: ComputeCapture, span: CancellableSpan, microbatch: int, chunk: int
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

    def cancel(self) -> None:
        """Leave the span without recording it."""
        self._thread_state.in_span = False
        try:
            self._span.cancel()
            self._lane.set_place(self._recorder.step_number, NONE, NONE)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._lane.swallow(problem)


class OnForward(Protocol):
    """Function that is called when a forward begins."""

    def __call__(
        self,
        module: Any,  # noqa: ANN401 - a Module
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        /,
        *,
        is_microbatch: bool,
    ) -> None:
        """Handle the forward."""
        ...


class ForwardHooks(NamedTuple):
    """The capture of one module's forwards."""

    begin: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    """Begins the span of a forward that was already called when the module was found."""

    remove: Callable[[], None]
    """Removes the hooks."""


def capture_forward(
    compute: ComputeCapture,
    model: Any,  # noqa: ANN401 - a Module
    on_forward: OnForward,
) -> ForwardHooks:
    """Record a span of each forward of ``model``. With gradients it counts as a micro-batch.

    Not if the model is in evaluation mode and was last trained in training mode. A model inside a
    wrapper for data parallelism is followed too: evaluations call it without the wrapper.

    Args:
        compute: Opens the spans.
        model: The root module.
        on_forward: Called before the span begins, so that a step that begins with this forward
            contains it. Its arguments are the module, its arguments, its keyword arguments and
            whether the forward counts as a micro-batch.
    """
    guard, recorder, state = compute.guard, compute.recorder, compute.thread_state

    # One hook for all listeners: after a backward nothing of the hooks is in the processor's
    # caches, so each line is slower than it looks.
    def before(module: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        # The compiler must find nothing here that breaks its graph.
        if torch.compiler.is_compiling() or (state.in_span and not _was_interrupted(compute)):
            return
        is_microbatch = torch.is_grad_enabled() and compute.is_training(module)
        on_forward(module, args, kwargs, is_microbatch=is_microbatch)
        if not guard.active:
            return
        compute.optimizer.pause()
        try:
            is_timed = recorder.device_timing is not NO_DEVICE_TIMING
            span = compute.span(
                "forward",
                SpanKind.FORWARD,
                microbatch=None if is_microbatch else NONE,
                chunk=0,
                on=itertools.chain(module.parameters(), args) if is_timed else (),
            )
            # Not the module itself: an interrupted forward never ends, and must not keep a model
            # alive.
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
        # First, so that the span contains what FSDP gathers for the forward.
        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        model.register_forward_hook(after, always_call=True),
        *_follow_wrapped(model, before, after, state),
    ]

    def remove_hooks() -> None:
        for handle in handles:
            handle.remove()

    return ForwardHooks(before, remove_hooks)


def _follow_wrapped(
    model: Any,  # noqa: ANN401 - a Module
    before: Callable[..., None],
    after: Callable[..., None],
    state: ThreadState,
) -> Iterator[Any]:
    """Follow the modules inside the wrappers of data parallelism; yield the hooks.

    A compiler would look into the hooks of a module that compiles itself, which gets none.
    """

    def before_inside(module: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        if not torch.compiler.is_compiling() and not state.in_span:
            before(module, args, kwargs)

    while list(model._modules) == ["module"]:
        model = model._modules["module"]
        if getattr(model, "_compiled_call_impl", None) is not None:
            return
        yield model.register_forward_pre_hook(before_inside, prepend=True, with_kwargs=True)
        yield model.register_forward_hook(after, always_call=True)


def _was_interrupted(compute: ComputeCapture) -> bool:
    """Return whether an exception ended the open forward without a call of torch's hook.

    Torch calls no hook for an exception that is not an `Exception`, such as `KeyboardInterrupt`,
    which a notebook survives. When the forward ended is unknown: it is not recorded, and the step's
    record says so.
    """
    opened = compute.thread_state.forward
    if opened is None:
        return False  # a span of a pipeline schedule, which ends it in any case
    try:
        caller = sys._getframe(1).f_back
        if caller is None or "self" not in caller.f_locals:
            return False  # not called by a module: nothing to compare with
        calls = caller.f_code
        while (caller := caller.f_back) is not None:
            if caller.f_code is calls and id(caller.f_locals.get("self")) == opened[0]:
                return False  # the module is still running: a nested call
        compute.thread_state.forward = None
        opened[1].cancel()
        compute.recorder.missing_kinds.add_in_step(SpanKind.FORWARD)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        compute.guard.fail(problem)
        return False
    return True


def capture_backward(compute: ComputeCapture, patches: Patches, steps: StepCounter) -> None:
    """Record a span of each call of `torch.autograd.backward`, and so of `Tensor.backward`.

    Args:
        compute: Opens the spans.
        patches: Keeps the replaced function.
        steps: Called before the span begins, so that a step that begins here contains it.
    """
    wrap = functools.partial(traced_backward, compute, steps)
    patches.wrap(torch.autograd, "backward", wrap)


def traced_backward(
    compute: ComputeCapture, steps: StepCounter, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``original``, whose first argument is the root of a backward, with a span."""
    recorder = compute.recorder

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if steps.is_due:
            steps.on_next_work()
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

    return backward
