"""The span of a forward or backward, by the host's clock."""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from ..record.interface import SpanContext
from ..span import NONE
from .lane_state import ERROR_HEAD

if TYPE_CHECKING:
    from types import TracebackType

    from ..record.lane import Lane
    from ..record.recorder import Recorder
    from .lane_state import OpenEntry


class ComputeContext(SpanContext, Protocol):
    """A span of compute that may also be given up."""

    def cancel(self) -> None:
        """Leave it, once, without recording it."""
        ...


class Inside(threading.local):
    """What a thread is at."""

    yes = False
    """Whether it is in a compute span."""

    place: tuple[int, int] | None = None
    """Micro-batch and chunk of what it does next, where somebody knows; else they are counted."""

    forward: tuple[int, ComputeContext] | None = None
    """The `id` of the root module whose forward is recorded, and its span."""


class ComputeSpan:
    """A span by the host's clock that also sets its lane's place, before it begins: so it has it.

    All in one object, made without a call: between two of its lines the job streams its
    weights, and whatever is touched anew costs a miss (docs/decisions/0051-a-cold-step.md).
    """

    __slots__ = (
        "chunk",
        "head",
        "inside",
        "lane",
        "microbatch",
        "opened",
        "place",
        "recorder",
        "start_ns",
    )

    inside: Inside
    recorder: Recorder
    lane: Lane
    head: int
    microbatch: int
    chunk: int
    opened: OpenEntry | None
    place: bytes
    start_ns: int | None

    def __enter__(self) -> ComputeSpan:
        lane = self.lane
        try:
            lane.set_place(lane.step, self.microbatch, self.chunk)
            self.place = lane.place
            start_ns = monotonic_ns()
            if not lane.depth:
                self.opened = lane.open(start_ns, self.head)
            # Last, and without a call: no `__exit__` follows what a handler raises above.
            lane.depth += 1
            self.start_ns = start_ns
            self.inside.yes = True
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.inside.yes = False
        lane, start_ns = self.lane, self.start_ns
        try:
            if start_ns is None:  # an error of ours, counted then
                lane.set_place(self.recorder.step_number, NONE, NONE)
                return
            end_ns = monotonic_ns()
            lane.depth = depth = lane.depth - 1
            try:
                head = self.head if exc_type is None else self.head | ERROR_HEAD
                lane.write(head, start_ns, end_ns - start_ns, self.place, start_ns, depth)
            finally:  # also where a handler of the job has raised
                if self.opened is not None:
                    self.opened.close()
                lane.set_place(self.recorder.step_number, NONE, NONE)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)

    def cancel(self) -> None:
        """Leave the span without recording it."""
        self.inside.yes = False
        lane = self.lane
        try:
            if self.start_ns is not None:
                lane.depth -= 1
            if self.opened is not None:
                self.opened.close()
            lane.set_place(self.recorder.step_number, NONE, NONE)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)


def compute_span(
    inside: Inside, recorder: Recorder, lane: Lane, head: int, microbatch: int, chunk: int, /
) -> ComputeSpan:
    """Return a span that also sets its lane's place.

    Args:
        inside: Told while it lasts.
        recorder: Whose step goes on once it is over.
        lane: The calling thread's.
        head: `tracer.record.lane.head_word` of its record.
        microbatch: Which it belongs to, or `NONE`.
        chunk: Likewise.
    """
    span = ComputeSpan()
    span.inside, span.recorder, span.lane = inside, recorder, lane
    span.head, span.microbatch, span.chunk = head, microbatch, chunk
    span.opened = span.start_ns = None
    return span
