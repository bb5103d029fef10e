"""Spans of forward and backward, and the place that what lies inside them inherits."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..device.span import DeviceSpan
from ..native.choice import ComputeSpan
from ..record.device_timer import NO_DEVICE_TIMING
from ..record.interface import NOOP_SPAN
from ..record.steps import COMPUTE_KINDS
from ..span import NONE, SpanKind
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType, TracebackType

    from ..native.host_span import CancellableSpan
    from ..patches import Patches
    from ..record.lane import Lane
    from ..record.recorder import Recorder
    from .optimizer import StepCounter

UNSEEN_BACKWARD = (
    "an optimizer has stepped and no backward was seen: it is recorded where the job calls"
    " Tensor.backward or torch.autograd.backward; around another call put"
    " tracer.span('backward', kind=SpanKind.BACKWARD)"
)


class ThreadState(threading.local):
    """What a thread is at."""

    in_span = False
    """Whether it is in a compute span."""

    place: tuple[int, int] | None = None
    """Micro-batch and chunk of what it does next, where somebody knows; else they are counted."""

    forward: tuple[int, CancellableSpan] | None = None
    """The `id` of the root module whose forward is recorded, and its span."""


class ComputeCapture:
    """Opens compute spans; one inside another is the same work seen twice, and is not recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.guard = Guard(recorder, "compute", COMPUTE_KINDS)
        """Of the hooks that open its spans."""

        self.thread_state = ThreadState()
        """What the calling thread is at."""

        self.recorder = recorder
        self._heads: dict[tuple[str, SpanKind], int] = {}
        self._counted_step = NONE
        self._counts: dict[SpanKind, int] = {}
        self.sees_backwards = False
        """Whether a backward of the job's came by here."""

        self._has_reported = False

    def on_optimizer_step(self, *about: object) -> None:
        """Note that an optimizer has stepped: by gradients that some backward made.

        Where none was ever seen (`torch.autograd.grad` is not captured), the step's record says
        that it is missing: else the time that it took would pass for idleness.
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
            name: What the table calls it.
            kind: What is done.
            microbatch: Position in the step; None: the next of this kind in it.
            chunk: Model chunk on this rank, unless `inside` has another.
            on: Tensors that the work is done on, or devices; the first tells whose clock counts.
        """
        # All in one: what is touched anew in each forward costs a miss (decision 50).
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
            else:  # the next: how many of its kind this step has seen before
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
            inner = DeviceSpan(recorder, name, kind, device=device, microbatch=index, chunk=chunk)
            return _PlacedSpan(self, inner, index, chunk)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            recorder.swallow(problem)
            recorder.missing_kinds.add_in_step(kind)
            return NOOP_SPAN


class _PlacedSpan:
    """Sets its lane's place around another span: one on a device, or one that is not recorded."""

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
            self._thread_state.in_span = True  # last: no `__exit__` follows what is raised here
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
    compute: ComputeCapture,
    model: Any,  # noqa: ANN401 - a Module
    on_forward: OnForward,
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
        on_forward(module, args, kwargs, is_microbatch=is_microbatch)
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

    def remove_hooks() -> None:
        for handle in handles:
            handle.remove()

    return remove_hooks


def _was_interrupted(compute: ComputeCapture) -> bool:
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


def capture_backward(compute: ComputeCapture, patches: Patches, steps: StepCounter) -> None:
    """Make a span of each call of `torch.autograd.backward`, and so of `Tensor.backward`.

    Args:
        compute: What opens the spans.
        patches: Where the replaced function is noted.
        steps: Told before the span begins: so a step that begins here holds it.
    """
    wrap = functools.partial(traced_backward, compute, steps)
    patches.wrap(torch.autograd, "backward", wrap)


def traced_backward(
    compute: ComputeCapture, steps: StepCounter, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``original``, whose first argument a backward begins at, with a span of each call."""
    recorder = compute.recorder

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if steps.is_due:
            steps.on_next_work()
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
