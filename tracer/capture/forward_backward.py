"""Spans of forward and backward, and the place that what lies inside them inherits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..device.span import DeviceSpan
from ..native.choice import ComputeSpan
from ..record.device_timer import NO_DEVICE_TIMING
from ..record.interface import NOOP_SPAN
from ..record.steps import COMPUTE_KINDS
from ..span import NONE, SpanKind
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ..native.host_span import CancellableSpan
    from ..record.lane import Lane
    from ..record.recorder import Recorder


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


class Compute:
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

        self._has_told = False

    def stepped(self, *about: object) -> None:
        """Note that an optimizer has stepped: by gradients that some backward made.

        Where none was ever seen (`torch.autograd.grad` is not captured), the step's record says
        that it is missing: else the time that it took would pass for idleness.
        """
        if self.sees_backwards or not self.guard.active:
            return
        try:
            self._look_for_backwards()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.guard.fail(problem)

    def _look_for_backwards(self) -> None:
        recorder = self.recorder
        is_captured = any(kind is SpanKind.BACKWARD for _, kind in self._heads)
        self.sees_backwards = is_captured or recorder.has_begun(SpanKind.BACKWARD)
        is_of_this_step = self._counted_step == recorder.step_number
        if self.sees_backwards or not is_of_this_step or not self._counts.get(SpanKind.FORWARD):
            return
        recorder.missing_kinds.add_in_step(SpanKind.BACKWARD)
        if not self._has_told:
            self._has_told = True
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
                return _SpanInPlace(self, NOOP_SPAN, index, chunk)
            timing = recorder.device_timing
            device = None if timing is NO_DEVICE_TIMING else timing.device_of(on)
            if device is None:
                return ComputeSpan(state, recorder, recorder.lanes.current(), head, index, chunk)
            inner = DeviceSpan(recorder, name, kind, device=device, microbatch=index, chunk=chunk)
            return _SpanInPlace(self, inner, index, chunk)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            recorder.swallow(problem)
            recorder.missing_kinds.add_in_step(kind)
            return NOOP_SPAN


class _SpanInPlace:
    """Sets its lane's place around another span: one on a device, or one that is not recorded."""

    __slots__ = ("_chunk", "_lane", "_microbatch", "_recorder", "_span", "_thread_state")

    def __init__(
        self, compute: Compute, span: CancellableSpan, microbatch: int, chunk: int
    ) -> None:
        self._recorder = compute.recorder
        self._thread_state = compute.thread_state
        self._span = span
        self._microbatch = microbatch
        self._chunk = chunk
        self._lane: Lane = compute.recorder.lane()

    def __enter__(self) -> _SpanInPlace:
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
