"""The span that ``with`` enters: the hottest code of the project.

Attributes instead of arguments, one class a case instead of conditions, and
everything that a call would hide written out: `benchmarks/tracer_host_span.py`
tells what each of these is worth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.clock import monotonic_ns
from tracer.lane import HEAD, MAX_DEPTH
from tracer.span import SpanFlag
from tracer.spool import HEADER_BYTES, RECORD_BYTES

if TYPE_CHECKING:
    from types import TracebackType

    from tracer.lane import Lane
    from tracer.segment import OpenEntry, Segment

ERROR_HEAD = int(SpanFlag.ERROR) << 16
"""The flag in a `tracer.lane.head_word`."""

_pack_into = HEAD.pack_into


class HostSpan:
    """A span of a thread, timed by the host clock. Whoever makes it sets ``lane`` and ``head``."""

    __slots__ = ("head", "lane", "opened", "place", "start_ns")

    lane: Lane
    head: int
    place: bytes
    opened: OpenEntry | None
    start_ns: int

    def __enter__(self) -> HostSpan:
        lane = self.lane
        try:
            self.opened = None
            self.place = lane.place
            self.start_ns = start_ns = monotonic_ns()
            if not lane.depth:
                self.opened = lane.open(start_ns, self.head)
            lane.depth += 1
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lane = self.lane
        try:
            start_ns = self.start_ns
            duration_ns = monotonic_ns() - start_ns
            lane.depth = depth = lane.depth - 1
            segment = lane.segment
            row = segment.claim()
            head = self.head if exc_type is None else self.head | ERROR_HEAD
            if row < segment.capacity and depth < MAX_DEPTH:
                _pack_into(
                    segment.buffer,
                    row * RECORD_BYTES + HEADER_BYTES,
                    head,
                    start_ns,
                    duration_ns,
                    self.place,
                    start_ns,
                    depth,
                    row + 1,  # the commit word, written last
                )
            else:
                self._write_elsewhere(segment, row, head, duration_ns, depth)
            if self.opened is not None:
                self.opened.close()
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)

    def _write_elsewhere(
        self, segment: Segment, row: int, head: int, duration_ns: int, depth: int
    ) -> None:
        """Write where the short way cannot: past the end of a segment, or very deep."""
        about = (head, self.start_ns, duration_ns, self.place, self.start_ns, depth)
        if row < segment.capacity:
            self.lane.write(segment, row, *about)
        else:
            self.lane.append(*about)

    def cancel(self) -> None:
        """Leave the span without recording it."""
        self.lane.depth -= 1
        if self.opened is not None:
            self.opened.close()


class PlacedSpan(HostSpan):
    """A span that says itself which micro-batch and chunk it belongs to."""

    __slots__ = ("chunk", "microbatch")

    microbatch: int
    chunk: int

    def __enter__(self) -> PlacedSpan:
        super().__enter__()
        try:
            self.place = self.lane.place_of(self.microbatch, self.chunk)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self.lane.swallow(problem)
        return self


class UnkeptSpan(HostSpan):
    """A span that is not recorded: its kind is left out of this step."""

    __slots__ = ()

    def __enter__(self) -> UnkeptSpan:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def cancel(self) -> None:
        """Do nothing."""


def host_span(lane: Lane, head: int) -> HostSpan:
    """Return a span that inherits its lane's place.

    Args:
        lane: The calling thread's.
        head: `tracer.lane.head_word` of its record.
    """
    span = HostSpan()
    span.lane = lane
    span.head = head
    return span


def placed_span(lane: Lane, head: int, microbatch: int, chunk: int) -> PlacedSpan:
    """Return a span of a micro-batch or chunk of its own; `NONE` inherits the lane's."""
    span = PlacedSpan()
    span.lane = lane
    span.head = head
    span.microbatch = microbatch
    span.chunk = chunk
    return span
