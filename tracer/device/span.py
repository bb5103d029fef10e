"""Spans of work that a thread issues to a device, timed on the device."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING

from ..record.device_timer import NO_DEVICE_TIMING
from ..span import NONE, SpanFlag

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ..native.host_span import CancellableSpan
    from ..native.lane_state import OpenEntry
    from ..record.recorder import Recorder
    from ..span import SpanKind
    from .backend import Mark
    from .clock import DeviceClock

# Plain integers, where a head word has its flags.
ON_DEVICE = (SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN) << 16
ALL_FLAGS = 0xFFFF << 16
ON_DEVICE_ERROR = ON_DEVICE | SpanFlag.ERROR << 16


def timed_span(
    recorder: Recorder,
    name: str,
    kind: SpanKind,
    *,
    on: Iterable[object],
) -> CancellableSpan:
    """Return a span on the clock of the device that does the work; the caller enters and leaves it.

    Args:
        on: Tensors or devices of the work; the first one selects the device.
    """
    timing = recorder.device_timing
    device = None if timing is NO_DEVICE_TIMING else timing.device_of(on)
    if device is None or not recorder.is_recorded(kind):
        return recorder.host_span(name, kind)
    return DeviceSpan(recorder, recorder.head(name, kind), device=device)


class DeviceSpan:
    """Marks the current stream when the span is entered and left.

    The span is outermost on the track of that stream; its launch is when the host entered it. If a
    mark cannot be made, the span is counted as lost: the time to issue work does not say how long
    the work took. Once it is left, it is pending until the device has reached its end.
    """

    __slots__ = (
        "_begin",
        "_chunk",
        "_device",
        "_first",
        "_flags",
        "_head",
        "_lane",
        "_launch_ns",
        "_microbatch",
        "_opened",
        "_place",
        "_recorder",
        "last",
    )

    _first: Mark
    last: Mark
    """At its end; on another stream if the job has changed streams inside."""

    def __init__(
        self,
        recorder: Recorder,
        head: int,
        *,
        device: int,
        microbatch: int = NONE,
        chunk: int = NONE,
    ) -> None:
        """Make a span that is not entered yet.

        Args:
            head: Its name and kind, from `Recorder.head`.
            chunk: Index of the virtual stage.
        """
        self._recorder = recorder
        self._lane = recorder.lane()
        self._head = head & ~ALL_FLAGS
        self._device = device
        self._microbatch = microbatch
        self._chunk = chunk
        self._begin: Mark | None = None
        self._opened: OpenEntry | None = None

    def __enter__(self) -> DeviceSpan:
        lane = self._lane
        try:
            self._launch_ns = monotonic_ns()
            if not lane.depth:
                self._opened = lane.open(self._launch_ns, self._head)
            lane.depth += 1
            timing = self._recorder.device_timing
            self._begin = timing.mark(self._device)
            if self._begin is not None:
                timing.begin_compute(self._begin)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            lane.swallow(problem)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave()
            self._flags = ON_DEVICE if exc_type is None else ON_DEVICE_ERROR
            if self._begin is not None:
                self._end(self._begin)
        except Exception as problem:  # noqa: BLE001 - promise 1: harmless
            self._lane.swallow(problem)

    def cancel(self) -> None:
        """Leave the span without recording it."""
        self._leave()
        if self._begin is not None:
            timing = self._recorder.device_timing
            timing.end_compute(self._begin)
            timing.release(self._begin)

    def is_done(self) -> bool:
        """Return whether the device has reached both marks."""
        begin, end = self._first, self.last
        return end.event.query() and (begin.stream == end.stream or begin.event.query())

    def resolve(self, clock: DeviceClock) -> None:
        """Write the span."""
        timing, begin, end = self._recorder.device_timing, self._first, self.last
        start_ns, duration_ns = clock.reached_ns(begin), clock.elapsed_ns(begin, end)
        timing.release(begin)
        timing.release(end)
        if duration_ns < 0:
            timing.lose()
            return
        head, lane = self._head | self._flags, self._recorder.comm_lane
        lane.append(head, start_ns, duration_ns, self._place, self._launch_ns, 0)

    def lose(self) -> None:
        """Count the span as lost."""
        self._recorder.device_timing.lose()

    def _leave(self) -> None:
        self._lane.depth -= 1
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _end(self, begin: Mark) -> None:
        timing = self._recorder.device_timing
        timing.end_compute(begin)
        end = timing.mark(self._device)
        if end is None:
            timing.release(begin)
            return
        self._first, self.last = begin, end
        self._place = self._lane.place_of(
            self._microbatch, self._chunk, track_id=timing.track_id(begin)
        )
        timing.push(self)
