"""Spans of forward and backward, and the place that what lies inside them inherits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tracer.capture.guard import Guard
from tracer.device.span import timed_span
from tracer.noop import NOOP_SPAN
from tracer.span import NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from tracer.device.span import DeviceSpan
    from tracer.host_span import HostSpan
    from tracer.lane import Lane
    from tracer.protocol import SpanContext
    from tracer.recorder import Recorder


class _Inside(threading.local):
    yes = False


class Compute:
    """Opens compute spans; one inside another is the same work seen twice, and is not recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.guard = Guard(recorder, "compute")
        """Of the hooks that open its spans."""

        self._recorder = recorder
        self._inside = _Inside()
        self._counted_step = NONE
        self._counts: dict[SpanKind, int] = {}

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
            name: What the table calls it.
            kind: What is done.
            microbatch: Position in the step.
            chunk: Model chunk on this rank.
            on: Tensors that the work is done on, or devices; the first tells whose clock counts.
        """
        if self._inside.yes:
            return NOOP_SPAN
        try:
            recorder = self._recorder
            index = recorder.index(microbatch)
            inner = timed_span(recorder, name, kind, on=on, microbatch=index, chunk=chunk)
            return ComputeSpan(recorder, self._inside, inner, index, chunk)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._recorder.swallow(problem)
            return NOOP_SPAN

    @property
    def inside(self) -> bool:
        """Whether this thread is in a compute span."""
        return self._inside.yes

    def count(self, kind: SpanKind) -> int:
        """Return how many blocks of ``kind`` this step has seen before, and count one more."""
        step = self._recorder.step_number
        if step != self._counted_step:
            self._counts.clear()
            self._counted_step = step
        index = self._counts.get(kind, 0)
        self._counts[kind] = index + 1
        return index


class ComputeSpan:
    """A span that also sets the place of its thread's lane, before it begins: so it has it too."""

    __slots__ = ("_chunk", "_inside", "_lane", "_microbatch", "_recorder", "_span")

    def __init__(
        self,
        recorder: Recorder,
        inside: _Inside,
        span: HostSpan | DeviceSpan,
        microbatch: int,
        chunk: int,
    ) -> None:
        self._recorder = recorder
        self._inside = inside
        self._span = span
        self._microbatch = microbatch
        self._chunk = chunk
        self._lane: Lane = recorder.lane()

    def __enter__(self) -> ComputeSpan:
        try:
            self._lane.set_place(self._lane.step, self._microbatch, self._chunk)
            self._span.__enter__()
            self._inside.yes = True  # last: no `__exit__` follows what is raised here
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._lane.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inside.yes = False
        try:
            self._span.__exit__(exc_type, exc, traceback)
            self._lane.set_place(self._recorder.step_number, NONE, NONE)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._lane.swallow(problem)
